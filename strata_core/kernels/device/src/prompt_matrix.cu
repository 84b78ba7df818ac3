// Products of prompts on matrix units, quantised weights only: tiles of 32 rows by 32 tokens.
//
// K goes by superblocks of 256. All threads unpack the 32 rows' next eight blocks into shared memory,
// a block each; then warp j multiplies block j of the superblock, so that it holds stripe j of the
// whole tile, ascending (section 3). The eight warps' stripes are folded at the end. Both planes of
// the activations meet the weights in the same step.

#define TOKENS 32
#define ROWS 32
#define PIECES (RECORD_BYTES / 16)
#define PITCH 36  // floats from one token's stripe to the next: a warp's lanes then write to 32 banks

// The bits of 12582912: with an int of less than 2^22 added they are the float 12582912 + int.
#define MAGIC 0x4b400000
#define MAGIC_FLOAT 12582912.f
#define NONE 0xffffffffu

// What a block keeps in shared memory; together under 48 KB. Pieces of 16 bytes change places within
// their row, so that eight rows' pieces of one block lie in different banks.
struct Room {
  int4 tokens[2][TOKENS * PIECES];  // superblocks of the activations, and stripes in the end
  int4 weights[ROWS * 16];          // signed bytes: 16 of the first halves of the blocks, then the others
  float2 scales[8][ROWS + 1];       // d and m of a block of a row
  u32 integers[8][ROWS + 1];        // its two integer scales, exact as the upper halves of floats
  u32 from[TOKENS];                 // where a token's activations begin, in pieces
  int count;                        // of tokens
};
static_assert(sizeof(((Room*)0)->tokens) >= 8 * TOKENS * PITCH * 4, "eight stripes have room");

// The place of a piece of a token's record.
DEV int token_piece(int token, int piece) {
  int swap = piece < 32 ? (token & 7) ^ (token & 1) << 2 : token >> 1 & 3;
  return token * PIECES + (piece ^ swap);
}

// What a thread copies of a superblock: up to five pieces. Warp w copies every eighth token from the
// w-th on; the last four pieces of those are sixteen copies more.
struct Copies {
  u32 from[5];  // in pieces from where all activations begin; NONE where there is nothing to copy
  DEV void find(const Room& room, int thread) {
    int lane = thread & 31, warp = thread >> 5;
#pragma unroll
    for (int i = 0; i < 5; i++) {
      int token = warp + 8 * (i < 4 ? i : lane >> 2), piece = i < 4 ? lane : 32 + (lane & 3);
      bool some = token < room.count && (i < 4 || lane < 16);
      from[i] = some ? room.from[token] + piece : NONE;
    }
  }
  // Sends the next superblock on its way.
  DEV void send(int4* to, const int4* x, int thread) {
    int lane = thread & 31, warp = thread >> 5;
    int4* first = to + token_piece(warp, lane);
#pragma unroll
    for (int i = 0; i < 5; i++) {
      int4* here = i < 4 ? first + i * 8 * PIECES
                         : to + token_piece(warp + 8 * (lane >> 2), 32 + (lane & 3));
      if (from[i] == NONE) continue;
      copy16((u8*)here, (const u8*)(x + from[i]));
      from[i] += PIECES;
    }
    copies_sent();
  }
};

// Block `thread % 8` of row `thread / 8` into shared memory: its integers without the bias, its scales.
template <class W>
DEV void unpack(Room& room, const Block& f, int thread) {
  int r = thread >> 3, j = thread & 7, w[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    w[i] = f.w[i];
    if (W::BIAS)
      w[i] = (int)((((u32)w[i] | 0x80808080u) - (u32)W::BIAS * 0x01010101u) ^ 0x80808080u);
  }
  int4 first = {w[0], w[1], w[2], w[3]}, second = {w[4], w[5], w[6], w[7]};
  int4* to = room.weights + r * 16 + (j ^ (r & 7));
  to[0] = first, to[8] = second;
  float2 scales = {f.d, W::SIGN ? f.m : 0.f};
  room.scales[j][r] = scales;
  if (W::SCALED)
    room.integers[j][r] = bits_of((float)f.scale[0]) >> 16 |
                          (bits_of((float)(W::SCALED == 2 ? f.scale[1] : f.low)) & 0xffff0000u);
}

