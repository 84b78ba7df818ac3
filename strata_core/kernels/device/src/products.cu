// Rows of weights times activations: quantise, linear, linear_add, products, gate_up, down. Sections
// 2 to 4. Of quantised rows eight lanes hold one, lane j the blocks with b mod 8 = j; of float rows a
// warp holds one, lane i the stripes i and i + 32.

#ifdef KERNEL_quantise
KERNEL(256)
quantise(const float* x, u8* records, u32* status, int rows, int width, int op) {
  follow();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;  // whole blocks of 32: width is a multiple of 32
  u8* row = records + (size_t)blockIdx.y * ((width + 255) / 256) * RECORD_BYTES;
  bool good = store_block(row, i >> 5, threadIdx.x & 31, x[(size_t)blockIdx.y * width + i]);
  if (!good && (threadIdx.x & 31) == 0) latch(status, op);
}
#endif

#ifdef QUANTISED
#define AT_ONCE 4
#else
#define AT_ONCE 2
#endif

// Blocks of a row that a lane asks for together: fewer of those that come in more words.
#define TOGETHER(W) (W::SCALED && W::BLOCK_BYTES > 20 ? AHEAD / 2 : AHEAD)

DEV size_t record_pitch(int columns) { return (size_t)((columns + 255) / 256) * RECORD_BYTES; }

// T tokens of one quantised row; token t's records begin at from[t].
template <class W, int T, bool WIDE>
DEV void blocks_of_row(const u8* row, const u8* const* from, int blocks, int j, float* acc) {
#pragma unroll(T == 1 ? TOGETHER(W) : 1)
  for (int b = j; b < blocks; b += 8) {
    Block f;
    W::template load_as<WIDE>(row, b, f);
#pragma unroll
    for (int t = 0; t < T; t++) {
      Activations a;
      load_block(from[t], b, a);
      acc[t] = block_step<W>(f, a, acc[t]);
    }
  }
}

// The same; token t's records are at x(t).
template <class W, int T, class X>
DEV void quantised_row(const u8* row, X x, int blocks, int j, float* acc) {
  const u8* from[T];
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = 0.f, from[t] = x(t);
  if (W::WIDE && ((size_t)row & 15) == 0) blocks_of_row<W, T, W::WIDE>(row, from, blocks, j, acc);
  else blocks_of_row<W, T, false>(row, from, blocks, j, acc);
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = fold8(acc[t]);
}

// `columns` floats of a row for T tokens, by a warp; token t's floats are at x(t).
template <class W, int T, class X>
DEV void float_row(const u8* row, X x, int columns, int lane, float* acc) {
  float s[T][2];
  const float* from[T];
  int whole = columns & ~63;
#pragma unroll
  for (int t = 0; t < T; t++) s[t][0] = s[t][1] = 0.f, from[t] = (const float*)x(t) + lane;
#pragma unroll(T == 1 ? 16 : 4)  // asked for together: nothing here decides whether to ask
  for (int i = 0; i < whole; i += 64) {
    float w = W::at(row, i + lane), v = W::at(row, i + lane + 32);
#pragma unroll
    for (int t = 0; t < T; t++)
      s[t][0] = fma_(w, from[t][i], s[t][0]), s[t][1] = fma_(v, from[t][i + 32], s[t][1]);
  }
  if (whole < columns) {  // the zero tail takes part: it makes +0 of a stripe that is -0
    bool a = whole + lane < columns, b = whole + lane + 32 < columns;
    float w = a ? W::at(row, whole + lane) : 0.f, v = b ? W::at(row, whole + lane + 32) : 0.f;
#pragma unroll
    for (int t = 0; t < T; t++) {
      s[t][0] = fma_(w, a ? from[t][whole] : 0.f, s[t][0]);
      s[t][1] = fma_(v, b ? from[t][whole + 32] : 0.f, s[t][1]);
    }
  }
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = fold64_of_pair(s[t][0], s[t][1]);
}

// A warp's rows of a matrix: `count` of them from `first` on. Rows are on their way when `begin_rows`
// returns, which needs nothing that another kernel of the round writes.
struct RowsOf {
  const u8* rows;
  i64 stride;
  int count;
  bool staged;
};

