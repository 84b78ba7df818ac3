// Attention of a chunk of one sequence on matrix units, in the order of docs/arithmetic.md, section 11:
// tiles of 64 absolute positions, a running maximum and sum for each row. A row is a (token, head); a
// block has 64 of one KV head, a warp 16, so that keys and values are read once for all of them.
// A row's numbers come from its own tiles alone: what other rows make of a tile never meets them, and
// a position that a row does not see has weight 0, whatever lies there.

#define QUERIES 64               // (token, head) pairs of a block; they share the KV head
#define TILE 64                  // positions, counted from position 0
#define STEPS (HEAD_DIM / 16)    // of one product: 16 elements of queries and keys
#define PAIRS (HEAD_DIM / 16)    // of the sum: two columns of eight elements
#define PITCH (HEAD_DIM * 2 + 16)  // bytes; an odd number of pieces, so that eight rows meet no bank twice
#define UP 15                    // weights are kept times 2^15: halves of 11 bits down to 2^-29
#define LOG2_SCALE (SCALE * 0x1.715476p+0f)  // scores become powers of 2
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; i++)

#ifdef KV_int8
#define PIECES (HEAD_DIM / 16)   // of 16 bytes, of one position
static_assert(HEAD_DIM % 32 == 0, "a head has scales of its own");
#else
#define PIECES (HEAD_DIM / 8)
#endif
static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 128, "the sizes that matrix units are used for");
#define COPIES (TILE * PIECES / 128)  // pieces that a thread brings of a tile
#define BUFFERS (TILE * PITCH / 16)

// Halves: keys and values take turns, one is computed with while the other comes. Bytes come as they
// are and become halves once all are done with the tile before.
struct Room {
#ifdef KV_int8
  int4 tiles[1][BUFFERS], raw[TILE * PIECES];
#else
  int4 tiles[2][BUFFERS];
#endif
};

// One KV head of the cache: elements of position 0. The block's queries see low..high - 1.
struct Seen {
  const Stored *k, *v;
  const u16 *k_scales, *v_scales;
  int low, high;
};

// A position past the ends is the last one again: its weight is 0, but it has to be a number.
DEV int within(const Seen& seen, int p) {
  p = p < seen.high ? p : seen.high - 1;
  return p > seen.low ? p : seen.low;
}

// What a thread brings of tiles: piece n % PIECES of position n / PIECES, for n = its number + 128 i.
struct Bringing {
#ifdef KV_int8
  u16 scales[COPIES];
#endif
  // Sends a tile on its way: of keys (which = 0) or of values.
  DEV void send(Room& room, const Seen& seen, int width, int span, int which) {
    const Stored* from = which ? seen.v : seen.k;
    int me = thread_now();
    EACH(i, COPIES) {
      int n = me + 128 * i, p = n / PIECES, piece = n % PIECES;
      size_t at = (size_t)within(seen, span + p) * width + piece * (16 / sizeof(Stored));
#ifdef KV_int8
      scales[i] = (which ? seen.v_scales : seen.k_scales)[at >> 5];
      copy16((u8*)&room.raw[n], (const u8*)(from + at));
#else
      copy16((u8*)room.tiles[which] + p * PITCH + piece * 16, (const u8*)(from + at));
#endif
    }
    copies_sent();
  }
  // What was sent is there for all threads, and all are done with what was there before.
  DEV const u8* take(Room& room, int which) {
    copies_done<0>();
    __syncthreads();
#ifdef KV_int8
    int me = thread_now();
    EACH(i, COPIES) {
      int n = me + 128 * i, p = n / PIECES, piece = n % PIECES;
      int4 bytes = room.raw[n], first, second;
      u32 d = scales[i] * 0x10001u;
      halves_of(bytes.x, d, &first.x, &first.y), halves_of(bytes.y, d, &first.z, &first.w);
      halves_of(bytes.z, d, &second.x, &second.y), halves_of(bytes.w, d, &second.z, &second.w);
      int4* to = (int4*)((u8*)room.tiles[0] + p * PITCH + piece * 32);
      to[0] = first, to[1] = second;
    }
    __syncthreads();
    return (const u8*)room.tiles[0];
#else
    return (const u8*)room.tiles[which];
#endif
  }
  // Four signed bytes as halves times their scale, each rounded once.
  DEV static void halves_of(int bytes, u32 d, int* first, int* second) {
    u32 up = (u32)bytes ^ 0x80808080u;  // b + 128; behind 0x64 that is the half 1024 + b + 128
    *first = (int)mul_halves(sub_halves(choose(up, 0x64646464u, 0x4140), 0x64806480u), d);
    *second = (int)mul_halves(sub_halves(choose(up, 0x64646464u, 0x4342), 0x64806480u), d);
  }
};

