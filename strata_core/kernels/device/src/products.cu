// Rows of weights times activations: quantise, linear, gate_up, down. Eight lanes hold a row, lane j
// the blocks with b mod 8 = j (quantised) or the stripes j, j + 8, ... (floats): sections 2 to 4.

#ifdef KERNEL_quantise
KERNEL(256)
quantise(const float* x, u8* records, u32* status, int rows, int width, int op) {
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;  // whole blocks of 32: width is a multiple of 32
  u8* row = records + (size_t)blockIdx.y * ((width + 255) / 256) * RECORD_BYTES;
  bool good = store_block(row, i >> 5, threadIdx.x & 31, x[(size_t)blockIdx.y * width + i]);
  if (!good && (threadIdx.x & 31) == 0) latch(status, op);
}
#endif

// Up to MOST_TOKENS tokens of one quantised row; `pitch` bytes between the tokens' records.
template <class W>
DEV void quantised_row(const u8* row, const u8* x, size_t pitch, int tokens, int blocks, int j,
                       float* acc) {
#pragma unroll
  for (int t = 0; t < MOST_TOKENS; t++) acc[t] = 0.f;
  for (int b = j; b < blocks; b += 8) {
    Block f;
    W::load(row, b, f);
#pragma unroll
    for (int t = 0; t < MOST_TOKENS; t++) {
      if (t < tokens) {
        Activations a;
        load_block(x + t * pitch, b, a);
        acc[t] = block_step<W>(f, a, acc[t]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < MOST_TOKENS; t++)
    if (t < tokens) acc[t] = fold8(acc[t]);
}

template <class W>
DEV float float_row(const u8* row, const float* x, int columns, int j) {
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

#ifdef KERNEL_linear
KERNEL(128)
linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
       int rows, int columns) {
  int r = blockIdx.x * 16 + (threadIdx.x >> 3), j = threadIdx.x & 7;
  bool mine = r < rows;
  const u8* row = weight + (size_t)(mine ? r : rows - 1) * stride;  // lanes stay together to fold
  float b = bias ? bias[mine ? r : 0] : 0.f;
#ifdef QUANTISED
  float acc[MOST_TOKENS];
  size_t pitch = (size_t)((columns + 255) / 256) * RECORD_BYTES;
  quantised_row<TYPE>(row, x, pitch, tokens, columns >> 5, j, acc);
#pragma unroll
  for (int t = 0; t < MOST_TOKENS; t++)
    if (t < tokens && mine && j == 0) out[(size_t)t * rows + r] = bias ? add(acc[t], b) : acc[t];
#else
  for (int t = 0; t < tokens; t++) {
    float v = float_row<TYPE>(row, (const float*)x + (size_t)t * columns, columns, j);
    if (mine && j == 0) out[(size_t)t * rows + r] = bias ? add(v, b) : v;
  }
#endif
}
#endif

#ifdef KERNEL_gate_up
// One block: 32 rows of gate and up of one entry, which make one block of `down`'s activations.
KERNEL(128)
gate_up(const Entry* entries, const u8* x, u8* inner, u32* status, i64 gate_stride, i64 up_stride,
        int count, int top_k, int rows, int columns, int op) {
  __shared__ float h[32];
  const Entry* e = entries + blockIdx.y;
  if (!e->gate) return;
  int g = threadIdx.x >> 3, j = threadIdx.x & 7, token = blockIdx.y / top_k;
  for (int half = 0; half < 2; half++) {
    int r = blockIdx.x * 32 + half * 16 + g;
    const u8* gate = (const u8*)e->gate + (size_t)r * gate_stride;
    const u8* up = (const u8*)e->up + (size_t)r * up_stride;
    float a, b;
#ifdef QUANTISED
    const u8* row = x + (size_t)token * ((columns + 255) / 256) * RECORD_BYTES;
    a = b = 0.f;
    for (int n = j; n < columns >> 5; n += 8) {
      Activations v;
      Block f;
      load_block(row, n, v);
      GATE::load(gate, n, f);
      a = block_step<GATE>(f, v, a);
      UP::load(up, n, f);
      b = block_step<UP>(f, v, b);
    }
    a = fold8(a), b = fold8(b);
#else
    const float* row = (const float*)x + (size_t)token * columns;
    a = float_row<GATE>(gate, row, columns, j);
    b = float_row<UP>(up, row, columns, j);
#endif
    if (j == 0) h[half * 16 + g] = mul(silu(a), b);
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  u8* to = inner + (size_t)blockIdx.y * ((rows + 255) / 256) * 1024;
#ifdef DOWN_QUANTISED
  bool good = store_block(to, blockIdx.x, threadIdx.x, h[threadIdx.x]);
  if (!good && threadIdx.x == 0) latch(status, op);
#else
  ((float*)to)[blockIdx.x * 32 + threadIdx.x] = h[threadIdx.x];
#endif
}
#endif

#ifdef KERNEL_down
KERNEL(128)
down(const Entry* entries, const u8* inner, i64 stride, int count, int rows, int columns) {
  const Entry* e = entries + blockIdx.y;
  if (!e->down) return;
  int r = blockIdx.x * 16 + (threadIdx.x >> 3), j = threadIdx.x & 7;
  bool mine = r < rows;
  const u8* row = (const u8*)e->down + (size_t)(mine ? r : rows - 1) * stride;
  const u8* x = inner + (size_t)blockIdx.y * ((columns + 255) / 256) * 1024;
#ifdef QUANTISED
  float acc = 0.f;
  for (int b = j; b < columns >> 5; b += 8) {
    Activations v;
    Block f;
    load_block(x, b, v);
    TYPE::load(row, b, f);
    acc = block_step<TYPE>(f, v, acc);
  }
  float out = fold8(acc);
#else
  float out = float_row<TYPE>(row, (const float*)x, columns, j);
#endif
  if (mine && j == 0) ((float*)e->row)[r] = out;
}
#endif
