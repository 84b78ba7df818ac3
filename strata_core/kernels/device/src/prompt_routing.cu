// Entries of a chunk by expert (prompt_group), and their rows back together (prompt_combine).

#ifdef KERNEL_prompt_group
#define GROUPS 16
#define PIECE 128

// A block finds the entries of one expert, each group of 32 threads in a part of them, so that their
// order is that of the tokens. Where they begin it counts itself: no block waits for another.
KERNEL(32 * GROUPS)
prompt_group(const int* picks, int* starts, int* order, int count, int experts) {
  follow();
  __shared__ int own[GROUPS], lower[GROUPS];
  int e = blockIdx.x, lane = threadIdx.x & 31, group = threadIdx.x >> 5;
  int each = (count + GROUPS * PIECE - 1) / (GROUPS * PIECE) * PIECE, first = group * each;
  int end = count - first < each ? count : first + each, mine = 0, before = 0;
#pragma unroll 8
  for (int i = first + lane; i < end; i += 32) {
    int pick = picks[i];
    mine += pick == e, before += pick < e;
  }
  mine = sum_of(mine), before = sum_of(before);
  if (lane == 0) own[group] = mine, lower[group] = before;
  __syncthreads();
  int to = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) to += lower[g] + (g < group ? own[g] : 0);
  if (threadIdx.x == 0) {
    starts[e] = to;
    if (e == experts - 1) starts[experts] = count;
  }
  if (!mine) return;
  for (int base = first; base < end; base += PIECE) {  // four neighbours a lane
    bool is[4];
    int n = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int i = base + 4 * lane + c;
      is[c] = i < end && picks[i] == e, n += is[c];
    }
    int upto = n;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      int other = LANE(upto, lane - o, 32);
      upto += lane >= o ? other : 0;
    }
    int next = to + upto - n;
#pragma unroll
    for (int c = 0; c < 4; c++)
      if (is[c]) order[next++] = base + 4 * lane + c;
    to += LANE(upto, 31, 32);
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
