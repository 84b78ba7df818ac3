// layout.py's records as this side sees them.
#ifndef STRATA_LAYOUT_H
#define STRATA_LAYOUT_H

#define MOST_TOKENS 8
enum { HIT = 0, LINK = 1, HOST = 2, HELPER = 3 };

struct Entry {
  u64 gate, up, down, row;
  int expert, lane, first, unused;
};

struct Cell {
  u64 slot[3], alias[3];
  int helper, unused[3];
};

struct Wave {
  u64 gate, up, down;
  int expert, unused;
};

struct Place {
  u64 k, v, k_scales, v_scales;
};

#endif
