// Products of prompts: many tokens, each block's rows of weights read once for a tile of them.
// Eight lanes hold a row, lane j the blocks with b mod 8 = j (quantised) or the stripes j, j + 8,
// ... (floats), as in products.cu; the same order, so the same bits (sections 2 to 4).

#define TOKENS 16
#define ROWS 32
#define PIECES (RECORD_BYTES / 16)

// Tokens of a tile four by four: what is computed for those past the count goes nowhere.
#define FOURS(count)                       \
  _Pragma("unroll") for (int u = 0; u < TOKENS; u += 4) if (u < count) \
      _Pragma("unroll") for (int t = u; t < u + 4; t++)

// The rows of a tile's activations (past the count the last one's again), and room for 256 columns of them.
struct Tile {
  const u8* from[TOKENS];
  int4 staged[TOKENS * PIECES];
};

// Block b of this thread's row times the same block of the `count` staged activations.
template <class W>
DEV void meet(const u8* row, int b, int count, const u8* staged, float* acc) {
  Block f;
  W::load(row, b, f);
  FOURS(count) {
    Activations a;
    load_block(staged + t * RECORD_BYTES, b & 7, a);
    acc[t] = block_step<W>(f, a, acc[t]);
  }
}

// The tile's entries, of which `each` share a row of activations. All threads of the block come here.
DEV void take_entries(Tile& tile, int* entries, const int* order, int count, const u8* x, int each,
                      size_t pitch) {
  __syncthreads();  // those before have been stored
  if (threadIdx.x < TOKENS) {
    int entry = entries[threadIdx.x] = order[threadIdx.x < count ? threadIdx.x : count - 1];
    tile.from[threadIdx.x] = x + entry / each * pitch;
  }
  __syncthreads();
}

// Superblock s of a tile's activations into shared memory; all threads of the block take part.
DEV void stage(Tile& tile, int s, int count) {
  __syncthreads();
  for (int i = threadIdx.x; i < (count + 3) / 4 * 4 * PIECES; i += 256)
    tile.staged[i] = ((const int4*)(tile.from[i / PIECES] + (size_t)s * RECORD_BYTES))[i % PIECES];
  __syncthreads();
}

DEV void clear(float* acc) {
#pragma unroll
  for (int t = 0; t < TOKENS; t++) acc[t] = 0.f;
}

DEV void fold(int count, float* acc) {
  FOURS(count) acc[t] = fold8(acc[t]);
}

template <class W>
DEV void quantised_tile(const u8* row, Tile& tile, int count, int blocks, int j, float* acc) {
  clear(acc);
  for (int s = 0; 8 * s < blocks; s++) {
    stage(tile, s, count);
    if (8 * s + j < blocks) meet<W>(row, 8 * s + j, count, (const u8*)tile.staged, acc);
  }
  fold(count, acc);
}

// One row of floats times one row of activations, lane j of 8.
template <class W>
DEV float floats(const u8* row, const float* x, int columns, int j) {
  float s[8];
#pragma unroll
  for (int k = 0; k < 8; k++) s[k] = 0.f;
  for (int first = j; first - j < columns; first += 64) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
      // the zero tail takes part: it makes +0 of a stripe that is -0
      int i = first + 8 * k;
      bool in = i < columns;
      s[k] = fma_(in ? W::at(row, i) : 0.f, in ? x[i] : 0.f, s[k]);
    }
  }
  return fold64(s);
}

template <class W>
DEV void float_tile(const u8* row, Tile& tile, int count, int columns, int j, float* acc) {
  clear(acc);
  FOURS(count) acc[t] = floats<W>(row, (const float*)tile.from[t], columns, j);
}

