// Products of prompts on matrix units, quantised weights only, in an order of their own: one sum an
// element, blocks of 32 ascending (docs/arithmetic.md, section 11).

// The tile's entries: `width` from `first` on, to `end` at most, of which `each` share a row of
// activations of so many pieces; in the order of `order`, where there is one. The next tile begins
// `tiles` widths further on, which is kept in the room, for want of registers. All threads of the block
// come here; `product` is where they meet behind it.
DEV void take_entries(Room& room, const int* order, int first, int end, int width, int tiles, int each,
                      int pitch) {
  __syncthreads();  // the entries before have been stored
  int thread = fresh(threadIdx.x), count = end - first < width ? end - first : width;
  if (thread == 0) room.count = count, room.next = first + tiles * width, room.end = end;
  if (thread < count) {
    int entry = room.entries[thread] = order ? order[first + thread] : first + thread;
    room.from[thread] = (u32)(entry / each) * pitch;
  }
}

// Every tile of this block to `tile`, from the one on that begins with entry `first`.
template <class Tile>
DEV void each_tile(Room& room, int first, int end, Tile tile) {
#pragma unroll 1
  while (first < end) {
    tile(first, end);
    first = room.next, end = room.end;
  }
}

// Every sum of this thread to its token's row of `out`, of `rows` sums, where `entries` says which; the
// tile's first row is `first`. The four rows' biases are added where there are any.
DEV void store_sums(const float acc[EIGHTS][2][4], const int* entries, int count, int first, int rows,
                    const float* bias, float* out) {
  int thread = fresh(threadIdx.x), lane = thread & 31;
  int row = first + (thread >> 5 & 3) * 32 + (lane >> 2), left = rows - row;
  int token = (thread >> 7) * 8 + (lane & 3) * 2;
  float more[4];
#pragma unroll
  for (int k = 0; k < 4; k++) more[k] = bias && 8 * k < left ? bias[row + 8 * k] : 0.f;
#pragma unroll
  for (int n = 0; n < EIGHTS; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int t = token + n * 8 * SIDES + e;
      if (t >= count) return;
      float* to = out + (size_t)entries[t] * rows + row;
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float v = acc[n][k >> 1][(k & 1) * 2 + e];
        if (8 * k < left) to[8 * k] = bias ? add(v, more[k]) : v;
      }
    }
}

#ifdef KERNEL_matrix_linear
// So many tokens of a tile that all blocks have some, in whole eights of each side.
DEV int width_of(int tokens) {
  int all = gridDim.y * 8 * SIDES, width = (tokens + all - 1) / all * 8 * SIDES;
  return width < TOKENS ? width : TOKENS;
}

ROOMY(THREADS, BESIDE)
matrix_linear(const u8* weight, const u8* x, float* out, const float* bias, i64 stride, int tokens,
              int rows, int columns) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  Source source;
  source.begin(weight, stride, weight, stride, blockIdx.x * ROWS, rows);
  each_tile(room, blockIdx.y * width_of(tokens), tokens, [&](int first, int end) {
    int width = width_of(fresh(tokens)), pitch = (columns + 255) / 256 * PIECES;
    take_entries(room, 0, first, end, width, gridDim.y, 1, pitch);
    float acc[EIGHTS][2][4];
    product<TYPE, TYPE, false>(room, source, x, columns >> 5, acc);
    store_sums(acc, room.entries, room.count, blockIdx.x * ROWS, rows, bias, out);
  });
}
#endif

