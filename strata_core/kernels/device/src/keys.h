// docs/arithmetic.md, sections 8 and 9: keys and values as they are stored, tiles and splits.
#ifndef STRATA_KEYS_H
#define STRATA_KEYS_H

#ifdef KV_fp32
typedef float Stored;
DEV float stored(const Stored* p, const u16* scales, size_t i) { return p[i]; }
#endif
#ifdef KV_fp16
typedef u16 Stored;
DEV float stored(const Stored* p, const u16* scales, size_t i) { return half_of(p[i]); }
#endif
#ifdef KV_int8
typedef i8 Stored;
DEV float stored(const Stored* p, const u16* scales, size_t i) {
  return mul((float)p[i], half_of(scales[i >> 5]));
}
#endif

#define PARTIAL_HEAD 8
#define SPLIT 256
#define TILE 32
#define PARTS ((HEAD_DIM + 31) / 32)

#endif