#ifdef KERNEL_prompt_linear
ROOMY(256, 2)
prompt_linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  __shared__ Tile tile;
  int r = blockIdx.x * ROWS + (threadIdx.x >> 3), j = threadIdx.x & 7;
  int first = blockIdx.y * TOKENS, count = tokens - first < TOKENS ? tokens - first : TOKENS;
  bool mine = r < rows;
  const u8* row = weight + (size_t)(mine ? r : rows - 1) * stride;  // lanes stay together to fold
  size_t pitch = row_pitch(columns);
  int t = threadIdx.x < count ? threadIdx.x : count - 1;
  if (threadIdx.x < TOKENS) tile.from[threadIdx.x] = x + (size_t)(first + t) * pitch;
  __syncthreads();
  float acc[TOKENS];
  quantised_tile<TYPE>(row, tile, count, columns >> 5, j, acc);
  float b = bias ? bias[mine ? r : 0] : 0.f;
  if (mine && j == 0)
#pragma unroll
    for (int t = 0; t < TOKENS; t++)
      if (t < count) out[(size_t)(first + t) * rows + r] = bias ? add(acc[t], b) : acc[t];
}
#endif

#ifdef KERNEL_prompt_gate_up
// 32 rows of gate and up of one expert, which make one block of `down`'s activations for each of
// its entries.
KERNEL(256)
prompt_gate_up(const Wave* wave, const int* starts, const int* order, const u8* x, u8* inner,
               u32* status, i64 gate_stride, i64 up_stride, int experts, int top_k, int rows,
               int columns, int spread, int op) {
  follow();
  __shared__ Tile tile;
  __shared__ float h[TOKENS][ROWS];
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.y];
  int end = starts[e.expert + 1], g = threadIdx.x >> 3, j = threadIdx.x & 7;
  const u8* gate = (const u8*)e.gate + (size_t)(blockIdx.x * ROWS + g) * gate_stride;
  const u8* up = (const u8*)e.up + (size_t)(blockIdx.x * ROWS + g) * up_stride;
  for (int first = starts[e.expert] + blockIdx.z * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(tile, entries, order + first, count, x, top_k, row_pitch(columns));
    float a[TOKENS], b[TOKENS];
#ifdef QUANTISED
    int blocks = columns >> 5;
    clear(a), clear(b);
    for (int s = 0; 8 * s < blocks; s++) {
      stage(tile, s, count);
      if (8 * s + j < blocks) {
        meet<GATE>(gate, 8 * s + j, count, (const u8*)tile.staged, a);
        meet<UP>(up, 8 * s + j, count, (const u8*)tile.staged, b);
      }
    }
    fold(count, a), fold(count, b);
#else
    float_tile<GATE>(gate, tile, count, columns, j, a);
    float_tile<UP>(up, tile, count, columns, j, b);
#endif
    if (j == 0)
#pragma unroll
      for (int t = 0; t < TOKENS; t++) h[t][g] = mul(silu(a[t]), b[t]);
    __syncthreads();
    int lane = threadIdx.x & 31;
    for (int t = threadIdx.x >> 5; t < count; t += 8)
      store_inner(inner, entries[t], rows, blockIdx.x, lane, h[t][lane], status, op);
  }
}
#endif

#ifdef KERNEL_prompt_down
ROOMY(256, 2)
prompt_down(const Wave* wave, const int* starts, const int* order, const u8* inner, float* out,
            i64 stride, int experts, int rows, int columns, int spread) {
  follow();
  __shared__ Tile tile;
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.y];
  int end = starts[e.expert + 1];
  int r = blockIdx.x * ROWS + (threadIdx.x >> 3), j = threadIdx.x & 7;
  bool mine = r < rows;
  const u8* row = (const u8*)e.down + (size_t)(mine ? r : rows - 1) * stride;
  for (int first = starts[e.expert] + blockIdx.z * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(tile, entries, order + first, count, inner, 1, inner_pitch(columns));
    float acc[TOKENS];
#ifdef QUANTISED
    quantised_tile<TYPE>(row, tile, count, columns >> 5, j, acc);
#else
    float_tile<TYPE>(row, tile, count, columns, j, acc);
#endif
    if (mine && j == 0)
#pragma unroll
      for (int t = 0; t < TOKENS; t++)
        if (t < count) out[(size_t)entries[t] * rows + r] = acc[t];
  }
}
#endif