DEV RowsOf begin_rows(const u8* weight, i64 stride, int first, int rows, u8* slot, int lane) {
  RowsOf r;
  int batch = batch_of(stride), most = batch ? batch : 4;
  r.stride = stride, r.rows = weight + (size_t)first * stride;
  r.count = rows - first < most ? rows - first : most;
  r.staged = batch && r.count > 0;
  if (r.staged) r.rows = stage(slot, r.rows, (int)(r.count * stride), lane);
  else for (i64 i = lane * 128; i < r.count * stride; i += 32 * 128) prefetch(r.rows + i);
  return r;
}

DEV int rows_of_block(i64 stride) {
  int batch = batch_of(stride);
  return 4 * (batch ? batch : 4);
}

// Every product of rows and T tokens, of which the first `tokens` count, to put(row, token, value);
// the tokens' rows are at x(token). All of a warp come here.
template <class W, int T, class X, class Put>
DEV void finish_rows(const RowsOf& r, X x, int tokens, int columns, int lane, Put put) {
  float acc[T];
#ifdef QUANTISED
  int g = lane >> 3, j = lane & 7;
  for (int base = 0; base < r.count; base += 4) {
    int n = base + g;
    const u8* row = r.rows + (n < r.count ? n : r.count - 1) * r.stride;  // lanes stay together to fold
    quantised_row<W, T>(row, x, columns >> 5, j, acc);
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < tokens && n < r.count && j == 0) put(n, t, acc[t]);
  }
#else
  for (int n = 0; n < r.count; n++) {
    float_row<W, T>(r.rows + n * r.stride, x, columns, lane, acc);
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < tokens && lane == 0) put(n, t, acc[t]);
  }
#endif
}

// Tokens by fours (of float rows by twos), by two or one: eight at once would take more registers than
// there are, and the rows are near. A fourth one that there is not repeats the third, so that no
// branch keeps the tokens' loads apart.
template <class W, class X, class Put>
DEV void finish_tokens(const RowsOf& r, X x, int tokens, int columns, int lane, Put put) {
  if (r.staged) copies_done<0>();
  MEET_WARP();
  for (int from = 0; from < tokens; from += AT_ONCE) {
    int n = tokens - from < AT_ONCE ? tokens - from : AT_ONCE;
    auto at = [=](int t) { return x(from + (t < n ? t : n - 1)); };
    auto to = [=](int row, int t, float v) { put(row, from + t, v); };
    if (n == 1) finish_rows<W, 1>(r, at, n, columns, lane, to);
    else if (n == 2) finish_rows<W, 2>(r, at, n, columns, lane, to);
    else finish_rows<W, AT_ONCE>(r, at, n, columns, lane, to);
  }
}

#ifdef QUANTISED
#define PITCH record_pitch(columns)
#else
#define PITCH ((size_t)columns * 4)
#endif

#if defined(KERNEL_linear) || defined(KERNEL_linear_add)
template <class W>
DEV void multiply(const u8* weight, const u8* x, float* out, const float* bias, float* sum, i64 stride,
                  int tokens, int rows, int columns) {
  SHARED_BYTES(bytes);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of_block = rows_of_block(stride);
  int first = blockIdx.x * of_block + warp * (of_block / 4);
  u8* slot = bytes + warp * slot_bytes(stride, of_block / 4);
  RowsOf r = begin_rows(weight, stride, first, rows, slot, lane);
  follow();
  size_t pitch = PITCH;
  auto at = [=](int t) { return x + t * pitch; };
  finish_tokens<W>(r, at, tokens, columns, lane, [=](int n, int t, float v) {
    size_t to = (size_t)t * rows + first + n;
    if (bias) v = add(v, bias[first + n]);
    out[to] = v;
    if (sum) sum[to] = add(sum[to], v);
  });
}
#endif

#ifdef KERNEL_linear
ROOMY(128, 4)
linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens, int rows,
       int columns) {
  multiply<TYPE>(weight, x, out, bias, 0, stride, tokens, rows, columns);
}
#endif

#ifdef KERNEL_linear_add
ROOMY(128, 4)
linear_add(const u8* weight, const u8* x, float* out, const float* bias, float* sum, i64 stride,
           int tokens, int rows, int columns) {
  multiply<TYPE>(weight, x, out, bias, sum, stride, tokens, rows, columns);
}
#endif