// A block's scales of one row as its steps want them: floats, and what takes MAGIC off again.
template <class W>
struct Scales {
  float d, m, first, second, off, off2;
  DEV void load(const Room& room, int r, int j) {
    float2 scales = room.scales[j][r];
    d = scales.x, m = scales.y;
    if (!W::SCALED) return;
    u32 both = room.integers[j][r];
    first = float_of(both << 16), second = float_of(both & 0xffff0000u);
    off = mul(first, -MAGIC_FLOAT), off2 = mul(second, -MAGIC_FLOAT);
  }
};

// The sums of 16 rows by 8 tokens over one plane, from MAGIC on; a second time, of the other half of a
// block, where halves have scales of their own.
template <class W>
struct Sums {
  int c[2][4];
  DEV void multiply(const u32* a, const u32* b) {
    if (W::SCALED == 2) {
      multiply16(c[0], a, b[0], MAGIC);
      multiply16(c[1], a + 2, b[1], MAGIC);
    } else {
      multiply32(c[0], a, b, MAGIC);
    }
  }
  // The sum as a float, times the integer scales: exact, being below 2^24.
  DEV float at(int i, const Scales<W>& s) const {
    if (!W::SCALED) return sub(float_of((u32)c[0][i]), MAGIC_FLOAT);
    float v = fma_(float_of((u32)c[0][i]), s.first, s.off);
    if (W::SCALED < 2) return v;
    return add(v, fma_(float_of((u32)c[1][i]), s.second, s.off2));
  }
};

// Steps 1 to 3 of section 3. The planes are joined with one rounding, which is float(S).
template <class W>
DEV float steps(const Sums<W>& high, const Sums<W>& low, int i, const Scales<W>& s, float d,
                float sum, float acc) {
  float total = fma_(high.at(i, s), 128.f, low.at(i, s));
  if (W::SIGN < 0) acc = fma_(-mul(s.second, sum), mul(s.m, d), acc);
  acc = fma_(total, mul(s.d, d), acc);
  if (W::SIGN > 0) acc = fma_(sum, mul(s.m, d), acc);
  return acc;
}

// Block j of a superblock: 32 rows by the tokens of the tile, by one warp. Tokens are skipped by
// eights. Where a row has integer scales, the rows come in two halves, for want of registers.
template <class W>
DEV void multiply_block(const Room& room, const int4* tokens, int j, int count, int lane,
                        float acc[4][2][4]) {
  const int tiles = W::SCALED ? 1 : 2;
  int g = lane >> 2, t = lane & 3;
  int from_row = (lane & 15) * 16 + (lane >> 4) * 8 + (j ^ (lane & 7));
  int from_token = token_piece(lane & 7, (lane >> 3) * 8 + j);
  // pieces 32 on are swapped alike for tokens 2t and 2t + 1
  int d_at = token_piece(2 * t, 32 + (j >> 2)) * 4 + (j & 3);
  int sum_at = token_piece(2 * t, 34 + (j >> 2)) * 4 + (j & 3);
#pragma unroll
  for (int first = 0; first < 2; first += tiles) {
    u32 a[tiles][4];
    Scales<W> s[2 * tiles];
#pragma unroll
    for (int m = 0; m < tiles; m++) {
      matrices((const u8*)room.weights, (from_row + (first + m) * 256) * 16, a[m]);
      s[2 * m].load(room, (first + m) * 16 + g, j);
      s[2 * m + 1].load(room, (first + m) * 16 + 8 + g, j);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      if (8 * n >= count) break;
      u32 b[4];
      matrices((const u8*)tokens, (from_token + n * 8 * PIECES) * 16, b);
      float d[2], sum[2];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        int token = (n * 8 + e) * PIECES * 4;
        d[e] = ((const float*)tokens)[token + d_at];
        sum[e] = W::SIGN ? (float)((const int*)tokens)[token + sum_at] : 0.f;
      }
#pragma unroll
      for (int m = 0; m < tiles; m++) {
        Sums<W> high, low;
        high.multiply(a[m], b), low.multiply(a[m], b + 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& to = acc[n][first + m][i];
          to = steps<W>(high, low, i, s[2 * m + (i >> 1)], d[i & 1], sum[i & 1], to);
        }
      }
    }
  }
}

