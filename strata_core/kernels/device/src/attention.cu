// Keys, values and attention: kv_append, attention (one split of 256 positions of the heads that
// share a KV head), merge. Sections 8 and 9.

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

#ifdef KERNEL_kv_append
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

KERNEL(256)
kv_append(const float* k, const float* v, const int* positions, const Place* places, u32* status,
          i64 layer_offset, int tokens, int width, int op) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;
  const Place& place = places[blockIdx.y];
  size_t at = (size_t)(layer_offset + positions[blockIdx.y]) * width + i;
  size_t from = (size_t)blockIdx.y * width + i;
  bool good = keep((Stored*)place.k, (u16*)place.k_scales, at, k[from]);
  good = keep((Stored*)place.v, (u16*)place.v_scales, at, v[from]) && good;
  if (!good) latch(status, op);
}
#endif

#define PARTIAL_HEAD 8
#define SPLIT 256
#define TILE 32

#ifdef KERNEL_attention
#define PARTS ((HEAD_DIM + 31) / 32)

KERNEL(128)
attention(const float* q, float* partials, const int* positions, const Place* places,
          i64 layer_offset, int tokens, int width, int kv_heads, int group, int window,
          int splits) {
  __shared__ float scaled[4][HEAD_DIM];
  int token = blockIdx.z, kv_head = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int position = positions[token];
  int first = window ? (position - window + 1 > 0 ? position - window + 1 : 0) : 0;
  int split = first / SPLIT + blockIdx.x, heads = kv_heads * group;
  if (split > position / SPLIT) return;
  int begin = split * SPLIT > first ? split * SPLIT : first;
  int end = (split + 1) * SPLIT < position + 1 ? (split + 1) * SPLIT : position + 1;
  const Place& place = places[token];
  const Stored *keys = (const Stored*)place.k, *values = (const Stored*)place.v;
  const u16 *k_scales = (const u16*)place.k_scales, *v_scales = (const u16*)place.v_scales;
  size_t base = (size_t)layer_offset * width + (size_t)kv_head * HEAD_DIM;
  for (int n = warp; n < (group + 3) / 4 * 4; n += 4) {
    bool mine = n < group;
    int head = kv_head * group + (mine ? n : 0);
    __syncthreads();
    for (int i = lane; i < HEAD_DIM; i += 32)
      scaled[warp][i] = mul(q[((size_t)token * heads + head) * HEAD_DIM + i], SCALE);
    __syncthreads();
    if (!mine) continue;
    float m = -float_of(0x7f800000u), l = 0.f, o[PARTS];
#pragma unroll
    for (int e = 0; e < PARTS; e++) o[e] = 0.f;
    for (int tile = begin / TILE * TILE; tile < end; tile += TILE) {
      int p = tile + lane, a = begin > tile ? begin : tile;
      int b = end < tile + TILE ? end : tile + TILE;
      bool in = p >= a && p < b;
      float s[8];
#pragma unroll
      for (int i = 0; i < 8; i++) s[i] = 0.f;
      if (in) {
        size_t row = base + (size_t)p * width;
        for (int i = 0; i < HEAD_DIM; i += 8)
#pragma unroll
          for (int k = 0; k < 8; k++)
            s[k] = fma_(scaled[warp][i + k], stored(keys, k_scales, row + i + k), s[k]);
      }
      float score = s[0];
#pragma unroll
      for (int k = 1; k < 8; k++) score = add(score, s[k]);
      float top = in ? score : -float_of(0x7f800000u);
#pragma unroll
      for (int x = 16; x; x >>= 1) top = largest(top, SWAP(top, x, 32));
      top = largest(m, top);
      float shrink = exp_(sub(m, top)), weight = in ? exp_(sub(score, top)) : 0.f;
      // stripes j mod 8, ascending; a position without part adds +0, which changes nothing
      float t = add(0.f, LANE(weight, lane & 7, 32));
      t = add(t, LANE(weight, (lane & 7) + 8, 32));
      t = add(t, LANE(weight, (lane & 7) + 16, 32));
      t = add(t, LANE(weight, (lane & 7) + 24, 32));
      l = fma_(l, shrink, fold8(t));
#pragma unroll
      for (int e = 0; e < PARTS; e++) o[e] = mul(o[e], shrink);
      for (int j = a; j < b; j++) {
        float w = LANE(weight, j - tile, 32);
        size_t row = base + (size_t)j * width;
#pragma unroll
        for (int e = 0; e < PARTS; e++) {
          int i = e * 32 + lane;
          if (i < HEAD_DIM) o[e] = fma_(w, stored(values, v_scales, row + i), o[e]);
        }
      }
      m = top;
    }
    float* out = partials + (((size_t)token * heads + head) * splits + blockIdx.x) *
                                (PARTIAL_HEAD + HEAD_DIM);
    if (lane == 0) out[0] = m, out[1] = l;
#pragma unroll
    for (int e = 0; e < PARTS; e++)
      if (e * 32 + lane < HEAD_DIM) out[PARTIAL_HEAD + e * 32 + lane] = o[e];
  }
}
#endif

#ifdef KERNEL_merge
KERNEL(128)
merge(float* out, const float* partials, const int* positions, int tokens, int heads, int window,
      int splits) {
  int head = blockIdx.x, token = blockIdx.y, position = positions[token];
  int first = window ? (position - window + 1 > 0 ? position - window + 1 : 0) : 0;
  int count = position / SPLIT - first / SPLIT + 1;
  size_t row = (size_t)token * heads + head, pitch = PARTIAL_HEAD + HEAD_DIM;
  const float* part = partials + row * splits * pitch;
  for (int e = threadIdx.x; e < HEAD_DIM; e += 128) {
    float m = part[0], l = part[1], o = part[PARTIAL_HEAD + e];
    for (int n = 1; n < count; n++) {
      const float* p = part + n * pitch;
      float top = largest(m, p[0]);
      float a = exp_(sub(m, top)), b = exp_(sub(p[0], top));
      l = fma_(p[1], b, mul(l, a));
      o = fma_(p[PARTIAL_HEAD + e], b, mul(o, a));
      m = top;
    }
    out[row * HEAD_DIM + e] = div_(o, l);
  }
}
#endif
