// Products of prompts with rows of floats (section 4): a block has 64 rows and 32 tokens, eight lanes
// the same eight of both. In a pass, lane j computes stripe 8k + j of each of its 64 sums, and the
// fold's step k follows at once: so a sum takes two registers, not one for each stripe, and what is
// staged is read for 64 multiplications by 16 loads. The rows are two times 32, which may be of two
// types: gate and up of an expert, or neighbours.

#define ROWS 32    // of each type
#define TOKENS 32
#define EACH 8     // of the rows, and of the tokens, that lanes of a group have
#define STEPS 4    // elements of a stripe that are staged together
#define WIDE (8 * STEPS)
#define STAGES 3
#ifdef STRATA_HIP
#define AT_ONCE 1
#else
#define AT_ONCE STEPS
#endif

// Elements 8k to 8k + 7 of STEPS pieces of 64, as they lie in memory: of tokens so far apart that four
// of them, of which lanes of one warp read the same element, do not meet in a bank.
template <class A, class B>
struct Staged {
  float x[TOKENS][WIDE + 8];
  u8 a[ROWS][WIDE * A::BYTES], b[ROWS][WIDE * B::BYTES];
};

// Weight 8m + j of a row that is of the one type or of the other.
template <class A, class B>
struct Either {
  DEV static float at(const u8* row, int r, int i, bool second) {
    return second ? B::at(row + r * WIDE * B::BYTES, i) : A::at(row + r * WIDE * A::BYTES, i);
  }
};
template <class A>
struct Either<A, A> {
  DEV static float at(const u8* row, int r, int i, bool) { return A::at(row + r * WIDE * A::BYTES, i); }
};

template <int BYTES>
struct Raw {
  typedef u16 Type;
};
template <>
struct Raw<4> {
  typedef u32 Type;
};

// Sixteen bytes that a thread brings of each piece: where they lie in the first one, and which element
// of a row that is. `place`: the element's among those of a piece of WIDE.
struct Part {
  const u8* from;
  int element, place;
};

template <int BYTES>
DEV Part part_of(const u8* row, int n) {
  int place = n * (16 / BYTES), element = place + (place >> 3) * 56;
  Part o = {row + (size_t)element * BYTES, element, place};
  return o;
}

// What lies past `columns` is zeros. `whole`: the sixteen bytes are aligned, and within the row or past it
// as a whole.
template <int BYTES>
DEV void bring(u8* row, const Part& part, int i, int columns, bool whole) {
  typedef typename Raw<BYTES>::Type T;
  u8* to = row + part.place * BYTES;
  const u8* from = part.from + (size_t)i * BYTES;
  i += part.element;
  if (whole && i < columns) {
    copy16(to, from);
    return;
  }
#pragma unroll
  for (int n = 0; n < 16 / BYTES; n++) ((T*)to)[n] = i + n < columns ? ((const T*)from)[n] : (T)0;
}

// What a thread brings: of a token, and of a row of each type; of short types the first half of the
// threads brings all.
template <class A, class B>
struct Share {
  static const int OF_A = WIDE * A::BYTES / 16, OF_B = WIDE * B::BYTES / 16;
  Part x, a, b;
  bool whole;

  // `x_row` is that of the thread's token, tid / 8. Rows past the last one of `left` are that one.
  DEV void begin(int tid, const u8* x_row, const u8* rows_a, i64 stride_a, int left_a, const u8* rows_b,
                 i64 stride_b, int left_b, int columns) {
    int n = tid / OF_A % ROWS, m = tid / OF_B % ROWS;
    x = part_of<4>(x_row, tid & 7);
    a = part_of<A::BYTES>(rows_a + (n < left_a ? n : left_a - 1) * stride_a, tid % OF_A);
    b = part_of<B::BYTES>(rows_b + (m < left_b ? m : left_b - 1) * stride_b, tid % OF_B);
    whole = (((size_t)rows_a | (size_t)rows_b | (size_t)stride_a | (size_t)stride_b) & 15) == 0 &&
            columns % 8 == 0;
  }

  DEV void send(Staged<A, B>& to, int i, int columns) const {
    int tid = threadIdx.x;
    bring<4>((u8*)to.x[tid / 8], x, i, columns, whole && ((size_t)x.from & 15) == 0);
    if (tid < ROWS * OF_A) bring<A::BYTES>(to.a[tid / OF_A], a, i, columns, whole);
    if (tid < ROWS * OF_B) bring<B::BYTES>(to.b[tid / OF_B], b, i, columns, whole);
  }
};

