// Keys and values: what a position sees of them, and as they are stored, section 8: reading one,
// keeping one.
#ifndef STRATA_KV_H
#define STRATA_KV_H

// The first position that a position sees; 0 is no window.
DEV int first_seen(int position, int window) {
  return window && position >= window ? position - window + 1 : 0;
}

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
// Eight elements of a row as they come from memory; i is a multiple of 8.
struct Eight {
#ifdef KV_fp32
  float4 a, b;
#endif
#ifdef KV_fp16
  uint4 v;
#endif
#ifdef KV_int8
  uint2 v;
  u16 d;
#endif
};

DEV Eight eight_of(const Stored* p, const u16* scales, size_t i) {
  Eight o;
#ifdef KV_fp32
  o.a = ((const float4*)(p + i))[0], o.b = ((const float4*)(p + i))[1];
#endif
#ifdef KV_fp16
  o.v = *(const uint4*)(p + i);
#endif
#ifdef KV_int8
  o.v = *(const uint2*)(p + i), o.d = scales[i >> 5];
#endif
  return o;
}

// One of the eight; k is known when this is compiled.
DEV float value_of(const Eight& o, int k) {
#ifdef KV_fp32
  float4 f = k < 4 ? o.a : o.b;
  k &= 3;
  return k == 0 ? f.x : k == 1 ? f.y : k == 2 ? f.z : f.w;
#endif
#ifdef KV_fp16
  u32 w = k < 2 ? o.v.x : k < 4 ? o.v.y : k < 6 ? o.v.z : o.v.w;
  return half_of(k & 1 ? w >> 16 : w & 0xffff);
#endif
#ifdef KV_int8
  return mul((float)(i8)((k < 4 ? o.v.x : o.v.y) >> 8 * (k & 3)), half_of(o.d));
#endif
}

// Four neighbouring elements likewise; i is a multiple of 4.
struct Four {
#ifdef KV_fp32
  float4 v;
#endif
#ifdef KV_fp16
  uint2 v;
#endif
#ifdef KV_int8
  u32 v;
  u16 d;
#endif
};

DEV Four four_of(const Stored* p, const u16* scales, size_t i) {
  Four f;
#ifdef KV_fp32
  f.v = *(const float4*)(p + i);
#endif
#ifdef KV_fp16
  f.v = *(const uint2*)(p + i);
#endif
#ifdef KV_int8
  f.v = *(const u32*)(p + i), f.d = scales[i >> 5];
#endif
  return f;
}

DEV float4 floats_of(const Four& f) {
  float4 o;
#ifdef KV_fp32
  o = f.v;
#endif
#ifdef KV_fp16
  o.x = half_of(f.v.x & 0xffff), o.y = half_of(f.v.x >> 16);
  o.z = half_of(f.v.y & 0xffff), o.w = half_of(f.v.y >> 16);
#endif
#ifdef KV_int8
  float d = half_of(f.d);
  o.x = mul((float)(i8)f.v, d), o.y = mul((float)(i8)(f.v >> 8), d);
  o.z = mul((float)(i8)(f.v >> 16), d), o.w = mul((float)(i8)(f.v >> 24), d);
#endif
  return o;
}

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
