// Products of prompts on matrix units, quantised weights only, in an order of their own: one sum an
// element, blocks of 32 ascending (docs/arithmetic.md, section 11).
//
// A tile is 128 rows by TOKENS tokens; a warp has 32 of the rows and every SIDES-th eight of the
// tokens, so that few tokens are shared out evenly. K goes by steps of four blocks: all threads unpack
// the rows' next blocks into shared memory, while the tokens' come by themselves, a step ahead.

#ifndef SIDES
#define SIDES 1
#endif
#define EIGHTS 8  // eights of tokens of a warp
#define TOKENS (8 * EIGHTS * SIDES)
#define ROWS 128
#define THREADS (128 * SIDES)
#define BESIDE (SIDES == 1 ? 3 : 2)  // blocks of threads on one multiprocessor
#define STEP 4
#define PIECES (RECORD_BYTES / 16)
#define PITCH 68  // floats from one token's inner rows to the next's: a warp then writes to 32 banks

// The bits of 12582912: with an int of less than 2^22 added they are the float 12582912 + int.
#define MAGIC 0x4b400000
#define MAGIC_FLOAT 12582912.f

// What a block of threads keeps in shared memory. A row of weights is eight pieces of 16 bytes, two of
// a block, a token sixteen, four of a block's four; pieces change places within eight of them, so
// that eight rows' pieces of one kind lie in different banks.
struct Room {
  int4 tokens[2][TOKENS * 4 * STEP];
  int4 weights[ROWS * 2 * STEP];
  float2 scales[STEP][ROWS + 4];        // of a row's block: two factors
  float4 pairs[STEP][TOKENS / 2];       // of two tokens' block: both scales, both scales times sums
  float4 token_scales[TOKENS];          // of a token's next blocks, as its record has them
  int4 token_sums[TOKENS];
  u32 from[TOKENS];                     // where a token's activations begin, in pieces
  int entries[TOKENS];
  int count;  // of tokens
};
static_assert(sizeof(((Room*)0)->tokens) >= TOKENS * PITCH * 4, "inner rows have room");


// How a type sums here. SMALL: integers of -8..7, whose sums of 32 fit behind MAGIC. LESS: what is
// taken off when unpacking; where a type has minima they make up for it.
template <class W>
struct Sort {
  static const bool SMALL = false;
  static const int LESS = W::BIAS;
};
template <>
struct Sort<Q4_0> {
  static const bool SMALL = true;
  static const int LESS = 8;
};
template <>
struct Sort<Q4_1> : Sort<Q4_0> {};
template <>
struct Sort<Q4_K> : Sort<Q4_0> {};