// 2^x times 2^UPWARDS, for x that is 0 or less but for rounding: within 2^-22, and 1 for 0. What is no
// number becomes none, or more than a half can hold.
template <int UPWARDS>
DEV float power(float x) {
  // as in exp_: the sum's low bits are the integer that is next to x, and UPWARDS
  const float big = 0x1.8p+23f + UPWARDS;
  float sum = add(x, big), f = sub(x, sub(sum, big)), p = 0x1.5bba0cp-10f;
  p = fma_(p, f, 0x1.3cea88p-7f);
  p = fma_(p, f, 0x1.c6b752p-5f);
  p = fma_(p, f, 0x1.ebf9bcp-3f);
  p = fma_(p, f, 0x1.62e42ap-1f);
  p = fma_(p, f, 1.f);
  p = float_of(bits_of(p) + (bits_of(sum) << 23));
  return x < -125.f ? 0.f : p;
}

// A lane's rows g and g + 8 of its warp's 16, with g = lane / 4: positions first..last are seen.
struct Rows {
  int first[2], last[2];
  float m[2], l[2];
};

// Scores of the tile, before their scale: columns 8j + 2t and 8j + 2t + 1 of rows g and g + 8.
DEV void make_scores(const u8* keys, const u32 (*q)[4], float (*s)[4]) {
  int lane = thread_now() & 31;
  u32 at = ((lane >> 4) * 8 + (lane & 7)) * PITCH + (lane >> 3 & 1) * 16;
  EACH(j, TILE / 8)
    EACH(x, 4) s[j][x] = 0.f;
  EACH(k, STEPS)
    EACH(j, TILE / 16) {
      u32 b[4];
      matrices(keys, at + j * 16 * PITCH + k * 32, b);
      multiply_halves(s[2 * j], q[k], b), multiply_halves(s[2 * j + 1], q[k], b + 2);
    }
}

// Weights in the scores' place; by how much what came before shrinks. EDGE: some row of the warp does
// not see the whole tile. A row that sees nothing of it stays as it is.
template <bool EDGE>
DEV void make_weights(Rows& rows, int span, float (*s)[4], float* shrink) {
  int from = span + (thread_now() & 3) * 2;
  EACH(i, 2) {
    int a = rows.first[i] - from, b = rows.last[i] - from;
    float top = -float_of(0x7f800000u), sum = 0.f;
    EACH(j, TILE / 8)
      EACH(x, 2) {
        bool in = !EDGE || (8 * j + x >= a && 8 * j + x <= b);
        top = fmaxf(top, in ? s[j][2 * i + x] : -float_of(0x7f800000u));
      }
    top = fmaxf(top, SWAP(top, 1, 32));
    top = fmaxf(top, SWAP(top, 2, 32));
    float before = rows.m[i], next = fmaxf(before, mul(top, LOG2_SCALE));
    shrink[i] = EDGE && before == next ? 1.f : power<0>(sub(before, next));
    EACH(j, TILE / 8)
      EACH(x, 2) {
        bool in = !EDGE || (8 * j + x >= a && 8 * j + x <= b);
        float weight = power<UP>(fma_(s[j][2 * i + x], LOG2_SCALE, -next));
        s[j][2 * i + x] = weight = in ? weight : 0.f;
        sum = add(sum, weight);
      }
    rows.l[i] = fma_(rows.l[i], shrink[i], sum), rows.m[i] = next;
  }
}

// Weighted values: elements 8n + 2t and 8n + 2t + 1 of rows g and g + 8. A weight is rounded to a half;
// a second one for the rest of it gave no nearer logits (docs/experiments.md, section 11).
DEV void add_values(const u8* values, const float (*p)[4], const float* shrink, float (*o)[4]) {
  int lane = thread_now() & 31;
  u32 at = (lane & 15) * PITCH + (lane >> 4) * 16;
  EACH(n, 2 * PAIRS)
    EACH(x, 4) o[n][x] = mul(o[n][x], shrink[x >> 1]);
  EACH(k, TILE / 16) {
    u32 a[4];
    EACH(i, 4) {
      const float* two = p[2 * k + (i >> 1)] + 2 * (i & 1);
      a[i] = to_halves(two[0], two[1]);
    }
    EACH(n, PAIRS) {
      u32 b[4];
      matrices_turned(values, at + k * 16 * PITCH + n * 32, b);
      multiply_halves(o[2 * n], a, b), multiply_halves(o[2 * n + 1], a, b + 2);
    }
  }
}