// The fold of the warps' stripes: a thread gets row `thread % 32` of every eighth token.
DEV void fold_stripes(Room& room, const float acc[4][2][4], int thread, float* out) {
  int lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  float* stripes = (float*)room.tokens;
  __syncthreads();  // the activations have been read
#pragma unroll
  for (int e = 0; e < 32; e++) {
    int n = e >> 3, m = e >> 2 & 1, i = e & 3;
    int token = warp * TOKENS + n * 8 + 2 * t + (i & 1), row = m * 16 + (i >> 1) * 8 + g;
    stripes[token * PITCH + row] = acc[n][m][i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float* from = stripes + (warp + 8 * i) * PITCH + lane;
    float total = from[0];
#pragma unroll
    for (int k = 1; k < 8; k++) total = add(total, from[k * TOKENS * PITCH]);
    out[i] = total;
  }
}

// 32 rows times `count` tokens, which `room.from` tells of. `row` is this thread's, threadIdx.x / 8 of
// them; out[i] is row threadIdx.x % 32 times token threadIdx.x / 32 + 8i. All threads come together.
template <class W>
DEV void product(Room& room, const u8* row, const u8* x, int blocks, float* out) {
  int thread = fresh(threadIdx.x), j = thread & 7, warp = thread >> 5;
  const int4* from = (const int4*)x;
  float acc[4][2][4];
#pragma unroll
  for (int e = 0; e < 32; e++) acc[e >> 3][e >> 2 & 1][e & 3] = 0.f;
  Block f;
  if (j < blocks) W::load(row, fresh(j), f);
  __syncthreads();  // `from` is there, and what was in the room has been read
  Copies copies;
  copies.find(room, thread);
  copies.send(room.tokens[0], from, thread);
#pragma unroll 1
  for (int s = 0; 8 * s < blocks; s++) {
    int next = 8 * (s + 1);
    if (s) __syncthreads();  // the weights have been read
    if (8 * s + j < blocks) unpack<W>(room, f, fresh(thread));
    copies_done<0>();
    __syncthreads();
    if (next < blocks) copies.send(room.tokens[(s + 1) & 1], from, fresh(thread));
    if (next + 8 + j < blocks) prefetch(row + (size_t)(next + 8 + j) * W::BLOCK_BYTES);
    if (8 * s + warp < blocks) {
      const int4* tokens = room.tokens[s & 1];
      int lane = thread & 31, count = room.count;
      multiply_block<W>(room, tokens, warp, count, lane, acc);
    }
    if (next + j < blocks) W::load(row, next + fresh(j), f);
  }
  fold_stripes(room, acc, fresh(thread), out);
}

// The tile's entries, of which `each` share a row of activations of so many pieces. All threads of the
// block come here; `product` is where they meet behind it.
DEV void take_entries(Room& room, int* entries, const int* order, int count, int each, int pitch) {
  __syncthreads();  // the entries before have been stored
  if (threadIdx.x == 0) room.count = count;
  if (threadIdx.x < count) {
    int entry = entries[threadIdx.x] = order[threadIdx.x];
    room.from[threadIdx.x] = (u32)(entry / each) * pitch;
  }
}

// Two products with the same tokens, one behind the other; by the same instructions where the types
// are the same.
template <class A, class B>
struct Pair {
  DEV static void products(Room& room, const u8* first, const u8* second, const u8* x,
                           int blocks, float* a, float* b) {
    product<A>(room, first, x, blocks, a);
    product<B>(room, second, x, blocks, b);
  }
};
template <class A>
struct Pair<A, A> {
  DEV static void products(Room& room, const u8* first, const u8* second, const u8* x,
                           int blocks, float* a, float* b) {
#pragma unroll 1
    for (int k = 0; k < 2; k++) {
      product<A>(room, k ? second : first, x, blocks, b);
      if (!k)
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = b[i];
    }
  }
};

#ifdef KERNEL_matrix_linear
ROOMY(256, 2)
matrix_linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  __shared__ Room room;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int first = blockIdx.y * TOKENS, count = tokens - first < TOKENS ? tokens - first : TOKENS;
  if (threadIdx.x == 0) room.count = count;
  if (threadIdx.x < count)
    room.from[threadIdx.x] = (u32)(first + threadIdx.x) * ((columns + 255) / 256 * PIECES);
  int mine = blockIdx.x * ROWS + (threadIdx.x >> 3), r = blockIdx.x * ROWS + lane;
  float found[4];
  product<TYPE>(room, weight + (size_t)(mine < rows ? mine : rows - 1) * stride, x,
                columns >> 5, found);
  if (r >= rows) return;
  float b = bias ? bias[r] : 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int t = warp + 8 * i;
    if (t < room.count) out[(size_t)(first + t) * rows + r] = bias ? add(found[i], b) : found[i];
  }
}
#endif

