// A tile of products of prompts on matrix units: its rows and tokens in shared memory, its sums.
//
// A tile is 128 rows by TOKENS tokens; a warp has 32 of the rows and every SIDES-th eight of the
// tokens, so that few tokens are shared out evenly. K goes by steps of four blocks: all threads unpack
// the rows' next blocks into shared memory, while the tokens' come by themselves, a step ahead.
#ifndef STRATA_TILES_H
#define STRATA_TILES_H

#define SIDES 2
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define EIGHTS 4  // eights of tokens of a warp: there is less shared memory
#else
#define EIGHTS 8
#endif
#define TOKENS (8 * EIGHTS * SIDES)
// Blocks of threads on a multiprocessor: as many as its shared memory has room for.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
#define BESIDE 1
#else
#define BESIDE 2
#endif
#define ROWS 128
#define THREADS (128 * SIDES)
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
  int count, next, end;  // of tokens; where the next tile's entries begin, and where all end
};
static_assert(sizeof(((Room*)0)->tokens) >= TOKENS * PITCH * 4, "inner rows have room");
static_assert(sizeof(Room) <= ROOM_BYTES, "a launch asks for enough");


// How a type sums here. SMALL: integers of -8..7, whose sums of 32 fit behind MAGIC. LESS: what is
// taken off when unpacking; where a type has minima they make up for it. BYTES: of eight blocks.
// TOGETHER: the loads of two blocks have registers enough, wherever these begin.
template <class W>
struct Sort {
  static const bool SMALL = false;
  static const int LESS = W::BIAS, BYTES = W::SCALED == 2 ? 210 : 8 * W::BLOCK_BYTES;
  static const bool TOGETHER = !W::SCALED;
};
template <class W>
struct Nibbles {
  static const bool SMALL = true, TOGETHER = !W::SCALED;
  static const int LESS = 8, BYTES = 8 * W::BLOCK_BYTES;
};
template <>
struct Sort<Q4_0> : Nibbles<Q4_0> {};
template <>
struct Sort<Q4_1> : Nibbles<Q4_1> {};
template <>
struct Sort<Q4_K> : Nibbles<Q4_K> {};

template <class A, class B>
struct Alike {
  static const bool TYPES = false;
};
template <class A>
struct Alike<A, A> {
  static const bool TYPES = true;
};

// Where a row's block goes: two pieces and its factors. Eight rows on, it is a constant further on.
struct Places {
  int4 *first, *second;
  float2* scales;
};

