// Entries of a chunk by expert (prompt_group), and their rows back together (prompt_combine).

#ifdef KERNEL_prompt_group
#define AT_ONCE 1024

// Thread e counts and places the entries of expert e, so that their order is that of the tokens.
KERNEL(1024)
prompt_group(const int* picks, int* starts, int* order, int count, int experts) {
  follow();
  __shared__ int piece[AT_ONCE], ends[AT_ONCE];
  int tid = threadIdx.x, mine = 0;
  for (int base = 0; base < count; base += AT_ONCE) {
    int n = count - base < AT_ONCE ? count - base : AT_ONCE;
    __syncthreads();
    if (tid < n) piece[tid] = picks[base + tid];
    __syncthreads();
    if (tid < experts)
      for (int i = 0; i < n; i++) mine += piece[i] == tid;
  }
  ends[tid] = mine;
  __syncthreads();
  if (tid == 0) {
    int total = 0;
    starts[0] = 0;
    for (int e = 0; e < experts; e++) ends[e] = total += ends[e], starts[e + 1] = total;
  }
  __syncthreads();
  int to = ends[tid] - mine;
  for (int base = 0; base < count; base += AT_ONCE) {
    int n = count - base < AT_ONCE ? count - base : AT_ONCE;
    __syncthreads();
    if (tid < n) piece[tid] = picks[base + tid];
    __syncthreads();
    if (tid < experts)
      for (int i = 0; i < n; i++)
        if (piece[i] == tid) order[to++] = base + i;
  }
}
#endif

#ifdef KERNEL_prompt_combine
KERNEL(256)
prompt_combine(float* x, const float* rows, const float* weights, int tokens, int width,
               int top_k) {
  follow();
  int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= width) return;
  size_t at = (size_t)blockIdx.y * width + i;
  float acc = 0.f;
  for (int k = 0; k < top_k; k++) {
    size_t entry = (size_t)blockIdx.y * top_k + k;
    acc = fma_(weights[entry], rows[entry * width + i], acc);
  }
  x[at] = add(x[at], acc);
}
#endif