template <class A, class B>
DEV void step(const Staged<A, B>& s, int m, int warp, int q, int j, float acc[EACH][EACH]) {
  float w[EACH], x[EACH];
  bool second = warp >= ROWS / EACH;
  const u8* rows = second ? s.b[EACH * warp - ROWS] : s.a[EACH * warp];
#pragma unroll
  for (int r = 0; r < EACH; r++) w[r] = Either<A, B>::at(rows, r, 8 * m + j, second);
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

// Every product of the tile to put(row, token, value), by all threads of the block. What comes next is
// asked for STAGES - 1 pieces ahead.
template <class A, class B, class Put>
DEV void float_tile(const Share<A, B>& share, Staged<A, B>* staged, int columns, Put put) {
  int tid = fresh(threadIdx.x), j = tid & 7, q = tid >> 3 & 3, warp = tid >> 5;
  int steps = (columns + 63) / 64, next_m = 0, next_k = 0, now = 0;
  float acc[EACH][EACH], sum[EACH][EACH];
#define ASK(to)                                                   \
  do {                                                            \
    if (next_k < 8) {                                             \
      share.send(to, 64 * next_m + 8 * next_k, columns);          \
      next_m += STEPS;                                            \
      if (next_m >= steps) next_m = 0, next_k++;                  \
    }                                                             \
    copies_sent();                                                \
  } while (0)
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) ASK(staged[n]);
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
      ASK(staged[now ? now - 1 : STAGES - 1]);
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
#pragma unroll
  for (int t = 0; t < EACH; t++) {
    float parts[EACH];
#pragma unroll
    for (int r = 0; r < EACH; r++) parts[r] = sum[r][t];
    put(EACH * warp + j, 4 * t + q, fold_turned(parts, j));
  }
}

// Entries of a tile; past the last one it is that one again. All threads of the block come here.
DEV void take_entries(int* entries, const int* order, int count) {
  __syncthreads();  // those before have been used, and what was staged for them
  if (threadIdx.x < TOKENS) entries[threadIdx.x] = order[threadIdx.x < count ? threadIdx.x : count - 1];
  __syncthreads();
}

#ifdef KERNEL_prompt_floats
ROOMY(256, 1)
prompt_floats(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  __shared__ __align__(16) Staged<TYPE, TYPE> staged[STAGES];
  int row = blockIdx.x * 2 * ROWS, token = blockIdx.y * TOKENS, mine = token + threadIdx.x / 8;
  const u8* first = weight + row * stride;
  int left = rows - row, behind = left > ROWS ? ROWS : 0;  // without a second half the first one again
  Share<TYPE, TYPE> share;
  share.begin(threadIdx.x, x + (size_t)(mine < tokens ? mine : tokens - 1) * columns * 4, first, stride, left,
              first + behind * stride, stride, left - behind, columns);
  float_tile(share, staged, columns, [=](int r, int t, float v) {
    r += row, t += token;
    if (r < rows && t < tokens) out[(size_t)t * rows + r] = bias ? add(v, bias[r]) : v;
  });
}
#endif

#ifdef KERNEL_prompt_gate_up
// 32 rows of gate and up of one expert, which make one block of `down`'s activations for each of
// its entries.
ROOMY(256, 1)
prompt_gate_up(const Wave* wave, const int* starts, const int* order, const u8* x, u8* inner,
               u32* status, i64 gate_stride, i64 up_stride, int experts, int top_k, int rows,
               int columns, int spread, int op) {
  follow();
  __shared__ __align__(16) Staged<GATE, UP> staged[STAGES];
  __shared__ float products[TOKENS][2 * ROWS + 1];
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.y];
  int end = starts[e.expert + 1], lane = threadIdx.x & 31;
  const u8* gate = (const u8*)e.gate + (size_t)(blockIdx.x * ROWS) * gate_stride;
  const u8* up = (const u8*)e.up + (size_t)(blockIdx.x * ROWS) * up_stride;
  for (int first = starts[e.expert] + blockIdx.z * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(entries, order + first, count);
    Share<GATE, UP> share;
    int tid = fresh(threadIdx.x);
    share.begin(tid, x + (size_t)(entries[tid / 8] / top_k) * columns * 4, gate, gate_stride, ROWS, up,
                up_stride, ROWS, columns);
    float_tile(share, staged, columns, [&](int r, int t, float v) { products[t][r] = v; });
    __syncthreads();
    for (int t = threadIdx.x >> 5; t < count; t += 8) {
      float h = mul(silu(products[t][lane]), products[t][ROWS + lane]);
      store_inner(inner, entries[t], rows, blockIdx.x, lane, h, status, op);
    }
  }
}
#endif

#ifdef KERNEL_prompt_down
// The grid counts blocks of 32 rows: every other one has 64.
ROOMY(256, 1)
prompt_down(const Wave* wave, const int* starts, const int* order, const u8* inner, float* out,
            i64 stride, int experts, int rows, int columns, int spread) {
  follow();
  if (blockIdx.x & 1) return;
  __shared__ __align__(16) Staged<TYPE, TYPE> staged[STAGES];
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.y];
  int end = starts[e.expert + 1], row = blockIdx.x * ROWS, left = rows - row;
  int behind = left > ROWS ? ROWS : 0;  // without a second half the first one again
  const u8* weight = (const u8*)e.down + (size_t)row * stride;
  for (int first = starts[e.expert] + blockIdx.z * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(entries, order + first, count);
    Share<TYPE, TYPE> share;
    int tid = fresh(threadIdx.x);
    share.begin(tid, inner + entries[tid / 8] * inner_pitch(columns), weight, stride, left,
                weight + behind * stride, stride, left - behind, columns);
    float_tile(share, staged, columns, [&](int r, int t, float v) {
      if (r < left && t < count) out[(size_t)entries[t] * rows + row + r] = v;
    });
  }
}
#endif