#ifdef KERNEL_norm_linear
// The norm of whole rows in every block, which then multiplies its rows of a float matrix with them.
// What else is made of the normed rows is shared among blocks. FIRST floats of a row are a thread's.
#define FIRST 16

ROOMY(128, 4)
norm_linear(const float* x, float* out, const float* gain, u8* records, u32* status, const u8* weight,
            float* product, const float* bias, i64 stride, int rows, int dim, int outputs, float eps,
            int op) {
  SHARED_BYTES(bytes);
  float* normed = (float*)bytes;
  int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, of_warp = rows_of_block(stride) / 4;
  int first = (blockIdx.x * 4 + warp) * of_warp;
  u8* slot = bytes + (size_t)rows * dim * 4 + warp * slot_bytes(stride, of_warp);
  RowsOf r = begin_rows(weight, stride, first, outputs, slot, lane);
  float g[FIRST];
#pragma unroll
  for (int k = 0; k < FIRST; k++) g[k] = tid + k * 128 < dim ? gain[tid + k * 128] : 0.f;
  follow();
  for (int t = 0; t < rows; t++) {
    const float* from = x + (size_t)t * dim;
    float *row = normed + t * dim, v[FIRST];
#pragma unroll
    for (int k = 0; k < FIRST; k++) v[k] = tid + k * 128 < dim ? from[tid + k * 128] : 0.f;
#pragma unroll
    for (int k = 0; k < FIRST; k++)
      if (tid + k * 128 < dim) row[tid + k * 128] = v[k];
    for (int i = tid + FIRST * 128; i < dim; i += 128) row[i] = from[i];
    __syncthreads();
    NORM_FACTOR(row, dim, eps);
#pragma unroll
    for (int k = 0; k < FIRST; k++)
      if (tid + k * 128 < dim) row[tid + k * 128] = mul(mul(v[k], factor), g[k]);
    for (int i = tid + FIRST * 128; i < dim; i += 128) row[i] = mul(mul(row[i], factor), gain[i]);
    __syncthreads();
  }
  int each = dim >> 5;  // dim is a multiple of 32
  for (int b = blockIdx.x * 4 + warp; b < rows * each; b += gridDim.x * 4) {
    float v = normed[b * 32 + lane];
    out[(size_t)b * 32 + lane] = v;
    if (records) {
      u8* packed = records + (size_t)(b / each) * ((dim + 255) / 256) * RECORD_BYTES;
      bool good = store_block(packed, b % each, lane, v);
      if (!good && lane == 0) latch(status, op);
    }
  }
  auto at = [=](int t) { return (const u8*)(normed + t * dim); };
  finish_tokens<TYPE>(r, at, rows, dim, lane, [=](int n, int t, float v) {
    product[(size_t)t * outputs + first + n] = bias ? add(v, bias[first + n]) : v;
  });
}
#endif

#ifdef KERNEL_products
struct Matrix {
  const u8* weight;
  float* out;
  const float* bias;
  i64 stride;
  int rows, block;
};

template <class W>
DEV void part_of(const Matrix& m, const u8* x, int tokens, int columns) {
  SHARED_BYTES(bytes);
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of_warp = rows_of_block(m.stride) / 4;
  int first = (m.block * 4 + warp) * of_warp, rows = m.rows;
  float* out = m.out;
  const float* bias = m.bias;
  u8* slot = bytes + warp * slot_bytes(m.stride, of_warp);
  RowsOf r = begin_rows(m.weight, m.stride, first, rows, slot, lane);
  follow();
  size_t pitch = PITCH;
  auto at = [=](int t) { return x + t * pitch; };
  finish_tokens<W>(r, at, tokens, columns, lane, [=](int n, int t, float v) {
    out[(size_t)t * rows + first + n] = bias ? add(v, bias[first + n]) : v;
  });
}

template <class A, class B>
struct Same {
  static const bool yes = false;
};
template <class A>
struct Same<A, A> {
  static const bool yes = true;
};

