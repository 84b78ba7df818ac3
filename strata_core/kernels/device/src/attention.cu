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
#define TILES (SPLIT / TILE)

// A thread holds its position's keys where they are no more than 64 registers; else it asks for some
// at a time, for each head again.
#if !defined(STRATA_HIP) && (HEAD_DIM <= 64 || (HEAD_DIM <= 128 && !defined(KV_fp32)))
#define HOLDS_KEYS
#endif
#define SOME (HEAD_DIM % 64 == 0 ? (sizeof(Stored) == 4 ? 32 : 64) : HEAD_DIM % 16 == 0 ? 16 : 8)

#define PER_WARP (HEAD_DIM < 32 ? HEAD_DIM : 32)
#define PIECES (PER_WARP * (int)sizeof(Stored) / 16)
#define TILE_BYTES (TILE * ((HEAD_DIM + 31) / 32) * PER_WARP * (int)sizeof(Stored))
#define MOST_SENT (TILES < TILES_AHEAD ? TILES : TILES_AHEAD)
#define RING (TILE_BYTES * MOST_SENT <= 40960 ? MOST_SENT : 40960 / TILE_BYTES)
#ifdef STRATA_HIP  // whose conditions are masks in scalar registers
#define SENT_AT_ONCE 1
#else
#define SENT_AT_ONCE RING
#endif

// Values of the last few tiles, or of those to come: a warp's 32 elements of 32 positions.
struct Ring {
  Stored v[RING][(HEAD_DIM + 31) / 32][TILE][PER_WARP];
#ifdef KV_int8
  u16 d[RING][(HEAD_DIM + 31) / 32][TILE];
#endif
};

// A warp sends its elements of positions a..b - 1 of a tile on their way; `from` is its first one's.
DEV void send_tile(Ring& ring, int slot, int warp, int lane, const Stored* from, const u16* scales,
                   size_t at, int a, int b, int width) {
  int here = HEAD_DIM - warp * 32;
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    int j = (n * 32 + lane) / PIECES, k = (n * 32 + lane) % PIECES;
    if (j >= a && j < b && (HEAD_DIM % PER_WARP == 0 || k * 16 < here * (int)sizeof(Stored)))
      copy16((u8*)ring.v[slot][warp][j] + 16 * k, (const u8*)(from + at + (size_t)j * width) + 16 * k);
  }
#ifdef KV_int8
  if (lane >= a && lane < b) ring.d[slot][warp][lane] = scales[(at + (size_t)lane * width) >> 5];
#endif
}

DEV float of_ring(const Ring& ring, int slot, int warp, int j, int lane) {
#ifdef KV_fp32
  return ring.v[slot][warp][j][lane];
#endif
#ifdef KV_fp16
  return half_of(ring.v[slot][warp][j][lane]);
#endif
#ifdef KV_int8
  return mul((float)ring.v[slot][warp][j][lane], half_of(ring.d[slot][warp][j]));
#endif
}

// The first position that this round writes for a token's sequence: what lies before it is older.
DEV int first_written(const int* positions, const Place* places, int tokens, int token) {
  int first = positions[token];
  if (tokens == 1) return first;
  u64 mine = places[token].k;
#pragma unroll 4
  for (int t = 0; t < tokens; t++) {
    u64 its = places[t].k;
    int at = positions[t];
    if (its == mine && at < first) first = at;
  }
  return first;
}

