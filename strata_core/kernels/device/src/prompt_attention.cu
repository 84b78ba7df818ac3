// Attention of a chunk of one sequence: section 9, tile by tile and split by split, each split folded
// into the sum as soon as it ends. All of it is multiply-adds of floats in a given order, so no matrix
// units: a thread has 8 queries by 4 positions of the scores, one stripe after the other, and 8 queries
// by its elements of the weighted sum, each of them one chain.

#define SPLIT 256
#define TILE 32

#define QUERIES 64                     // (token, head) pairs of a block; they share the KV head
#define SPAN 64                        // positions whose scores are made at once: two tiles
#define TILES (SPAN / TILE)
#define STRIPES 4                      // stripes of queries and keys in shared memory at a time
#define CHUNK 16                       // positions of values in shared memory at a time
#define EIGHTHS (HEAD_DIM / 8)
#define VEC (HEAD_DIM % 64 == 0 ? 4 : 2)
#define GROUPS ((HEAD_DIM + 16 * VEC - 1) / (16 * VEC))
#define KEYS ((EIGHTHS + 7) / 8 * 4)   // pieces of four that a thread brings of queries and of keys
#define VALUES (CHUNK / 4)
#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < count; i++)

// What a block's queries see of the cache: positions low..high - 1 of one KV head. `k` and `v` are the
// head's elements of position 0; all of the queries see full..until - 1.
struct Seen {
  const Stored *k, *v;
  const u16 *k_scales, *v_scales;
  int low, high, full, until;
};

// Rows are padded so that neither their writers nor their readers meet in one bank.
struct Room {
  float q[STRIPES * EIGHTHS][QUERIES + 4];  // row: stripe and eighth
  union {
    float k[STRIPES * EIGHTHS][SPAN + 4];
    struct {
      float p[SPAN][QUERIES + 8];  // weights; -1 where a query does not see the position
      float v[CHUNK][GROUPS * 16 * VEC];
    };
  };
  float tops[TILES][QUERIES], shrinks[TILES][QUERIES], sums[TILES][QUERIES];
  float m[QUERIES], l[QUERIES], all_m[QUERIES], all_l[QUERIES], a[QUERIES], b[QUERIES];
  int first[QUERIES], last[QUERIES], row[QUERIES];  // a row of no query of its own: ~row
  Seen seen;
};
static_assert(sizeof(Room) <= ROOM_BYTES, "the grid rule gives too little shared memory");

// A position past the ends is the last one again: whatever stands there is not taken.
DEV int within(const Seen& seen, int p) {
  int last = seen.high - 1, first = seen.low;
  p = p > last ? last : p;
  return p < first ? first : p;
}

// --- keys: a warp takes 8 neighbouring eighths of positions c, c + 8, c + 16, c + 24 of a tile, which
// lie side by side in shared memory as they do in the thread that makes their scores. A thread's pieces
// are 4 positions by (EIGHTHS + 7) / 8 eighths.
DEV int key_place(int i) { return i % 2 * 4 + i / 2 % 2 * TILE; }
DEV int key_eighth(int n) { return n < EIGHTHS ? n : EIGHTHS - 1; }

// Likewise 8 eighths of 4 neighbouring queries; four pieces at a time, which is what registers hold.
DEV void take_queries(Room& room, const float* q, int stripe) {
  int me = thread_now(), n = me & 7, first = 4 * (me >> 5) + (me >> 3 & 3);
#pragma unroll 1
  for (int k = 0; k < KEYS; k += 4, n += 8) {
    float4 f[4];
    EACH(i, 4) {
      int row = room.row[first + 16 * i], e = 8 * key_eighth(n) + stripe;
      f[i] = *(const float4*)(q + (size_t)(row < 0 ? ~row : row) * HEAD_DIM + e);
    }
    float* to = &room.q[n][first];
    if (n < EIGHTHS)
      EACH(i, 4) {
        to[16 * i] = mul(f[i].x, SCALE), to[16 * i + EIGHTHS * (QUERIES + 4)] = mul(f[i].y, SCALE);
        to[16 * i + 2 * EIGHTHS * (QUERIES + 4)] = mul(f[i].z, SCALE);
        to[16 * i + 3 * EIGHTHS * (QUERIES + 4)] = mul(f[i].w, SCALE);
      }
  }
}

DEV void bring_keys(Four* keys, const Seen& seen, int width, int span, int stripe) {
  int me = thread_now(), p = span + (me >> 5) + (me & 24), n = me & 7;
  EACH(i, 4) {
    size_t row = (size_t)within(seen, p + key_place(i)) * width + stripe;
#pragma unroll
    for (int k = i; k < KEYS; k += 4)
      keys[k] = four_of(seen.k, seen.k_scales, row + 8 * key_eighth(n + k / 4 * 8));
  }
}