// A block of a row into shared memory, `rows` further on than `to`.
template <class W>
DEV void put(const Places& to, const Block& f, int rows) {
  const int less = Sort<W>::LESS;
  int w[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    w[i] = less ? (int)(((u32)f.w[i] + (128u - less) * 0x01010101u) ^ 0x80808080u) : f.w[i];
  int4 first = {w[0], w[1], w[2], w[3]}, second = {w[4], w[5], w[6], w[7]};
  to.first[rows * 2 * STEP] = first, to.second[rows * 2 * STEP] = second;
  float2 scales = {W::SCALED ? mul(f.d, (float)f.scale[0]) : f.d, 0.f};
  if (W::SCALED == 2) scales.y = mul(f.d, (float)f.scale[1]);
  if (W::SIGN < 0) scales.y = -mul(f.m, (float)f.low);
  if (W::SIGN > 0) scales.y = f.m;
  if (W::SIGN && less) scales.y = fma_((float)less, scales.x, scales.y);
  to.scales[rows] = scales;
}

// The rows of a tile: 128 of one matrix, or by sixteens of two of them in turn, from `matrix` and
// `other` on; `last` is the last row that there is. `wide`: all begin at multiples of 16.
struct Source {
  const u8 *matrix, *other;
  u32 stride, other_stride;
  int last;
  DEV bool wide() const {
    return (((size_t)matrix | (size_t)other | stride | other_stride) & 15) == 0;
  }
  DEV void begin(const u8* a, i64 a_stride, const u8* b, i64 b_stride, int first, int rows) {
    matrix = a + first * a_stride, other = b + first * b_stride;
    stride = (u32)a_stride, other_stride = (u32)b_stride, last = rows - 1 - first;
  }
};

// Block b of row `row` of a matrix and of those that lie `apart` from it, by twos, so that their loads
// go together; in shared memory they are 32 for each warp of four apart.
template <class W>
DEV void unpack_rows(const Places& to, const u8* matrix, u32 stride, bool wide, int row, int apart,
                     int last, int b) {
  const u8* from = matrix + (b >> 3) * Sort<W>::BYTES;
  b &= 7;
#pragma unroll
  for (int i = 0; i < 4 / SIDES; i += 2) {
    int r = row + apart * i, s = r + apart;
    const u8 *p = from + (u64)stride * (u32)(r < last ? r : last);
    const u8 *q = from + (u64)stride * (u32)(s < last ? s : last);
    const int f_at = 32 * SIDES * i, g_at = f_at + 32 * SIDES;
    Block f, g;
    if (Sort<W>::TOGETHER || (W::WIDE && wide)) {
      W::template load_as<W::WIDE>(p, b, f), W::template load_as<W::WIDE>(q, b, g);
      put<W>(to, f, f_at), put<W>(to, g, g_at);
    } else {
      W::template load_as<false>(p, b, f), put<W>(to, f, f_at);
      W::template load_as<false>(q, b, g), put<W>(to, g, g_at);
    }
  }
}

// The next step's blocks of the tile's rows; four neighbours of a thread have a row's.
template <class A, class B, bool TWO>
DEV void unpack(Room& room, const Source& source, int step, int blocks, int thread) {
  int j = thread & 3, r = thread >> 2, b = STEP * step + j;
  if (b >= blocks) return;
  int4* to = room.weights + r * 2 * STEP;
  Places places = {to + (2 * j ^ (r & 7)), to + ((2 * j + 1) ^ (r & 7)), room.scales[j] + r};
  bool second = TWO && (r & 16);
  int row = TWO ? (r >> 5) * 16 + (r & 15) : r, apart = (TWO ? 16 : 32) * SIDES;
  const u8* matrix = second ? source.other : source.matrix;
  u32 stride = second ? source.other_stride : source.stride;
  if (Alike<A, B>::TYPES || !second)
    unpack_rows<A>(places, matrix, stride, source.wide(), row, apart, source.last, b);
  else
    unpack_rows<B>(places, matrix, stride, source.wide(), row, apart, source.last, b);
}

// Sends a step's activations on their way: 16 pieces of a token, and its scales and sums.
DEV void send(Room& room, const u8* x, int step, int thread) {
  int piece = thread & 15, token = thread >> 4, count = room.count;
  const u8* from = x + (step / 2 * PIECES + (step & 1) * STEP) * 16;
  const u8* mine = fresh_pointer(from + ((piece >> 2) * 8 + (piece & 3)) * 16);
  u8* to = (u8*)(room.tokens[step & 1] + token * 16 + (piece ^ (token & 7)));
  u32 places[EIGHTS];
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) places[i] = room.from[token + 8 * SIDES * i];
#pragma unroll
  for (int i = 0; i < EIGHTS; i++)
    if (token + 8 * SIDES * i < count) copy16(to + i * 8 * SIDES * 256, mine + (u64)places[i] * 16);
  if (thread < count) {
    const u8* scales = x + (step / 2 * PIECES + 32 + (step & 1)) * 16 + (u64)room.from[thread] * 16;
    copy16((u8*)(room.token_scales + thread), scales);
    copy16((u8*)(room.token_sums + thread), scales + 32);
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
  DEV void load(float2 scales) {
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
      v = fma_(float_of(((u32)high[0][i] << 7) + (u32)low[0][i]), row.first, row.off);
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

// The first `left` blocks of a step: a warp's 32 rows, the first sixteen of type A, by its tokens, of
// which there are `count` from its first on.
template <class A, class B>
DEV void multiply(const Room& room, const int4* tokens, int left, int count, int thread,
                  float acc[EIGHTS][2][4]) {
  int lane = thread & 31, t = lane & 3, side = thread >> 7;
  int r = (thread >> 5 & 3) * 32;
  const bool ahead = A::SCALED < 2 && B::SCALED < 2;  // else registers are short
  // a block's pieces are those of the first one with j's bits turned over
  int from_row = ((r + (lane & 15)) * 2 * STEP + ((lane >> 4) ^ (lane & 7))) * 16;
  int from_token = ((side * 8 + (lane & 7)) * 16 + ((lane >> 3) * 4 ^ (lane & 7))) * 16;
  const float2* scales = room.scales[0] + r + (lane >> 2);
  const float4* pairs = room.pairs[0] + side * 4 + t;
#pragma unroll 1
  for (int j = 0; j < left; j++) {
    u32 a[2][4], b[2][4];
    Row<A> first[2];
    Row<B> second[2];
    matrices((const u8*)room.weights, from_row ^ j * 32, a[0]);
    matrices((const u8*)room.weights, (from_row ^ j * 32) + 16 * 2 * STEP * 16, a[1]);
    if (ahead) matrices((const u8*)tokens, from_token ^ j * 16, b[0]);
#pragma unroll
    for (int i = 0; i < 2; i++) first[i].load(scales[8 * i]), second[i].load(scales[16 + 8 * i]);
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
      if (8 * SIDES * n >= count) break;
      float4 pair = pairs[n * 4 * SIDES];
      int m = ahead ? n + 1 : n;
      if (m < EIGHTS)
        matrices((const u8*)tokens, (from_token ^ j * 16) + m * 8 * SIDES * 256, b[m & 1]);
      multiply_eight<A>(a[0], b[n & 1], first, pair, acc[n][0]);
      multiply_eight<B>(a[1], b[n & 1], second, pair, acc[n][1]);
    }
    scales += ROWS + 4, pairs += TOKENS / 2;
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
  send(room, x, 0, thread);
#pragma unroll 1
  for (int s = 0; STEP * s < blocks; s++) {
    if (s) __syncthreads();  // the weights have been read
    unpack<A, B, TWO>(room, source, s, blocks, fresh(thread));
    copies_done<0>();
    put_scales(room, fresh(thread));
    __syncthreads();
    if (STEP * (s + 1) < blocks) send(room, x, s + 1, fresh(thread));
    int left = blocks - STEP * s, count = room.count - 8 * (fresh(thread) >> 7);
    multiply<A, B>(room, room.tokens[s & 1], left < STEP ? left : STEP, count, fresh(thread), acc);
  }
}

#endif