ROOMY(128, 3)  // with a fourth block beside it, four tokens at once would spill for some types
products(const u8* weight_a, float* out_a, const float* bias_a, const u8* weight_b, float* out_b,
         const float* bias_b, const u8* weight_c, float* out_c, const float* bias_c, const u8* x,
         i64 stride_a, i64 stride_b, i64 stride_c, int rows_a, int rows_b, int rows_c, int tokens,
         int columns) {
  int a = (rows_a - 1) / rows_of_block(stride_a) + 1, b = (rows_b - 1) / rows_of_block(stride_b) + 1;
  int block = blockIdx.x;
  Matrix m = {weight_a, out_a, bias_a, stride_a, rows_a, block};
  if (block >= a + b) m = {weight_c, out_c, bias_c, stride_c, rows_c, block - a - b};
  else if (block >= a) m = {weight_b, out_b, bias_b, stride_b, rows_b, block - a};
  if (block >= a + b && !Same<TYPE_A, TYPE_C>::yes) part_of<TYPE_C>(m, x, tokens, columns);
  else if (block >= a && block < a + b && !Same<TYPE_A, TYPE_B>::yes)
    part_of<TYPE_B>(m, x, tokens, columns);
  else part_of<TYPE_A>(m, x, tokens, columns);
}
#endif

#ifdef KERNEL_gate_up
DEV const u8* address_in(int low, int high) { return (const u8*)((u64)(u32)high << 32 | (u32)low); }

// Entries of the window that have the expert of entry `self`, whose first it is; how many. All threads
// of the block come here.
DEV int sharers(const Entry* entries, int self, int count, int top_k, int* found) {
  if (count == top_k) {  // a single token picks an expert once
    if (threadIdx.x == 0) found[0] = self;
    __syncthreads();
    return 1;
  }
  __shared__ int many;
  if (threadIdx.x == 0) many = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (entries[i].first == self) found[atomicAdd(&many, 1)] = i;
  __syncthreads();
  return many;
}

// One row of gate and one of up for T entries; entry t's records begin at from[t].
#ifdef QUANTISED
template <int T, bool WIDE>
DEV void blocks_of_two(const u8* gate, const u8* up, const u8* const* from, int blocks, int j, float* a,
                       float* b) {
#pragma unroll(T == 1 ? TOGETHER(GATE) / 2 : 1)
  for (int k = j; k < blocks; k += 8) {
    Block f, g;
    GATE::template load_as<WIDE>(gate, k, f);
    if (T == 1) UP::template load_as<WIDE>(up, k, g);
    Activations v[T];
#pragma unroll
    for (int t = 0; t < T; t++) load_block(from[t], k, v[t]);
#pragma unroll
    for (int t = 0; t < T; t++) a[t] = block_step<GATE>(f, v[t], a[t]);
    if (T > 1) UP::template load_as<WIDE>(up, k, g);
#pragma unroll
    for (int t = 0; t < T; t++) b[t] = block_step<UP>(g, v[t], b[t]);
  }
}
#endif

// The same of T entries of which the first `n` count, by the lanes that hold such a row; to `to`.
template <int T>
DEV void gate_and_up(const u8* gate, const u8* up, const u8* x, const int* found, int n, int top_k,
                     int columns, int lane, float* to) {
  float a[T], b[T];
  const u8* from[T];
#ifdef QUANTISED
  const bool both = GATE::WIDE && UP::WIDE;
  int j = lane & 7;
  size_t pitch = record_pitch(columns);
#else
  int j = lane;
  size_t pitch = (size_t)columns * 4;
#endif
#pragma unroll
  for (int t = 0; t < T; t++) a[t] = b[t] = 0.f, from[t] = x + found[t < n ? t : 0] / top_k * pitch;
#ifdef QUANTISED
  if (both && (((size_t)gate | (size_t)up) & 15) == 0)
    blocks_of_two<T, both>(gate, up, from, columns >> 5, j, a, b);
  else blocks_of_two<T, false>(gate, up, from, columns >> 5, j, a, b);
#pragma unroll
  for (int t = 0; t < T; t++) a[t] = fold8(a[t]), b[t] = fold8(b[t]);
#else
  auto row = [=](int t) { return from[t]; };
  float_row<GATE, T>(gate, row, columns, lane, a);
  float_row<UP, T>(up, row, columns, lane, b);
#endif
#pragma unroll
  for (int t = 0; t < T; t++)
    if (t < n && j == 0) to[t * 32] = mul(silu(a[t]), b[t]);
}