// One block: one split of some heads that share a KV head, one after the other. A thread has a
// position for the scores, a warp a tile; then a thread has an element of the sum, whose tiles follow
// each other while the next ones' values are on their way. Keys and values of earlier rounds are
// asked for before the wait, those of this one behind it. While all that is on its way, blocks share
// `ahead`, lines of 128 bytes of weights that are wanted soon.
ROOMY(256, 1)
attention(const float* q, float* partials, const int* positions, const Place* places,
          const u8* ahead, i64 layer_offset, int tokens, int width, int kv_heads, int group, int window,
          int splits, int ahead_lines) {
  __shared__ __align__(16) float scaled[HEAD_DIM], weights[SPLIT];
  __shared__ float tops[TILES], shrinks[TILES], sums[TILES], highest;
  __shared__ __align__(16) Ring ring;
  int token = blockIdx.z, tile = threadIdx.x >> 5, lane = threadIdx.x & 31, e = threadIdx.x;
  int chunks = gridDim.y / kv_heads, kv_head = blockIdx.y / chunks;
  int per = (group + chunks - 1) / chunks, head = blockIdx.y % chunks * per;
  int last_head = head + per < group ? head + per : group;
  int position = positions[token], first = first_seen(position, window);
  int split = first / SPLIT + blockIdx.x, heads = kv_heads * group, start = split * SPLIT;
  int begin = start > first ? start : first;
  int end = start + SPLIT < position + 1 ? start + SPLIT : position + 1;
  const Place& place = places[token];
  const Stored *keys = (const Stored*)place.k, *values = (const Stored*)place.v;
  const u16 *k_scales = (const u16*)place.k_scales, *v_scales = (const u16*)place.v_scales;
  size_t base = (size_t)layer_offset * width + (size_t)kv_head * HEAD_DIM;
  int p = start + e, fresh = first_written(positions, places, tokens, token);
  bool in = p >= begin && p < end, sums_up = tile * 32 < HEAD_DIM;
  size_t row = base + (size_t)p * width;
  int f = (begin - start) / TILE, last = (end - 1 - start) / TILE;
  // values of positions a..b - 1 of the first tiles
  auto send = [&](int a, int b, int k) {
    int from = start + (f + k) * TILE;
    if (f + k <= last)
      send_tile(ring, k, tile, lane, values, v_scales, base + tile * 32 + (size_t)from * width, a - from,
                b - from, width);
  };
#ifdef HOLDS_KEYS
  Eight key[HEAD_DIM / 8];
  if (in && p < fresh)
#pragma unroll
    for (int i = 0; i < HEAD_DIM; i += 8) key[i / 8] = eight_of(keys, k_scales, row + i);
#else
  if (in)
    for (int i = 0; i < HEAD_DIM; i += 128 / (int)sizeof(Stored)) prefetch(keys + row + i);
#endif
  if (begin < end && sums_up)
#pragma unroll(SENT_AT_ONCE)
    for (int k = 0; k < RING; k++) send(begin, fresh < end ? fresh : end, k), copies_sent();
  prefetch_part(ahead, ahead_lines, blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
                gridDim.x * gridDim.y * gridDim.z);
  follow();
  if (begin >= end) return;
  bool late = fresh < end;
  if (late && sums_up) {
#pragma unroll 1
    for (int k = 0; k < RING; k++) send(begin > fresh ? begin : fresh, end, k);
    copies_sent();
  }
#ifdef HOLDS_KEYS
  if (in && p >= fresh)
#pragma unroll
    for (int i = 0; i < HEAD_DIM; i += 8) key[i / 8] = eight_of(keys, k_scales, row + i);
#endif
  for (int n = head; n < last_head; n++) {
    const float* mine = q + ((size_t)token * heads + kv_head * group + n) * HEAD_DIM;
    if (n > head && sums_up)
#pragma unroll(SENT_AT_ONCE)
      for (int k = 0; k < RING; k++) send(begin, end, k), copies_sent();
    __syncthreads();
    if (e < HEAD_DIM) scaled[e] = mul(mine[e], SCALE);
    __syncthreads();
    float s[8];
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = 0.f;
#ifdef HOLDS_KEYS
    if (in)
#pragma unroll
      for (int c = 0; c < HEAD_DIM; c++) s[c & 7] = fma_(scaled[c], value_of(key[c >> 3], c & 7), s[c & 7]);
#else
    if (in)
#pragma unroll(HEAD_DIM > 128 ? 1 : 8)
      for (int i = 0; i < HEAD_DIM; i += SOME) {
        // asked for together, so that they are waited for once
        Eight k[SOME / 8];
#pragma unroll
        for (int c = 0; c < SOME; c += 8) k[c / 8] = eight_of(keys, k_scales, row + i + c);
#pragma unroll
        for (int c = 0; c < SOME; c++) s[c & 7] = fma_(scaled[i + c], value_of(k[c >> 3], c & 7), s[c & 7]);
      }
#endif
    float score = s[0];
#pragma unroll
    for (int k = 1; k < 8; k++) score = add(score, s[k]);
    float top = in ? score : -float_of(0x7f800000u);
#pragma unroll
    for (int x = 16; x; x >>= 1) top = largest(top, SWAP(top, x, 32));
    if (lane == 0) tops[tile] = top;
    __syncthreads();
    float m = -float_of(0x7f800000u);
#pragma unroll
    for (int t = 0; t < TILES; t++)
      if (t >= f && t < tile && t < last) m = largest(m, tops[t]);
    top = largest(m, top);
    float weight = in ? exp_(sub(score, top)) : 0.f;
    weights[e] = weight;
    float t = fold32(weight);
    if (lane == 0) shrinks[tile] = exp_(sub(m, top)), sums[tile] = t;
    if (tile == last && lane == 0) highest = top;
    __syncthreads();
    float* out = partials + (((size_t)token * heads + kv_head * group + n) * splits + blockIdx.x) *
                                (PARTIAL_HEAD + HEAD_DIM);
    if (sums_up) {
      if (late && n == head) copies_done<0>();  // this round's came last
      float o = 0.f;
      int element = e < HEAD_DIM ? lane : 0;
      for (int k = f, slot = 0; k <= last; k++, slot = slot + 1 == RING ? 0 : slot + 1) {
        int from = start + k * TILE;
        copies_done<RING - 1>();
        MEET_WARP();
        o = mul(o, shrinks[k]);
        int a = begin > from ? begin - from : 0, b = end - from < TILE ? end - from : TILE;
        if (b - a == TILE) {
#pragma unroll
          for (int j = 0; j < TILE; j++)
            o = fma_(weights[k * TILE + j], of_ring(ring, slot, tile, j, element), o);
        } else {
          for (int j = a; j < b; j++)
            o = fma_(weights[k * TILE + j], of_ring(ring, slot, tile, j, element), o);
        }
        MEET_WARP();
        if (k + RING <= last) {
          from += RING * TILE;
          send_tile(ring, slot, tile, lane, values, v_scales, base + tile * 32 + (size_t)from * width,
                    begin - from, end - from, width);
        }
        copies_sent();
      }
      if (e < HEAD_DIM) out[PARTIAL_HEAD + e] = o;
    }
    if (e == 0) {
      float l = 0.f;
      for (int k = f; k <= last; k++) l = fma_(l, shrinks[k], sums[k]);
      out[0] = highest, out[1] = l;
    }
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
  return position / SPLIT - first_seen(position, window) / SPLIT + 1;
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
  store_block(records + token * record_pitch(width), i >> 5, threadIdx.x & 31, v, status, op);
}
#endif
