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
#define STAGES 3
#ifdef STRATA_HIP
#define AT_ONCE 1
#else
#define AT_ONCE STEPS
#endif
#define PIECES (ROWS * WIDE * TYPE::BYTES / 16 / 256)  // of sixteen bytes, of rows, for each thread

// Element c of a piece of WIDE in memory, counted from its beginning.
DEV int spread_out(int c) { return c + (c >> 3) * 56; }

template <int BYTES>
struct Raw {
  typedef u16 Type;
};
template <>
struct Raw<4> {
  typedef u32 Type;
};
typedef Raw<TYPE::BYTES>::Type RAW;

// Elements 8k to 8k + 7 of STEPS pieces of 64, as they lie in memory: of tokens so far apart that four
// of them, of which lanes of one warp read the same element, do not meet in a bank.
struct Staged {
  float x[TOKENS][WIDE + 8];
  u8 w[ROWS][WIDE * TYPE::BYTES];
};

// Sixteen bytes of a row from element i on; what lies past `columns` is zeros. `whole`: they are
// aligned, and within the row or past it as a whole.
template <class T>
DEV void bring(u8* to, const u8* from, int i, int columns, bool whole) {
  const int count = 16 / sizeof(T);
  if (whole && i < columns) {
    copy16(to, from);
    return;
  }
#pragma unroll
  for (int n = 0; n < count; n++) ((T*)to)[n] = i + n < columns ? ((const T*)from)[n] : (T)0;
}

DEV void step(const Staged& s, int m, int warp, int q, int j, float acc[EACH][EACH]) {
  float w[EACH], x[EACH];
#pragma unroll
  for (int r = 0; r < EACH; r++) w[r] = TYPE::at(s.w[EACH * warp + r], 8 * m + j);
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

// What one thread brings of each piece: sixteen bytes of a token, and of one row or two. Rows and tokens
// past the last one are the last one again.
struct Share {
  const u8 *x, *w[PIECES];
  int column, of_row;  // the first element of those bytes in a piece of WIDE
  bool whole;
};

DEV void bring_share(const Share& share, Staged& to, int i, int columns) {
  const int per = 16 / TYPE::BYTES;
  int tid = threadIdx.x, at = i + spread_out(share.column);
  bring<u32>((u8*)&to.x[tid / 8][share.column], share.x + (size_t)i * 4, at, columns, share.whole);
  at = i + spread_out(share.of_row);
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    u8* row = to.w[(tid + 256 * n) / (WIDE / per)];
    bring<RAW>(row + share.of_row * TYPE::BYTES, share.w[n] + (size_t)i * TYPE::BYTES, at, columns,
               share.whole);
  }
  copies_sent();
}

ROOMY(256, 1)
prompt_floats(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  __shared__ __align__(16) Staged staged[STAGES];
  int tid = threadIdx.x, j = tid & 7, q = tid >> 3 & 3, warp = tid >> 5;
  int row = blockIdx.x * ROWS, token = blockIdx.y * TOKENS;
  const int per = 16 / TYPE::BYTES;
  Share share;
  share.column = 4 * (tid & 7), share.of_row = per * (tid & (WIDE / per - 1));
  int mine = token + tid / 8;
  share.x = x + ((size_t)(mine < tokens ? mine : tokens - 1) * columns + spread_out(share.column)) * 4;
#pragma unroll
  for (int n = 0; n < PIECES; n++) {
    int r = row + (tid + 256 * n) / (WIDE / per);
    share.w[n] = weight + (r < rows ? r : rows - 1) * stride + spread_out(share.of_row) * TYPE::BYTES;
  }
  share.whole = (((size_t)weight | (size_t)x | (size_t)stride) & 15) == 0 && columns % 8 == 0;
  int steps = (columns + 63) / 64, next_m = 0, next_k = 0, now = 0;
  float acc[EACH][EACH], sum[EACH][EACH];
  // what comes next is asked for STAGES - 1 pieces ahead; past the last one nothing is
#define ASK(to)                                                              \
  if (next_k < 8) {                                                          \
    bring_share(share, to, 64 * next_m + 8 * next_k, columns);               \
    next_m += STEPS;                                                         \
    if (next_m >= steps) next_m = 0, next_k++;                               \
  } else {                                                                   \
    copies_sent();                                                           \
  }
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) ASK(staged[n])
#pragma unroll 1
  for (int k = 0; k < 8; k++) {
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
      for (int t = 0; t < EACH; t++) acc[r][t] = 0.f;
#pragma unroll 1
    for (int m = 0; m < steps; m += STEPS) {
      copies_done<STAGES - 2>();
      __syncthreads();  // this piece has come for all, and nobody needs the one before it
      int free = now ? now - 1 : STAGES - 1;
      ASK(staged[free])
      if (m + STEPS <= steps) {
#pragma unroll(AT_ONCE)
        for (int n = 0; n < STEPS; n++) step(staged[now], n, warp, q, j, acc);
      } else {  // the zero tail takes part as far as there are pieces of 64, and no further
        for (int n = 0; n < steps - m; n++) step(staged[now], n, warp, q, j, acc);
      }
      now = now + 1 < STAGES ? now + 1 : 0;
    }
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
      for (int t = 0; t < EACH; t++) sum[r][t] = k ? add(sum[r][t], acc[r][t]) : acc[r][t];
  }
  row += EACH * warp + j;
  float b = bias && row < rows ? bias[row] : 0.f;
#pragma unroll
  for (int t = 0; t < EACH; t++) {
    float parts[EACH];
#pragma unroll
    for (int r = 0; r < EACH; r++) parts[r] = sum[r][t];
    float total = fold_turned(parts, j);
    int to = token + 4 * t + q;
    if (row < rows && to < tokens) out[(size_t)to * rows + row] = bias ? add(total, b) : total;
  }
}
#endif