// A block of row r of the tile, which lies at `j` in the step, into shared memory.
template <class W>
DEV void put(Room& room, const Block& f, int r, int j) {
  const int less = Sort<W>::LESS;
  int w[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    w[i] = less ? (f.w[i] + (128 - less) * 0x01010101) ^ (int)0x80808080u : f.w[i];
  int4 first = {w[0], w[1], w[2], w[3]}, second = {w[4], w[5], w[6], w[7]};
  int4* to = room.weights + r * 2 * STEP;
  to[2 * j ^ (r & 7)] = first, to[(2 * j + 1) ^ (r & 7)] = second;
  float2 scales = {W::SCALED ? mul(f.d, (float)f.scale[0]) : f.d, 0.f};
  if (W::SCALED == 2) scales.y = mul(f.d, (float)f.scale[1]);
  if (W::SIGN < 0) scales.y = -mul(f.m, (float)f.low);
  if (W::SIGN > 0) scales.y = f.m;
  if (W::SIGN && less) scales.y = fma_((float)less, scales.x, scales.y);
  room.scales[j][r] = scales;
}

// The rows of a tile: 128 of one matrix, or by sixteens of two of them in turn, beginning at `first`
// of each; `last` is the last row that there is.
struct Source {
  const u8 *matrix, *other;
  i64 stride, other_stride;
  int first, last;
  template <bool TWO>
  DEV const u8* at(int r) const {
    bool second = TWO && (r & 16);
    int row = first + (TWO ? (r >> 5) * 16 + (r & 15) : r);
    return (second ? other : matrix) + (row < last ? row : last) * (second ? other_stride : stride);
  }
};

// Two rows' block b. Whether rows are read in pieces is asked once, so that all loads go together.
template <class W>
DEV void unpack_two(Room& room, const u8* p, const u8* q, int b, int r, int s, int j) {
  Block f, g;
  if (W::WIDE && (((size_t)p | (size_t)q) & 15) == 0) {
    W::template load_as<W::WIDE>(p, b, f), W::template load_as<W::WIDE>(q, b, g);
  } else {
    W::template load_as<false>(p, b, f), W::template load_as<false>(q, b, g);
  }
  put<W>(room, f, r, j), put<W>(room, g, s, j);
}

// The next step's blocks of the tile's rows; four neighbours of a thread have a row's.
template <class A, class B, bool TWO>
DEV void unpack(Room& room, const Source& source, int step, int blocks, int thread) {
  int j = thread & 3, b = STEP * step + j;
  if (b >= blocks) return;
#pragma unroll
  for (int i = 0; i < 4 / SIDES; i += 2) {
    int r = (thread >> 2) + 32 * SIDES * i, s = r + 32 * SIDES;
    const u8 *p = source.at<TWO>(r), *q = source.at<TWO>(s);
    if (!TWO || !(r >> 4 & 1)) unpack_two<A>(room, p, q, b, r, s, j);
    else unpack_two<B>(room, p, q, b, r, s, j);
  }
}

// Sends a step's activations on their way: 16 pieces of a token, and its scales and sums.
DEV void send(Room& room, const int4* x, int step, int thread) {
  int piece = thread & 15, token = thread >> 4, count = room.count;
  int within = step / 2 * PIECES + (step & 1) * STEP;
  int4* to = room.tokens[step & 1] + token * 16 + (piece ^ (token & 7));
  const int4* from = x + within + (piece >> 2) * 8 + (piece & 3);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    int mine = token + 8 * SIDES * i;
    if (mine < count)
      copy16((u8*)(to + i * 8 * SIDES * 16), (const u8*)(from + room.from[mine]));
  }
  if (thread < count) {
    const int4* scales = x + step / 2 * PIECES + 32 + (step & 1) + room.from[thread];
    copy16((u8*)(room.token_scales + thread), (const u8*)scales);
    copy16((u8*)(room.token_sums + thread), (const u8*)(scales + 2));
  }
  copies_sent();
}

// A token's scales and sums, which this thread sent for, as `multiply` wants them.
DEV void put_scales(Room& room, int thread) {
  if (thread >= room.count) return;
  float4 d = room.token_scales[thread];
  int4 sum = room.token_sums[thread];
  float* to = (float*)room.pairs + (thread >> 1) * 4 + (thread & 1);
  float scale[4] = {d.x, d.y, d.z, d.w};
  int sums[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int j = 0; j < STEP; j++) {
    to[j * TOKENS * 2] = scale[j];
    to[j * TOKENS * 2 + 2] = mul(scale[j], (float)sums[j]);
  }
}

// A row's factors of a block.
template <class W>
struct Row {
  float first, second, off;
  DEV void load(const Room& room, int r, int j) {
    float2 scales = room.scales[j][r];
    first = scales.x, second = scales.y;
    off = mul(first, -MAGIC_FLOAT);
  }
};

// The sums of 16 rows by 8 tokens, a plane each; a second time, of the other half of a block, where
// halves have scales of their own.
template <class W>
struct Sums {
  int high[2][4], low[2][4];
  DEV void multiply(const u32* a, const u32* b) {
    if (W::SCALED == 2) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        multiply16(high[i], a + 2 * i, b[i], MAGIC);
        multiply16(low[i], a + 2 * i, b[2 + i], MAGIC);
      }
    } else {
      multiply32(high[0], a, b, Sort<W>::SMALL ? 0 : MAGIC);
      multiply32(low[0], a, b + 2, MAGIC);
    }
  }
  // float(S): the upper plane's part is exact, and MAGIC goes with the lower plane's.
  DEV float whole(int half, int i) const {
    float upper = fma_(float_of((u32)high[half][i]), 128.f, -129.f * MAGIC_FLOAT);
    return add(float_of((u32)low[half][i]), upper);
  }
  // A block's step of one sum. MAGIC times a row's factor is exact, so the first fma rounds S * factor.
  DEV float step(int i, const Row<W>& row, float scale, float scaled_sum, float acc) const {
    float v;
    if (Sort<W>::SMALL)
      v = fma_(float_of((u32)((high[0][i] << 7) + low[0][i])), row.first, row.off);
    else
      v = fma_(whole(0, i), row.first, 0.f);
    if (W::SCALED == 2) v = fma_(whole(1, i), row.second, v);
    acc = fma_(v, scale, acc);
    return W::SIGN ? fma_(row.second, scaled_sum, acc) : acc;
  }
};

