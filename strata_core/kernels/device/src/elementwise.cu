// Kernels whose elements need their own row alone: embed, rope, add, silu_mul, gate_add,
// combine, gather, signal. Argument blocks and grids: table.py; arithmetic: sections 3.3 and 5 to 10.

#ifdef KERNEL_embed
#ifdef QUANTISED
DEV void values_of_row(const u8* row, float* to, int width) {
  for (int i = threadIdx.x * 4; i < width; i += 1024) *(float4*)(to + i) = four_values<TYPE>(row, i);
}

// The row comes in whole pieces to shared memory, a part of it by each warp, where it is small enough:
// the table may lie in host memory, whose answers cost by their number.
KERNEL(256)
embed(const int* ids, const u8* table, float* out, i64 stride, int tokens, int width) {
  follow();
  SHARED_BYTES(bytes);
  const u8* row = table + (size_t)ids[blockIdx.x] * stride;
  float* to = out + (size_t)blockIdx.x * width;
  if (stride > MOST_EMBEDDED) {
    values_of_row(row, to, width);
    return;
  }
  int part = ((int)stride + 1023) / 1024 * 128, at = (threadIdx.x >> 5) * part;
  int here = (int)stride - at < part ? (int)stride - at : part;
  if (here > 0) stage(bytes + at, row + at, here, threadIdx.x & 31);
  copies_done<0>();
  __syncthreads();
  values_of_row(bytes + ((size_t)row & 127), to, width);
}
#else
KERNEL(256)
embed(const int* ids, const u8* table, float* out, i64 stride, int tokens, int width) {
  follow();
  const u8* row = table + (size_t)ids[blockIdx.x] * stride;
  float* to = out + (size_t)blockIdx.x * width;
  for (int i = threadIdx.x; i < width; i += 256) to[i] = TYPE::at(row, i);
}
#endif
#endif

#ifdef KERNEL_rope
KERNEL(64)
rope(float* x, const float* cos, const float* sin, int tokens, int heads, int head_dim, int half) {
  follow();
  float* head = x + ((size_t)blockIdx.y * heads + blockIdx.x) * head_dim;
  for (int i = threadIdx.x; i < half; i += 64) {
    float c = cos[(size_t)blockIdx.y * half + i], s = sin[(size_t)blockIdx.y * half + i];
    float a = head[i], b = head[i + half];
    head[i] = fma_(-b, s, mul(a, c));
    head[i + half] = fma_(b, c, mul(a, s));
  }
}
#endif

#define ELEMENT                                   \
  follow();                                       \
  int i = blockIdx.x * 256 + threadIdx.x;         \
  if (i >= width) return;                         \
  size_t at = (size_t)blockIdx.y * width + i

#ifdef KERNEL_add
KERNEL(256)
add_rows(float* x, const float* y, int rows, int width) {
  ELEMENT;
  x[at] = add(x[at], y[at]);
}
#endif

#ifdef KERNEL_silu_mul
KERNEL(256)
silu_mul(const float* gate, const float* up, float* out, int rows, int width) {
  ELEMENT;
  out[at] = mul(silu(gate[at]), up[at]);
}
#endif

#ifdef KERNEL_gate_add
KERNEL(256)
gate_add(float* x, const float* y, const float* gate, int rows, int width) {
  ELEMENT;
  x[at] = fma_(sigmoid(gate[blockIdx.y]), y[at], x[at]);
}
#endif

#ifdef KERNEL_combine
KERNEL(256)
combine(float* x, const Entry* entries, const float* weights, const i64* answer, const i64* round,
        u32* late, i64 bound, int layer, int tokens, int width, int top_k) {
  follow();
  await_lanes(answer, round, late, bound, layer);
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;
  size_t at = (size_t)blockIdx.y * width + i;
  float acc = 0.f;
  for (int k = 0; k < top_k; k++) {
    int entry = blockIdx.y * top_k + k;
    acc = fma_(weights[entry], ((const volatile float*)entries[entry].row)[i], acc);
  }
  x[at] = add(x[at], acc);
}
#endif

#ifdef KERNEL_gather
KERNEL(256)
gather(const float* x, const int* index, float* out, int rows, int width) {
  ELEMENT;
  out[at] = x[(size_t)index[blockIdx.y] * width + i];
}
#endif

#ifdef KERNEL_signal
KERNEL(1)
signal(i64* word, const i64* value) {
  follow();
  fence_system();
  *(volatile i64*)word = *value;
}
#endif