ROOMY(128, 2)
matrix_attention(const float* q, float* out, const int* positions, const Place* places,
                 i64 layer_offset, int tokens, int width, int kv_heads, int group, int window) {
  follow();
  __shared__ Room room;
  // the last tokens see most: they come first, so that the short ones fill what is left at the end
  int begin = (gridDim.y - 1 - blockIdx.y) * QUERIES, end = begin + QUERIES;
  if (end > tokens * group) end = tokens * group;
  auto last_of = [&](int pair) { return positions[(pair < end ? pair : end - 1) / group]; };
  auto first_of = [&](int p) { return window && p - window + 1 > 0 ? p - window + 1 : 0; };
  auto row_of = [&](int pair) {
    return (size_t)(pair / group * kv_heads + blockIdx.x) * group + pair % group;
  };
  const Place& place = places[begin / group];
  size_t base = (size_t)layer_offset * width + (size_t)blockIdx.x * HEAD_DIM;
  Seen seen = {(const Stored*)place.k + base, (const Stored*)place.v + base,
               (const u16*)place.k_scales + (base >> 5), (const u16*)place.v_scales + (base >> 5),
               first_of(last_of(begin)), last_of(end - 1) + 1};  // positions ascend with the tokens
  Bringing bringing;
  int span = seen.low / TILE * TILE;
  bringing.send(room, seen, width, span, 0);

  int lane = thread_now() & 31, mine = begin + (thread_now() >> 5) * 16, pair = mine + (lane >> 2);
  // what the warp's rows see: something of low..high - 1, each of them all of full..until - 1
  int until = last_of(mine) + 1, high = mine < end ? last_of(mine + 15) + 1 : 0;
  int low = first_of(until - 1), full = first_of(last_of(mine + 15));
  Rows rows;
  u32 queries[STEPS][4];
  EACH(i, 2) {
    int here = pair + 8 * i < end ? pair + 8 * i : end - 1;
    rows.last[i] = last_of(here), rows.first[i] = first_of(rows.last[i]);
    rows.m[i] = -float_of(0x7f800000u), rows.l[i] = 0.f;
    const float* row = q + row_of(here) * HEAD_DIM + (lane & 3) * 2;
    EACH(k, STEPS)
      EACH(x, 2) {
        float2 f = *(const float2*)(row + k * 16 + x * 8);
        queries[k][2 * x + i] = to_halves(f.x, f.y);
      }
  }
  float o[2 * PAIRS][4], s[TILE / 8][4], shrink[2];
  EACH(n, 2 * PAIRS)
    EACH(x, 4) o[n][x] = 0.f;
#pragma unroll 1
  for (; span < seen.high; span += TILE) {
    bool some = span < high && span + TILE > low;
    const u8* keys = bringing.take(room, 0);
    bringing.send(room, seen, width, span, 1);
    if (some) {
      make_scores(keys, queries, s);
      if (span < full || span + TILE > until) make_weights<true>(rows, span, s, shrink);
      else make_weights<false>(rows, span, s, shrink);
    }
    const u8* values = bringing.take(room, 1);
    if (span + TILE < seen.high) bringing.send(room, seen, width, span + TILE, 0);
    if (some) add_values(values, s, shrink, o);
  }
  EACH(i, 2) {
    float sum = add(rows.l[i], SWAP(rows.l[i], 1, 32));
    float share = div_(1.f, add(sum, SWAP(sum, 2, 32)));
    if (pair + 8 * i >= end) continue;
    float* row = out + row_of(pair + 8 * i) * HEAD_DIM + (lane & 3) * 2;
    EACH(n, 2 * PAIRS) {
      // a sum that is zero has no sign: it would depend on what is not seen
      float2 f = {add(mul(o[n][2 * i], share), 0.f), add(mul(o[n][2 * i + 1], share), 0.f)};
      *(float2*)(row + n * 8) = f;
    }
  }
}