DEV void put_keys(Room& room, const Four* keys) {
  int i = thread_now(), n = i & 7;
  float* to = &room.k[n][4 * (i >> 5) + (i >> 3 & 3)];
  EACH(k, KEYS) {
    float4 f = floats_of(keys[k]);
    float* at = to + k / 4 * 8 * (SPAN + 4) + k % 2 * 16 + k / 2 % 2 * TILE;
    if (n + k / 4 * 8 < EIGHTHS) {
      at[0] = f.x, at[EIGHTHS * (SPAN + 4)] = f.y;
      at[2 * EIGHTHS * (SPAN + 4)] = f.z, at[3 * EIGHTHS * (SPAN + 4)] = f.w;
    }
  }
}

DEV void bring_values(Four* values, const Seen& seen, int width, int from) {
  int me = thread_now(), lane = me & 31, p = from + (me >> 5);
  int e = 4 * lane < HEAD_DIM ? 4 * lane : 0;
  EACH(i, VALUES)
    values[i] = four_of(seen.v, seen.v_scales, (size_t)within(seen, p + 4 * i) * width + e);
}

DEV void put_values(Room& room, const Four* values) {
  int me = thread_now(), lane = me & 31;
  EACH(i, VALUES)
    if (4 * lane < HEAD_DIM)
      *(float4*)&room.v[(me >> 5) + 4 * i][4 * lane] = floats_of(values[i]);
}

// --- a thread's place: warps are two by two (queries; tiles, or halves of the elements), lanes 4 by 8.
// Neighbours in bit 0 share queries and in bit 1 columns: so two quarters of a warp read at once.
struct Mine {
  int q, side, c;
};

DEV Mine mine() {
  int i = thread_now(), lane = i & 31, warp = i >> 5;
  Mine o;
  o.q = (warp & 1) * 32 + 4 * ((lane >> 1 & 1) | (lane >> 3 & 2));
  o.side = warp >> 1, o.c = (lane & 1) | (lane >> 1 & 6);
  return o;
}

