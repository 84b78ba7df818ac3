// Dense rows of weights times activations, as multiply.h has it: quantise, linear, linear_add,
// norm_linear, products.

#ifdef KERNEL_quantise
KERNEL(256)
quantise(const float* x, u8* records, u32* status, int rows, int width, int op) {
  follow();
  int i = blockIdx.x * 1024 + threadIdx.x * 4;
  bool in = i < width;  // whole blocks of 32: width is a multiple of 32
  float4 v = {0.f, 0.f, 0.f, 0.f};
  if (in) v = *(const float4*)(x + (size_t)blockIdx.y * width + i);
  u8* row = records + blockIdx.y * record_pitch(width);
  store_fours(row, i >> 5, threadIdx.x & 7, in, v, status, op);
}
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
  size_t pitch = row_pitch(columns);
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
    if (records) store_block(records + (b / each) * record_pitch(dim), b % each, lane, v, status, op);
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
  size_t pitch = row_pitch(columns);
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
