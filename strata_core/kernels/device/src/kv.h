// Keys and values as they are stored, section 8: reading one, keeping one.
#ifndef STRATA_KV_H
#define STRATA_KV_H

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

#if defined(KV_fp32) || defined(KV_fp16) || defined(KV_int8)
DEV bool keep(Stored* to, u16* scales, size_t at, float x) {
#ifdef KV_fp32
  to[at] = x;
  return finite(x);
#endif
#ifdef KV_fp16
  u16 h = to_half(x);
  to[at] = h;
  return finite(half_of(h));
#endif
#ifdef KV_int8
  float amax = fabsf(x);
  int good = finite(x);
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    amax = largest(amax, SWAP(amax, o, 32));
    good &= SWAP(good, o, 32);
  }
  u16 half = to_half(div_(amax, 127.f));
  float d = half_of(half);
  float q = d == 0.f ? 0.f : rintf(div_(x, d));
  to[at] = (Stored)(int)(good && finite(d) ? fminf(fmaxf(q, -127.f), 127.f) : 0.f);
  if ((at & 31) == 0) scales[at >> 5] = half;
  return good && finite(d);
#endif
}
#endif

#endif
