// Attention of a chunk of one sequence for heads of more than 128 elements: section 9, tile by tile and
// split by split, each split folded into the sum as soon as it ends. A warp has one (token, head); the
// warps of a block share the tiles of keys and values, which pass through shared memory as floats.

#define PAIRS 8
#define SPLIT 256
#define TILE 32
#define PARTS ((HEAD_DIM + 31) / 32)

#if HEAD_DIM <= 256
#define PITCH (HEAD_DIM + 1)
#define SEEN(p, i) shared[((p) - tile) * PITCH + (i)]
DEV void bring(float* to, const Stored* from, const u16* scales, size_t base, int width, int a,
               int b, int tile) {
  __syncthreads();
  for (int i = threadIdx.x; i < (b - a) * HEAD_DIM; i += 256) {
    int p = a + i / HEAD_DIM, e = i % HEAD_DIM;
    to[(p - tile) * PITCH + e] = stored(from, scales, base + (size_t)p * width + e);
  }
  __syncthreads();
}

#else
// A tile of so long heads is more than shared memory holds: each warp reads its own.
#define PITCH 1
#define SEEN(p, i) stored(rows, scales, base + (size_t)(p) * width + (i))
DEV void bring(float*, const Stored*, const u16*, size_t, int, int, int, int) {}
#endif

// A sum over positions: largest score, sum of weights, weighted values (lane's elements).
struct Sum {
  float m, l, o[PARTS];
};

DEV void fold_split(Sum& all, const Sum& split, bool first) {
  if (first) {
    all = split;
    return;
  }
  float top = largest(all.m, split.m);
  float a = exp_(sub(all.m, top)), b = exp_(sub(split.m, top));
  all.l = fma_(split.l, b, mul(all.l, a));
#pragma unroll
  for (int e = 0; e < PARTS; e++) all.o[e] = fma_(split.o[e], b, mul(all.o[e], a));
  all.m = top;
}

KERNEL(256)
prompt_attention(const float* q, float* out, const int* positions, const Place* places,
                 i64 layer_offset, int tokens, int width, int kv_heads, int group, int window) {
  follow();
  __shared__ float scaled[PAIRS][HEAD_DIM], shared[TILE * PITCH];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, kv_head = blockIdx.x;
  int pair = blockIdx.y * PAIRS + warp, last = (blockIdx.y + 1) * PAIRS - 1;
  bool mine = pair < tokens * group;
  if (last >= tokens * group) last = tokens * group - 1;
  int token = (mine ? pair : last) / group, head = kv_head * group + (mine ? pair : last) % group;
  int heads = kv_heads * group, position = positions[token];
  int from = first_seen(position, window);
  // what the block's tokens see together: positions ascend with the tokens
  int low = first_seen(positions[blockIdx.y * PAIRS / group], window);
  int high = positions[last / group] + 1;
  const Place& place = places[token];
  size_t base = (size_t)layer_offset * width + (size_t)kv_head * HEAD_DIM;
  for (int i = lane; i < HEAD_DIM; i += 32)
    scaled[warp][i] = mul(q[((size_t)token * heads + head) * HEAD_DIM + i], SCALE);
  __syncthreads();
  Sum all, now;
  int split = -1;
  bool first = true;
  for (int tile = low / TILE * TILE; tile < high; tile += TILE) {
    int begin = low > tile ? low : tile, end = high < tile + TILE ? high : tile + TILE;
    const Stored* rows = (const Stored*)place.k;
    const u16* scales = (const u16*)place.k_scales;
    bring(shared, rows, scales, base, width, begin, end, tile);
    int p = tile + lane, a = from > tile ? from : tile;
    int b = position + 1 < tile + TILE ? position + 1 : tile + TILE;
    bool taking = mine && a < b, in = p >= a && p < b;
    float weight = 0.f, shrink = 0.f;
    if (taking) {
      if (tile / SPLIT != split) {
        if (split >= 0) fold_split(all, now, first), first = false;
        split = tile / SPLIT;
        now.m = -float_of(0x7f800000u), now.l = 0.f;
#pragma unroll
        for (int e = 0; e < PARTS; e++) now.o[e] = 0.f;
      }
      float s[8];
#pragma unroll
      for (int i = 0; i < 8; i++) s[i] = 0.f;
      if (in)
        for (int i = 0; i < HEAD_DIM; i += 8)
#pragma unroll
          for (int k = 0; k < 8; k++)
            s[k] = fma_(scaled[warp][i + k], SEEN(p, i + k), s[k]);
      float score = s[0];
#pragma unroll
      for (int k = 1; k < 8; k++) score = add(score, s[k]);
      float top = in ? score : -float_of(0x7f800000u);
#pragma unroll
      for (int x = 16; x; x >>= 1) top = largest(top, SWAP(top, x, 32));
      top = largest(now.m, top);
      shrink = exp_(sub(now.m, top)), weight = in ? exp_(sub(score, top)) : 0.f;
      now.l = fma_(now.l, shrink, fold32(weight));
      now.m = top;
    }
    rows = (const Stored*)place.v, scales = (const u16*)place.v_scales;
    bring(shared, rows, scales, base, width, begin, end, tile);
    if (taking) {
#pragma unroll
      for (int e = 0; e < PARTS; e++) now.o[e] = mul(now.o[e], shrink);
      for (int j = a; j < b; j++) {
        float w = LANE(weight, j - tile, 32);
#pragma unroll
        for (int e = 0; e < PARTS; e++) {
          int i = e * 32 + lane;
          if (i < HEAD_DIM) now.o[e] = fma_(w, SEEN(j, i), now.o[e]);
        }
      }
    }
  }
  if (!mine) return;
  fold_split(all, now, first);
  float* to = out + ((size_t)token * heads + head) * HEAD_DIM;
#pragma unroll
  for (int e = 0; e < PARTS; e++)
    if (e * 32 + lane < HEAD_DIM) to[e * 32 + lane] = div_(all.o[e], all.l);
}
