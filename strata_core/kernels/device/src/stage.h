// Rows of weights on their way to shared memory: a warp copies whole rows, one behind the other, in
// pieces of 16 bytes that keep their place within a line of 128. (Padded off it they halve what mapped
// memory gives: docs/experiments.md, section 3.) entry.py says how much memory that takes.
#ifndef STRATA_STAGE_H
#define STRATA_STAGE_H

#define ROOM 10240
#define MOST_EMBEDDED 32768

DEV int slot_bytes(i64 stride, int count) { return (int)((count * stride + 254) / 128 * 128); }

// Rows that a warp stages at a time; 0 where not even one fits.
DEV int batch_of(i64 stride) {
  for (int n = 8; n; n >>= 1)
    if (n * stride + 127 <= ROOM) return n;
  return 0;
}

// Bytes from `from` to a slot; where they begin there. Ends that are no whole pieces go by bytes, so
// that nothing beyond the rows is read.
DEV const u8* stage(u8* slot, const u8* from, int nbytes, int lane) {
  int begin = (int)((size_t)from & 127), end = begin + nbytes;
  int whole = (begin + 15) & ~15, rest = end & ~15;
  const u8* line = from - begin;
  if (lane * 16 >= whole && lane * 16 < rest) copy16(slot + lane * 16, line + lane * 16);
#pragma unroll 8
  for (int i = lane * 16 + 512; i < rest; i += 512) copy16(slot + i, line + i);
  if (begin != whole || end != rest) {
    int k = begin + lane, n = rest + lane;
    if (k < whole && k < end) slot[k] = line[k];
    if (n >= whole && n < end) slot[n] = line[n];
  }
  copies_sent();
  return slot + begin;
}

#endif