template <class W>
DEV void multiply_eight(const u32* a, const u32* b, const Row<W>* rows, float4 pair, float* acc) {
  Sums<W> sums;
  sums.multiply(a, b);
#pragma unroll
  for (int i = 0; i < 4; i++)
    acc[i] = sums.step(i, rows[i >> 1], i & 1 ? pair.y : pair.x, i & 1 ? pair.w : pair.z, acc[i]);
}

// Block j of a step: a warp's 32 rows, the first sixteen of type A, by its tokens, of which there are
// `count` from its first on.
template <class A, class B>
DEV void multiply(const Room& room, const int4* tokens, int j, int count, int thread,
                  float acc[EIGHTS][2][4]) {
  int lane = thread & 31, g = lane >> 2, t = lane & 3;
  int r = (thread >> 5 & 3) * 32, side = thread >> 7;
  u32 a[2][4];
  int from_row = (r + (lane & 15)) * 2 * STEP + ((2 * j + (lane >> 4)) ^ (lane & 7));
  matrices((const u8*)room.weights, from_row * 16, a[0]);
  matrices((const u8*)room.weights, (from_row + 16 * 2 * STEP) * 16, a[1]);
  Row<A> first[2];
  Row<B> second[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    first[i].load(room, r + 8 * i + g, j);
    second[i].load(room, r + 16 + 8 * i + g, j);
  }
  int from_token = (side * 8 + (lane & 7)) * 16 + (((lane >> 3) * 4 + j) ^ (lane & 7));
  const float4* pairs = room.pairs[j] + side * 4 + t;
#pragma unroll
  for (int n = 0; n < EIGHTS; n++) {
    if (8 * SIDES * n >= count) break;
    u32 b[4];
    matrices((const u8*)tokens, (from_token + n * 8 * SIDES * 16) * 16, b);
    float4 pair = pairs[n * 4 * SIDES];
    multiply_eight<A>(a[0], b, first, pair, acc[n][0]);
    multiply_eight<B>(a[1], b, second, pair, acc[n][1]);
  }
}

// The product of the tile: acc[n][m][i] is row 16m + 8(i / 2) + lane / 4 of the warp's 32 and, of
// its n-th eight of tokens, token 2(lane % 4) + i % 2. All threads come together.
template <class A, class B, bool TWO>
DEV void product(Room& room, const Source& source, const u8* x, int blocks,
                 float acc[EIGHTS][2][4]) {
  int thread = fresh(threadIdx.x);
#pragma unroll
  for (int e = 0; e < EIGHTS * 8; e++) acc[e >> 3][e >> 2 & 1][e & 3] = 0.f;
  __syncthreads();  // `from` is there, and what was in the room has been read
  send(room, (const int4*)x, 0, thread);
#pragma unroll 1
  for (int s = 0; STEP * s < blocks; s++) {
    if (s) __syncthreads();  // the weights have been read
    unpack<A, B, TWO>(room, source, s, blocks, fresh(thread));
    copies_done<0>();
    put_scales(room, fresh(thread));
    __syncthreads();
    if (STEP * (s + 1) < blocks) send(room, (const int4*)x, s + 1, fresh(thread));
    int left = blocks - STEP * s, count = room.count - 8 * (fresh(thread) >> 7);
#pragma unroll 1
    for (int j = 0; j < STEP && j < left; j++)
      multiply<A, B>(room, room.tokens[s & 1], j, count, fresh(thread), acc);
  }
}

// `count` entries, of which `each` share a row of activations of so many pieces. All threads of the
// block come here; `product` is where they meet behind it.
DEV void take_entries(Room& room, const int* order, int count, int each, int pitch) {
  __syncthreads();  // the entries before have been stored
  if (threadIdx.x == 0) room.count = count;
  if (threadIdx.x < count) {
    int entry = room.entries[threadIdx.x] = order[threadIdx.x];
    room.from[threadIdx.x] = (u32)(entry / each) * pitch;
  }
}

