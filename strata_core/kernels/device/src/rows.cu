// Whole rows in one block: rms_norm and what is fused with it, the heads of q, k and v, silu with the
// records behind it. Sections 2 and 5 to 8.

#ifdef KERNEL_rms_norm
KERNEL(128)
rms_norm(const float* x, float* out, const float* weight, int rows, int runs, int dim, float eps) {
  follow();
  size_t at = ((size_t)blockIdx.y * runs + blockIdx.x) * dim;
  NORM_FACTOR(x + at, dim, eps);
  for (int i = threadIdx.x; i < dim; i += 128) out[at + i] = mul(mul(x[at + i], factor), weight[i]);
}
#endif

// From a row in shared memory: the normed row and, where there are `records`, those. Whole groups of
// 32 threads take blocks of 32 floats.
#define NORMED_ROW(row)                                                                      \
  NORM_FACTOR(row, dim, eps);                                                                \
  u8* packed = records + blockIdx.x * record_pitch(dim);                                     \
  for (int i = threadIdx.x; i < dim; i += 1024) {                                            \
    float v = mul(mul((row)[i], factor), gain[i]);                                           \
    out[at + i] = v;                                                                         \
    if (records) store_block(packed, i >> 5, threadIdx.x & 31, v, status, op);               \
  }

#ifdef KERNEL_norm_rows
ROOMY(1024, 1)
norm_rows(const float* x, float* out, const float* gain, u8* records, u32* status, int rows, int dim,
          float eps, int op) {
  SHARED_BYTES(bytes);
  float* row = (float*)bytes;
  size_t at = (size_t)blockIdx.x * dim;
  for (int i = threadIdx.x * 32; i < dim; i += 1024 * 32) prefetch(gain + i);
  follow();
  for (int i = threadIdx.x; i < dim; i += 1024) row[i] = x[at + i];
  __syncthreads();
  NORMED_ROW(row)
}
#endif

#ifdef KERNEL_combine_norm
#define MOST_PICKS 64

ROOMY(1024, 1)
combine_norm(float* x, const Entry* entries, const float* weights, const i64* answer,
             const i64* round, u32* late, i64 bound, int layer, float* out, const float* gain,
             u8* records, u32* status, int rows, int dim, int top_k, float eps, int op) {
  SHARED_BYTES(bytes);
  __shared__ const volatile float* from[MOST_PICKS];
  __shared__ float weight[MOST_PICKS];
  float* row = (float*)bytes;
  size_t at = (size_t)blockIdx.x * dim;
  // entries and their weights are older than the kernel before this one, the rows are not
  if (threadIdx.x < top_k) {
    from[threadIdx.x] = (const volatile float*)entries[blockIdx.x * top_k + threadIdx.x].row;
    weight[threadIdx.x] = weights[blockIdx.x * top_k + threadIdx.x];
  }
  for (int i = threadIdx.x * 32; i < dim; i += 1024 * 32) prefetch(gain + i);
  __syncthreads();
  follow();
  await_lanes(answer, round, late, bound, layer);
  for (int i = threadIdx.x; i < dim; i += 2048) {  // two of each row, so that rows are waited for once
    bool two = i + 1024 < dim;
    int j = two ? i + 1024 : i;
    float acc = 0.f, other = 0.f;
    for (int k = 0; k < top_k; k += 8) {
      float a[8], b[8];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        bool more = k + n < top_k;
        const volatile float* mine = from[more ? k + n : k];
        a[n] = more ? mine[i] : 0.f, b[n] = more && two ? mine[j] : 0.f;
      }
#pragma unroll
      for (int n = 0; n < 8; n++)
        if (k + n < top_k) {
          acc = fma_(weight[k + n], a[n], acc);
          other = fma_(weight[k + n], b[n], other);
        }
    }
    acc = add(x[at + i], acc);
    x[at + i] = row[i] = acc;
    if (two) x[at + j] = row[j] = add(x[at + j], other);
  }
  __syncthreads();
  NORMED_ROW(row)
}
#endif

#ifdef KERNEL_silu_quantise
KERNEL(256)
silu_quantise(const float* gate, const float* up, float* out, u8* records, u32* status, int rows,
              int width, int op) {
  follow();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;  // whole blocks of 32: width is a multiple of 32
  size_t at = (size_t)blockIdx.y * width + i;
  float v = mul(silu(gate[at]), up[at]);
  out[at] = v;
  store_block(records + blockIdx.y * record_pitch(width), i >> 5, threadIdx.x & 31, v, status, op);
}
#endif

#ifdef KERNEL_heads
// One block: a head of q; or a head of k, which is kept, and the same of v. A thread has an element.
KERNEL(1024)
heads(float* q, float* k, const float* v, const float* q_gain, const float* k_gain, const float* cos,
      const float* sin, const int* positions, const Place* places, u32* status, i64 layer_offset,
      int tokens, int heads, int kv_heads, int head_dim, int half, int width, float eps, int op) {
  __shared__ float row[1024];
  int tid = threadIdx.x, token = blockIdx.y;
  bool key = blockIdx.x >= heads, in = tid < head_dim;
  int head = key ? blockIdx.x - heads : blockIdx.x;
  size_t at = ((size_t)token * (key ? kv_heads : heads) + head) * head_dim + tid;
  const float* gain = key ? k_gain : q_gain;
  float scale = gain && in ? gain[tid] : 0.f;
  int pair = tid < half ? tid : tid - half;
  bool turns = in && tid < 2 * half;
  float c = turns ? cos[(size_t)token * half + pair] : 0.f;
  float s = turns ? sin[(size_t)token * half + pair] : 0.f;
  follow();
  float* from = key ? k : q;
  float mine = in ? from[at] : 0.f, value = key && in ? v[at] : 0.f;
  row[tid] = mine;
  __syncthreads();
  if (gain) {
    NORM_FACTOR(row, head_dim, eps);
    mine = mul(mul(mine, factor), scale);
    __syncthreads();
    row[tid] = mine;
    __syncthreads();
  }
  if (turns) {
    if (tid < half) mine = fma_(-row[tid + half], s, mul(mine, c));
    else mine = fma_(mine, c, mul(row[tid - half], s));
  }
  if (in) from[at] = mine;
  if (!key) return;
  const Place& place = places[token];
  size_t to = (size_t)(layer_offset + positions[token]) * width + head * head_dim + tid;
  if (!in) return;  // whole blocks of 32 where the store takes blocks
  bool good = keep((Stored*)place.k, (u16*)place.k_scales, to, mine);
  good = keep((Stored*)place.v, (u16*)place.v_scales, to, value) && good;
  if (!good) latch(status, op);
}
#endif