#ifdef KERNEL_matrix_gate_up
// 32 rows of gate and up of one expert, one behind the other. The lanes of a warp then hold a block of
// `down`'s activations, entry by entry.
ROOMY(256, 2)
matrix_gate_up(const Wave* wave, const int* starts, const int* order, const u8* x, u8* inner,
               u32* status, i64 gate_stride, i64 up_stride, int experts, int top_k, int rows,
               int columns, int spread, int op) {
  follow();
  __shared__ Room room;
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.z];
  int end = starts[e.expert + 1];
  int mine = blockIdx.x * ROWS + (threadIdx.x >> 3);
  const u8* gate = (const u8*)e.gate + (size_t)mine * gate_stride;
  const u8* up = (const u8*)e.up + (size_t)mine * up_stride;
#pragma unroll 1
  for (int first = starts[e.expert] + blockIdx.y * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(room, entries, order + first, count, top_k, (columns + 255) / 256 * PIECES);
    float a[4], b[4];
    Pair<GATE, UP>::products(room, gate, up, x, columns >> 5, a, b);
    int lane = fresh(threadIdx.x) & 31;
#pragma unroll 1
    for (int t = fresh(threadIdx.x) >> 5; t < room.count; t += 8) {
      float h = mul(silu(a[0]), b[0]);
#pragma unroll
      for (int i = 0; i < 3; i++) a[i] = a[i + 1], b[i] = b[i + 1];
      store_inner(inner, entries[t], rows, blockIdx.x, lane, h, status, op);
    }
  }
}
#endif

#ifdef KERNEL_matrix_down
ROOMY(256, 2)
matrix_down(const Wave* wave, const int* starts, const int* order, const u8* inner, float* out,
            i64 stride, int experts, int rows, int columns, int spread) {
  follow();
  __shared__ Room room;
  __shared__ int entries[TOKENS];
  Wave e = wave[blockIdx.z];
  int end = starts[e.expert + 1];
  int mine = blockIdx.x * ROWS + (threadIdx.x >> 3);
  const u8* row = (const u8*)e.down + (size_t)(mine < rows ? mine : rows - 1) * stride;
#pragma unroll 1
  for (int first = starts[e.expert] + blockIdx.y * TOKENS; first < end; first += spread * TOKENS) {
    int count = end - first < TOKENS ? end - first : TOKENS;
    take_entries(room, entries, order + first, count, 1, (columns + 255) / 256 * 64);
    float found[4];
    product<TYPE>(room, row, inner, columns >> 5, found);
    int warp = fresh(threadIdx.x) >> 5, r = blockIdx.x * ROWS + (fresh(threadIdx.x) & 31);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int t = warp + 8 * i;
      if (t < room.count && r < rows) out[(size_t)entries[t] * rows + r] = found[i];
    }
  }
}
#endif