// Every sum of this thread to put(row of the tile, token of the tile, sum).
template <class Put>
DEV void each_sum(const float acc[EIGHTS][2][4], int count, Put put) {
  int thread = fresh(threadIdx.x), lane = thread & 31;
  int row = (thread >> 5 & 3) * 32 + (lane >> 2), token = (thread >> 7) * 8 + (lane & 3) * 2;
#pragma unroll
  for (int e = 0; e < EIGHTS * 8; e++) {
    int n = e >> 3, m = e >> 2 & 1, i = e & 3, t = token + n * 8 * SIDES + (i & 1);
    if (t < count) put(row + 16 * m + 8 * (i >> 1), t, acc[n][m][i]);
  }
}

#ifdef KERNEL_matrix_linear
ROOMY(THREADS, BESIDE)
matrix_linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  int first = blockIdx.y * TOKENS, count = tokens - first < TOKENS ? tokens - first : TOKENS;
  if (threadIdx.x == 0) room.count = count;
  if (threadIdx.x < count)
    room.from[threadIdx.x] = (u32)(first + threadIdx.x) * ((columns + 255) / 256 * PIECES);
  Source source = {weight, weight, stride, stride, (int)blockIdx.x * ROWS, rows - 1};
  float acc[EIGHTS][2][4];
  product<TYPE, TYPE, false>(room, source, x, columns >> 5, acc);
  float* to = out + (size_t)first * rows + blockIdx.x * ROWS;
  int end = rows - blockIdx.x * ROWS;
  each_sum(acc, count, [=](int r, int t, float v) {
    if (r < end) to[(size_t)t * rows + r] = bias ? add(v, bias[rows - end + r]) : v;
  });
}
#endif

#ifdef KERNEL_matrix_gate_up
// 64 rows of gate and the same of up, by sixteens: a thread then has both of an element. They are two
// blocks of `down`'s activations, which go through shared memory to lie in a warp's lanes.
ROOMY(THREADS, BESIDE)
matrix_gate_up(const Wave* wave, const int* starts, const int* order, const u8* x, u8* inner,
               u32* status, i64 gate_stride, i64 up_stride, int experts, int top_k, int rows,
               int columns, int spread, int op) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  Wave e = wave[blockIdx.z];
  int end = starts[e.expert + 1];
  Source source = {(const u8*)e.gate, (const u8*)e.up,           gate_stride,
                   up_stride,         (int)blockIdx.x * ROWS / 2, rows - 1};
#pragma unroll 1
  for (int first = starts[e.expert] + blockIdx.y * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(room, order + first, count, top_k, (columns + 255) / 256 * PIECES);
    float acc[EIGHTS][2][4];
    product<GATE, UP, true>(room, source, x, columns >> 5, acc);
    __syncthreads();  // the activations have been read
    float* made = (float*)room.tokens;
    int thread = fresh(threadIdx.x), lane = thread & 31;
    float* to = made + ((thread >> 7) * 8 + (lane & 3) * 2) * PITCH + (thread >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
      if (8 * SIDES * n >= count) break;
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[(n * 8 * SIDES + (i & 1)) * PITCH + 8 * (i >> 1)] = mul(silu(acc[n][0][i]), acc[n][1][i]);
    }
    __syncthreads();
#pragma unroll 1
    for (int k = thread >> 5; k < 2 * count; k += THREADS / 32) {
      int token = k >> 1, half = k & 1, block = blockIdx.x * 2 + half;
      float h = made[token * PITCH + half * 32 + lane];
      if (block * 32 < rows) store_inner(inner, room.entries[token], rows, block, lane, h, status, op);
    }
  }
}
#endif

#ifdef KERNEL_matrix_down
ROOMY(THREADS, BESIDE)
matrix_down(const Wave* wave, const int* starts, const int* order, const u8* inner, float* out,
            i64 stride, int experts, int rows, int columns, int spread) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  Wave e = wave[blockIdx.z];
  int end = starts[e.expert + 1];
  const u8* matrix = (const u8*)e.down;
  Source source = {matrix, matrix, stride, stride, (int)blockIdx.x * ROWS, rows - 1};
#pragma unroll 1
  for (int first = starts[e.expert] + blockIdx.y * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(room, order + first, count, 1, (columns + 255) / 256 * 64);
    float acc[EIGHTS][2][4];
    product<TYPE, TYPE, false>(room, source, inner, columns >> 5, acc);
    int left = rows - blockIdx.x * ROWS;
    float* to = out + blockIdx.x * ROWS;
    each_sum(acc, count, [=, &room](int r, int t, float v) {
      if (r < left) to[(size_t)room.entries[t] * rows + r] = v;
    });
  }
}
#endif