#ifdef KERNEL_matrix_gate_up
// Two blocks of the inner rows of `count` entries, from `block` on, as the type of `down` wants them:
// as `store_inner`, but eight neighbours have a block, four values each.
DEV void store_made(Room& room, const float* made, u8* inner, int count, int block, int rows,
                    u32* status, int op) {
  int thread = fresh(threadIdx.x), lane = thread & 7;
#pragma unroll 1
  for (int base = thread >> 5 << 2; base < 2 * count; base += THREADS / 8) {
    int k = base + (thread >> 3 & 3);
    k = k < 2 * count ? k : 2 * count - 1;  // the last one again
    int token = k >> 1, b = block + (k & 1), j = b & 7;
    float4 four = *(const float4*)(made + token * PITCH + (k & 1) * 32 + lane * 4);
    u8* to = inner + room.entries[token] * inner_pitch(rows);
#ifdef DOWN_QUANTISED
    float x[4] = {four.x, four.y, four.z, four.w};
    u32 most = 0, high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 size = bits_of(x[i]) & 0x7fffffffu;
      most = size > most ? size : most;
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) {
      u32 other = SWAP(most, o, 32);
      most = other > most ? other : most;
    }
    float amax = float_of(most), d = div_(amax, LARGEST), id = div_(LARGEST, amax);
    bool good = finite(amax), some = good && d != 0.f && finite(id);
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int q = some ? (int)rintf(mul(x[i], id)) : 0;
      high |= (u32)(q >> 7 & 255) << 8 * i, low |= (u32)(q & 127) << 8 * i, sum += q;
    }
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum += SWAP(sum, o, 32);
    if (b * 32 >= rows) continue;
    u8* record = to + (b >> 3) * RECORD_BYTES;
    u32* piece = (u32*)(record + ((lane >> 2) * 8 + j) * 16) + (lane & 3);
    piece[0] = high, piece[2 * 8 * 4] = low;
    if (lane == 0) {
      ((float*)(record + 512))[j] = some ? d : 0.f;
      ((int*)(record + 544))[j] = sum;
      if (!good) latch(status, op);
    }
#else
    if (b * 32 < rows) ((float4*)to)[b * 8 + lane] = four;
#endif
  }
}

// 64 rows of gate and the same of up, by sixteens: a thread then has both of an element. They are two
// blocks of `down`'s activations, which go through shared memory to lie in a warp's lanes.
ROOMY(THREADS, BESIDE)
matrix_gate_up(const Wave* wave, const int* starts, const int* order, const u8* x, u8* inner,
               u32* status, i64 gate_stride, i64 up_stride, int experts, int top_k, int rows,
               int columns, int spread, int op) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  Wave e = wave[blockIdx.y];
  Source source;
  const u8 *gate = counted_from(wave, e.gate), *up = counted_from(wave, e.up);
  source.begin(gate, gate_stride, up, up_stride, blockIdx.x * ROWS / 2, rows);
  int start = starts[e.expert] + blockIdx.z * TOKENS;
  each_tile(room, start, starts[e.expert + 1], [&](int first, int end) {
    take_entries(room, order, first, end, TOKENS, spread, top_k, (columns + 255) / 256 * PIECES);
    float acc[EIGHTS][2][4];
    product<GATE, UP, true>(room, source, x, columns >> 5, acc);
    __syncthreads();  // the activations have been read
    float* made = (float*)room.tokens;
    int thread = fresh(threadIdx.x), lane = thread & 31, count = room.count;
    int token = (thread >> 7) * 8 + (lane & 3) * 2, row = (thread >> 5 & 3) * 16 + (lane >> 2);
    float* to = made + token * PITCH + row;
#pragma unroll
    for (int n = 0; n < EIGHTS; n++) {
      if (8 * SIDES * n >= count) break;
#pragma unroll
      for (int i = 0; i < 4; i++)
        to[(n * 8 * SIDES + (i & 1)) * PITCH + 8 * (i >> 1)] = mul(silu(acc[n][0][i]), acc[n][1][i]);
    }
    __syncthreads();
    store_made(room, made, inner, count, blockIdx.x * 2, rows, status, op);
  });
}
#endif

#ifdef KERNEL_matrix_down
ROOMY(THREADS, BESIDE)
matrix_down(const Wave* wave, const int* starts, const int* order, const u8* inner, float* out,
            i64 stride, int experts, int rows, int columns, int spread) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  Wave e = wave[blockIdx.y];
  const u8* matrix = counted_from(wave, e.down);
  Source source;
  source.begin(matrix, stride, matrix, stride, blockIdx.x * ROWS, rows);
  int start = starts[e.expert] + blockIdx.z * TOKENS;
  each_tile(room, start, starts[e.expert + 1], [&](int first, int end) {
    take_entries(room, order, first, end, TOKENS, spread, 1, (columns + 255) / 256 * 64);
    float acc[EIGHTS][2][4];
    product<TYPE, TYPE, false>(room, source, inner, columns >> 5, acc);
    store_sums(acc, room.entries, room.count, blockIdx.x * ROWS, rows, 0, out);
  });
}
#endif