// Eight values, of the thread's queries, of a row of them.
DEV void eight(const float* row, int q, float* to) {
  float4 a = *(const float4*)(row + q), b = *(const float4*)(row + q + 16);
  to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
  to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

DEV int query(const Mine& me, int u) { return me.q + (u & 3) + 16 * (u >> 2); }

// The scores of the STRIPES stripes that are there.
DEV void add_stripes(const Room& room, float (*score)[4]) {
  Mine me = mine();
#pragma unroll 1
  for (int k = 0; k < STRIPES; k++) {
    const float *queries = room.q[k * EIGHTHS], *row = room.k[k * EIGHTHS] + me.side * TILE + 4 * me.c;
    float acc[8][4], q[8];
    EACH(u, 8)
      EACH(x, 4) acc[u][x] = 0.f;
#pragma unroll 8
    for (int n = 0; n < EIGHTHS; n++) {
      eight(queries + n * (QUERIES + 4), me.q, q);
      float4 f = *(const float4*)(row + n * (SPAN + 4));
      EACH(u, 8) {
        acc[u][0] = fma_(q[u], f.x, acc[u][0]), acc[u][1] = fma_(q[u], f.y, acc[u][1]);
        acc[u][2] = fma_(q[u], f.z, acc[u][2]), acc[u][3] = fma_(q[u], f.w, acc[u][3]);
      }
    }
    EACH(u, 8)
      EACH(x, 4) score[u][x] = add(score[u][x], acc[u][x]);
  }
}

// Scores go where the weights will be.
DEV void keep_scores(Room& room, float (*score)[4]) {
  Mine me = mine();
  EACH(x, 4) {
    float* to = room.p[me.side * TILE + me.c + 8 * x] + me.q;
#pragma unroll
    for (int u = 0; u < 8; u += 4) {
      float4 f;
      f.x = score[u][x], f.y = score[u + 1][x], f.z = score[u + 2][x], f.w = score[u + 3][x];
      *(float4*)(to + 4 * u) = f;
    }
  }
}

// From here to the weights a thread has one query and one tile, of which the query sees a..b - 1. EDGE,
// here and below: some query of the block does not see the whole span.
struct Share {
  int q, t, a, b;
};

DEV Share share(const Room& room, int span) {
  Share o;
  int i = thread_now();
  o.q = i % QUERIES, o.t = i / QUERIES;
  o.a = room.first[o.q] - span - o.t * TILE, o.b = room.last[o.q] + 1 - span - o.t * TILE;
  return o;
}

template <bool EDGE>
DEV void make_top(Room& room, int span) {
  Share me = share(room, span);
  float top = -float_of(0x7f800000u);
#pragma unroll 8
  for (int j = 0; j < TILE; j++) {
    float score = room.p[me.t * TILE + j][me.q];
    if (!EDGE || (j >= me.a && j < me.b)) top = largest(top, score);
  }
  room.tops[me.t][me.q] = top;
}

// Weights from scores, their sum (stripes j mod 8, ascending, folded) and by how much what came before
// shrinks. A tile of which the query sees nothing changes nothing.
template <bool EDGE>
DEV void make_weights(Room& room, int span) {
  Share me = share(room, span);
  float before = room.m[me.q], s[8];
  for (int t = 0; t < me.t; t++) before = largest(before, room.tops[t][me.q]);
  float top = largest(before, room.tops[me.t][me.q]);
  bool some = !EDGE || (me.a < TILE && me.b > 0);
  room.shrinks[me.t][me.q] = some ? exp_(sub(before, top)) : 1.f;
  EACH(k, 8) s[k] = 0.f;
#pragma unroll 1
  for (int i = 0; i < TILE; i += 8)
    EACH(k, 8) {
      float* at = &room.p[me.t * TILE + i + k][me.q];
      float weight = exp_(sub(*at, top));
      bool in = !EDGE || (i + k >= me.a && i + k < me.b);
      *at = in ? weight : -1.f;
      s[k] = add(s[k], in ? weight : 0.f);
    }
  float sum = s[0];
#pragma unroll
  for (int k = 1; k < 8; k++) sum = add(sum, s[k]);
  room.sums[me.t][me.q] = sum;
}

// The largest score so far and the sum of weights, once nobody reads what they were.
DEV void move_on(Room& room) {
  if (threadIdx.x >= QUERIES) return;
  float m = room.m[threadIdx.x], l = room.l[threadIdx.x];
  EACH(t, TILES) {
    m = largest(m, room.tops[t][threadIdx.x]);
    l = fma_(l, room.shrinks[t][threadIdx.x], room.sums[t][threadIdx.x]);
  }
  room.m[threadIdx.x] = m, room.l[threadIdx.x] = l;
}

// VEC neighbouring elements in one piece.
struct alignas(4 * VEC) Few {
  float v[VEC];
};

// CHUNK positions of the weighted sum, the first of them number `from` of the span.
template <bool EDGE>
DEV void add_values(const Room& room, int from, float (*o)[GROUPS * VEC]) {
  Mine me = mine();
  if (from % TILE == 0) {
    float shrink[8];
    eight(room.shrinks[from / TILE], me.q, shrink);
    EACH(u, 8)
      EACH(e, GROUPS * VEC) o[u][e] = mul(o[u][e], shrink[u]);
  }
#pragma unroll 4
  for (int j = 0; j < CHUNK; j++) {
    float p[8], v[GROUPS * VEC];
    eight(room.p[from + j], me.q, p);
    const float* row = room.v[j] + (me.side * 8 + me.c) * VEC;
    EACH(g, GROUPS) {
      Few f = *(const Few*)(row + g * 16 * VEC);
      EACH(k, VEC) v[g * VEC + k] = f.v[k];
    }
    EACH(u, 8) {
      if (EDGE && p[u] < 0.f) continue;  // not even +0 times something: that may change a -0
      EACH(e, GROUPS * VEC) o[u][e] = fma_(p[u], v[e], o[u][e]);
    }
  }
}

// The split that ends before `span` goes into the sum over splits, whose vector lies in `out`; a thread
// writes there what it alone reads. A negative `a`: the query has no position in this split; a negative
// `b`: it has none in those before.
DEV void fold_split(Room& room, int span, float* out, float (*o)[GROUPS * VEC]) {
  Mine me = mine();
  int split = (span - 1) / SPLIT * SPLIT, i = threadIdx.x;
  if (i < QUERIES) {
    float m = room.m[i], l = room.l[i], a = -1.f, b = -1.f;
    if (room.first[i] >= split && room.first[i] < split + SPLIT) {
      room.all_m[i] = m, room.all_l[i] = l, a = 1.f;
    } else if (room.first[i] < split && room.last[i] >= split) {
      float top = largest(room.all_m[i], m);
      a = exp_(sub(room.all_m[i], top)), b = exp_(sub(m, top));
      room.all_l[i] = fma_(l, b, mul(room.all_l[i], a)), room.all_m[i] = top;
    }
    room.a[i] = a, room.b[i] = b, room.m[i] = -float_of(0x7f800000u), room.l[i] = 0.f;
  }
  __syncthreads();
  EACH(u, 8) {
    int q = query(me, u), row = room.row[q];
    float a = room.a[q], b = room.b[q];
    int e = (me.side * 8 + me.c) * VEC;
    float* to = out + (size_t)row * HEAD_DIM + e;
#pragma unroll
    for (int g = 0; g < GROUPS; g++, e += 16 * VEC, to += 16 * VEC) {
      float* mine = o[u] + g * VEC;
      if (row >= 0 && !(a < 0.f) && e < HEAD_DIM) {
        Few all = *(Few*)to;
        EACH(k, VEC)
          all.v[k] = b < 0.f ? mine[k] : fma_(mine[k], b, mul(all.v[k], a));
        *(Few*)to = all;
      }
      EACH(k, VEC) mine[k] = 0.f;
    }
  }
}

// Scores, weights and weighted values of one span. Values are asked for ahead; keys are not (that many
// registers there are not), but the other blocks of the processor compute meanwhile.
DEV void take_span(Room& room, const float* q, int width, int span, float (*o)[GROUPS * VEC]) {
  const Seen& seen = room.seen;
  float score[8][4];
  EACH(u, 8)
    EACH(x, 4) score[u][x] = -0.f;  // -0 + x is x, whatever x is
#pragma unroll 1
  for (int stripe = 0; stripe < 8; stripe += STRIPES) {
    if (stripe) __syncthreads();
    take_queries(room, q, stripe);
    Four keys[KEYS];
    bring_keys(keys, seen, width, span, stripe);
    put_keys(room, keys);
    __syncthreads();
    add_stripes(room, score);
  }
  __syncthreads();
  keep_scores(room, score);
  bool edge = span < seen.full || span + SPAN > seen.until;
  Four values[VALUES];
  bring_values(values, seen, width, span);
  __syncthreads();
  if (edge) make_top<true>(room, span);
  else make_top<false>(room, span);
  __syncthreads();
  if (edge) make_weights<true>(room, span);
  else make_weights<false>(room, span);
  put_values(room, values);
  __syncthreads();
  move_on(room);
  int end = seen.high - span < SPAN ? seen.high - span : SPAN;
#pragma unroll 1
  for (int from = 0; from < end; from += CHUNK) {
    if (from) {
      put_values(room, values);
      __syncthreads();
    }
    if (from + CHUNK < end) bring_values(values, seen, width, span + from + CHUNK);
    if (edge) add_values<true>(room, from, o);
    else add_values<false>(room, from, o);
    __syncthreads();
  }
}

ROOMY(128, 3)
prompt_attention(const float* q, float* out, const int* positions, const Place* places,
                 i64 layer_offset, int tokens, int width, int kv_heads, int group, int window) {
  follow();
  SHARED_BYTES(bytes);
  Room& room = *(Room*)bytes;
  // the last tokens see most: they come first, so that the short ones fill what is left at the end
  int begin = (gridDim.y - 1 - blockIdx.y) * QUERIES, last = begin + QUERIES - 1;
  if (last >= tokens * group) last = tokens * group - 1;
  if (threadIdx.x < QUERIES) {
    int n = threadIdx.x, pair = begin + n < last ? begin + n : last, token = pair / group;
    int row = token * kv_heads * group + blockIdx.x * group + pair % group, p = positions[token];
    room.last[n] = p, room.first[n] = first_seen(p, window);
    room.row[n] = begin + n <= last ? row : ~row;
    room.m[n] = -float_of(0x7f800000u), room.l[n] = 0.f;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const Place& place = places[begin / group];
    size_t base = (size_t)layer_offset * width + (size_t)blockIdx.x * HEAD_DIM;
    room.seen.k = (const Stored*)place.k + base, room.seen.v = (const Stored*)place.v + base;
    room.seen.k_scales = (const u16*)place.k_scales + (base >> 5);
    room.seen.v_scales = (const u16*)place.v_scales + (base >> 5);
    // positions ascend with the tokens
    room.seen.low = room.first[0], room.seen.full = room.first[QUERIES - 1];
    room.seen.until = room.last[0] + 1, room.seen.high = room.last[QUERIES - 1] + 1;
  }
  __syncthreads();
  float o[8][GROUPS * VEC];
  EACH(u, 8)
    EACH(e, GROUPS * VEC) o[u][e] = 0.f;
  int span = room.seen.low / SPAN * SPAN;
  for (; span < room.seen.high; span += SPAN) {
    if (span % SPLIT == 0 && span > room.seen.low) fold_split(room, span, out, o);
    take_span(room, q, width, span, o);
  }
  fold_split(room, span, out, o);
  Mine me = mine();
#pragma unroll 1
  for (int u = 0; u < 8; u++) {
    int n = query(me, u), row = room.row[n];
    for (int e = 0; row >= 0 && e < GROUPS * VEC; e++) {
      int x = e / VEC * 16 * VEC + (me.side * 8 + me.c) * VEC + e % VEC;
      float* at = out + (size_t)row * HEAD_DIM + x;
      if (x < HEAD_DIM) *at = div_(*at, room.all_l[n]);
    }
  }
}
