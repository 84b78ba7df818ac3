// Products of prompts with rows of floats (section 4): a block has 64 rows and 32 tokens, eight lanes
// the same eight of both. In a pass, lane j computes stripe 8k + j of each of its 64 sums, and the
// fold's step k follows at once: so a sum takes two registers, not one for each stripe, and what is
// staged is read for 64 multiplications by 16 loads.

#ifdef KERNEL_prompt_floats
#define ROWS 64
#define TOKENS 32
#define EACH 8   // of the rows, and of the tokens, that lanes of a group have
#define STEPS 4  // elements of a stripe that are staged together
#define WIDE (8 * STEPS)

// Elements 8k to 8k + 7 of STEPS pieces of 64: of tokens so far apart that four of them, of which
// lanes of one warp read the same element, do not meet in a bank.
struct Staged {
  float w[ROWS][WIDE], x[TOKENS][WIDE + 8];
};

// What a thread brings: element `c` of WIDE, of each eighth row and token from the `g`-th on.
struct Brought {
  float w[ROWS / 8], x[TOKENS / 8];
};

// Rows and tokens past their number, and elements past the row's end, are zeros.
DEV void bring(const u8* weight, const float* x, i64 stride, int rows, int tokens, int columns, int i,
               Brought& o) {
  bool in = i < columns;
#pragma unroll
  for (int n = 0; n < ROWS / 8; n++)
    o.w[n] = in && 8 * n < rows ? TYPE::at(weight + 8 * n * stride, i) : 0.f;
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++)
    o.x[n] = in && 8 * n < tokens ? x[(size_t)8 * n * columns + i] : 0.f;
}

DEV void put(Staged& s, const Brought& o, int g, int c) {
#pragma unroll
  for (int n = 0; n < ROWS / 8; n++) s.w[8 * n + g][c] = o.w[n];
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) s.x[8 * n + g][c] = o.x[n];
}

DEV void step(const Staged& s, int m, int warp, int q, int j, float acc[EACH][EACH]) {
  float w[EACH], x[EACH];
#pragma unroll
  for (int r = 0; r < EACH; r++) w[r] = s.w[EACH * warp + r][8 * m + j];
#pragma unroll
  for (int t = 0; t < EACH; t++) x[t] = s.x[4 * t + q][8 * m + j];
#pragma unroll
  for (int r = 0; r < EACH; r++)
#pragma unroll
    for (int t = 0; t < EACH; t++) acc[r][t] = fma_(w[r], x[t], acc[r][t]);
}

// Lane j's a[i] and lane i's a[j] change places, among eight lanes; then lane j adds what it has.
DEV float fold_turned(float* a, int j) {
#pragma unroll
  for (int b = 1; b < 8; b <<= 1)
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (!(i & b)) {
        bool upper = j & b;
        float got = SWAP(upper ? a[i] : a[i | b], b, 32);
        if (upper) a[i] = got;
        else a[i | b] = got;
      }
  float total = a[0];
#pragma unroll
  for (int i = 1; i < 8; i++) total = add(total, a[i]);
  return total;
}

ROOMY(256, 1)
prompt_floats(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  __shared__ Staged staged[2];
  int tid = threadIdx.x, j = tid & 7, q = tid >> 3 & 3, warp = tid >> 5, c = tid & 31;
  int row = blockIdx.x * ROWS + warp, token = blockIdx.y * TOKENS + warp;
  const u8* w = weight + row * stride;
  const float* from = (const float*)x + (size_t)token * columns;
  int at = c + (c >> 3) * 56;  // 64 (c / 8) + c mod 8
  int steps = (columns + 63) / 64, now = 0;
  float acc[EACH][EACH], sum[EACH][EACH];
  Brought next;
  bring(w, from, stride, rows - row, tokens - token, columns, at, next);
  put(staged[0], next, warp, c);
  __syncthreads();
#pragma unroll 1
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
      for (int t = 0; t < EACH; t++) acc[r][t] = 0.f;
#pragma unroll 1
    for (int m = 0; m < steps; m += STEPS, now ^= 1) {
      bool last = m + STEPS >= steps;
      if (!last || k < 7) {
        int i = last ? 8 * (k + 1) : 64 * (m + STEPS) + 8 * k;
        bring(w, from, stride, rows - row, tokens - token, columns, i + at, next);
      }
      if (m + STEPS <= steps) {
#pragma unroll
        for (int n = 0; n < STEPS; n++) step(staged[now], n, warp, q, j, acc);
      } else {  // the zero tail takes part as far as there are pieces of 64, and no further
        for (int n = 0; n < steps - m; n++) step(staged[now], n, warp, q, j, acc);
      }
      put(staged[now ^ 1], next, warp, c);
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
      for (int t = 0; t < EACH; t++) sum[r][t] = k ? add(sum[r][t], acc[r][t]) : acc[r][t];
  }
  int mine = blockIdx.x * ROWS + EACH * warp + j;
  float b = bias && mine < rows ? bias[mine] : 0.f;
#pragma unroll
  for (int t = 0; t < EACH; t++) {
    float parts[EACH];
#pragma unroll
    for (int r = 0; r < EACH; r++) parts[r] = sum[r][t];
    float total = fold_turned(parts, j);
    int to = blockIdx.y * TOKENS + 4 * t + q;
    if (mine < rows && to < tokens) out[(size_t)to * rows + mine] = bias ? add(total, b) : total;
  }
}
#endif
