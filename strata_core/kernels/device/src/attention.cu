// Keys, values and attention: kv_append, attention (one split of 256 positions of the heads that
// share a KV head), merge, merge_quantise. Sections 8 and 9.

#ifdef KERNEL_kv_append
KERNEL(256)
kv_append(const float* k, const float* v, const int* positions, const Place* places, u32* status,
          i64 layer_offset, int tokens, int width, int op) {
  follow();
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
  follow();
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

#if defined(KERNEL_merge) || defined(KERNEL_merge_quantise)
// The splits of a head folded for one element, ascending, and divided.
DEV float merged(const float* part, int count, int e) {
  float m = part[0], l = part[1], o = part[PARTIAL_HEAD + e];
#pragma unroll 4
  for (int n = 1; n < count; n++) {
    const float* p = part + n * (PARTIAL_HEAD + HEAD_DIM);
    float top = largest(m, p[0]);
    float a = exp_(sub(m, top)), b = exp_(sub(p[0], top));
    l = fma_(p[1], b, mul(l, a));
    o = fma_(p[PARTIAL_HEAD + e], b, mul(o, a));
    m = top;
  }
  return div_(o, l);
}

// Splits that a token at a position has.
DEV int splits_of(int position, int window) {
  int first = window && position >= window ? position - window + 1 : 0;
  return position / SPLIT - first / SPLIT + 1;
}

#endif

#ifdef KERNEL_merge
KERNEL(128)
merge(float* out, const float* partials, const int* positions, int tokens, int heads, int window,
      int splits) {
  follow();
  size_t row = (size_t)blockIdx.y * heads + blockIdx.x;
  const float* part = partials + row * splits * (PARTIAL_HEAD + HEAD_DIM);
  int count = splits_of(positions[blockIdx.y], window);
  for (int e = threadIdx.x; e < HEAD_DIM; e += 128) out[row * HEAD_DIM + e] = merged(part, count, e);
}
#endif

#ifdef KERNEL_merge_quantise
KERNEL(128)
merge_quantise(float* out, const float* partials, const int* positions, u8* records, u32* status,
               int tokens, int heads, int window, int splits, int width, int op) {
  int i = blockIdx.x * 128 + threadIdx.x, token = blockIdx.y;
  int count = splits_of(positions[token], window);
  follow();
  if (i >= width) return;  // whole blocks of 32: width is a multiple of 32
  size_t row = (size_t)token * heads + i / HEAD_DIM;
  float v = merged(partials + row * splits * (PARTIAL_HEAD + HEAD_DIM), count, i % HEAD_DIM);
  out[(size_t)token * width + i] = v;
  u8* to = records + (size_t)token * ((width + 255) / 256) * RECORD_BYTES;
  bool good = store_block(to, i >> 5, threadIdx.x & 31, v);
  if (!good && (threadIdx.x & 31) == 0) latch(status, op);
}
#endif