// One block: 32 rows of gate and up of one expert, which make one block of `down`'s activations for
// each entry that has the expert. Warps take rows by fours; `warps` of them stage theirs, 0: none does.
ROOMY(256, 2)
gate_up(const Entry* entries, const u8* x, u8* inner, u32* status, i64 gate_stride, i64 up_stride,
        int count, int top_k, int rows, int columns, int op, int warps) {
  SHARED_BYTES(bytes);
  __shared__ float h[MOST_TOKENS][32];
  __shared__ int found[MOST_TOKENS];
  follow();
  // the entry's pieces at once: what follows waits for all of them
  const int4 *pieces = (const int4*)(entries + blockIdx.y), of_rows = pieces[0], of_entry = pieces[2];
  const u8 *gates = address_in(of_rows.x, of_rows.y), *ups = address_in(of_rows.z, of_rows.w);
  if ((gates == 0) | (of_entry.z != blockIdx.y)) return;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, each = blockDim.x >> 5, n = 0;
  u8* slot = bytes + warp * (slot_bytes(gate_stride, 4) + slot_bytes(up_stride, 4));
  for (int base = warp * 4; base < 32; base += each * 4) {
    int first = blockIdx.x * 32 + base;
    const u8* gate = gates + (size_t)first * gate_stride;
    const u8* up = ups + (size_t)first * up_stride;
    if (warps) {
      MEET_WARP();
      gate = stage(slot, gate, (int)(4 * gate_stride), lane);
      up = stage(slot + slot_bytes(gate_stride, 4), up, (int)(4 * up_stride), lane);
    }
    if (!n) n = sharers(entries, blockIdx.y, count, top_k, found);
    if (warps) copies_done<0>();
    MEET_WARP();
#ifdef QUANTISED
    int r = lane >> 3;
#else
    for (int r = 0; r < 4; r++)
#endif
    {
      const u8 *a = gate + r * gate_stride, *b = up + r * up_stride;
      float* to = h[0] + base + r;
#ifdef QUANTISED
      if (n == 1) gate_and_up<1>(a, b, x, found, 1, top_k, columns, lane, to);
      else  // more than two beside two blocks of weights would spill
        for (int t = 0; t < n; t += 2)
          gate_and_up<2>(a, b, x, found + t, n - t, top_k, columns, lane, to + t * 32);
#else
      for (int t = 0; t < n; t++)
        gate_and_up<1>(a, b, x, found + t, 1, top_k, columns, lane, to + t * 32);
#endif
    }
  }
  __syncthreads();
  for (int t = warp; t < n; t += each) {
    u8* to = inner + (size_t)found[t] * ((rows + 255) / 256) * 1024;
#ifdef DOWN_QUANTISED
    bool good = store_block(to, blockIdx.x, lane, h[t][lane]);
    if (!good && lane == 0) latch(status, op);
#else
    ((float*)to)[blockIdx.x * 32 + lane] = h[t][lane];
#endif
  }
}
#endif

#ifdef KERNEL_down
ROOMY(128, 4)
down(const Entry* entries, const u8* inner, i64 stride, int count, int rows, int columns) {
  SHARED_BYTES(bytes);
  __shared__ int found[MOST_TOKENS], many;
  const Entry* e = entries + blockIdx.y;
  if (!e->down || e->first != blockIdx.y) {
    follow();
    return;
  }
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of_warp = rows_of_block(stride) / 4;
  int first = (blockIdx.x * 4 + warp) * of_warp;
  u8* slot = bytes + warp * slot_bytes(stride, of_warp);
  RowsOf r = begin_rows((const u8*)e->down, stride, first, rows, slot, lane);
  if (threadIdx.x == 0) many = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += 128)
    if (entries[i].first == blockIdx.y) found[atomicAdd(&many, 1)] = i;
  __syncthreads();
  follow();
  int n = many;
  size_t pitch = (size_t)((columns + 255) / 256) * 1024;
  auto x = [=](int t) { return inner + found[t] * pitch; };
  auto put = [=](int k, int t, float v) { ((float*)entries[found[t]].row)[first + k] = v; };
  finish_tokens<TYPE>(r, x, n, columns, lane, put);
}
#endif
