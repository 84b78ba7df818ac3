// Which experts, and who computes them: route (section 10), assign, both in one (dispatch), claim.

#define MOST_EXPERTS 1024
#define MOST_ENTRIES 1024
#define PER_TOKEN 128

#if defined(KERNEL_route) || defined(KERNEL_dispatch)
// Logits of up to MOST_TOKENS tokens, PER_TOKEN threads each. An expert's place in the router order is
// the number of those before it, which every thread counts for its own experts.
struct Routing {
  u32* keys;
  float *stripes, *best, *chosen;
};

// Logits as integers of the same order; what is no number comes last, -0 is +0.
DEV u32 key_of(float x) {
  u32 u = bits_of(add(x, 0.f));
  return x == x ? u ^ ((u32)((int)u >> 31) | 0x80000000u) : 0;
}
DEV float value_of(u32 key) { return float_of(key >> 31 ? key ^ 0x80000000u : ~key); }

// Its memory: fused_table.py says how much that is.
DEV Routing routing_in(float* room, int experts, int top_k, int token) {
  float* at = room + token * (experts + 68 + top_k);
  Routing o = {(u32*)at, at + experts, at + experts + 64, at + experts + 68};
  return o;
}

// `tid` counts a token's threads; `in`: whether it is one of the window's. All threads of the block
// come here. `pick` are the token's picks, in shared memory or not.
template <class P>
DEV void route_token(const Routing& o, const float* row, P* pick, float* weights, u32* status,
                     int experts, int top_k, int renormalise, int op, int tid, bool in) {
  int lane = tid & 31, bad = 0;
  float top = -float_of(0x7f800000u);
  if (in)
    for (int i = tid; i < experts; i += PER_TOKEN) {
      float v = row[i];
      o.keys[i] = key_of(v);
      bad |= !finite(v);
      top = largest(top, v);
    }
  if (bad) latch(status, op);
#pragma unroll
  for (int k = 16; k; k >>= 1) top = largest(top, SWAP(top, k, 32));
  if (in && lane == 0) o.best[tid >> 5] = top;
  __syncthreads();
  float m = 0.f;
  if (in) {
    m = o.best[0];
    for (int w = 1; w < PER_TOKEN / 32; w++) m = largest(m, o.best[w]);
    if (tid < 64) {
      float acc = 0.f;
      for (int i = tid; i < experts; i += 64) acc = add(acc, exp_(sub(value_of(o.keys[i]), m)));
      o.stripes[tid] = acc;
    }
    // of equals the lower index comes first
    for (int i = tid; i < experts; i += PER_TOKEN) {
      u32 key = o.keys[i];
      int before = 0;
#pragma unroll 8
      for (int k = 0; k < experts; k++) before += o.keys[k] + (k < i) > key;
      if (before < top_k) pick[before] = (P)i, o.chosen[before] = value_of(key);
    }
  }
  __syncthreads();
  float sum = fold64_of(o.stripes);
  if (in)
    for (int k = tid; k < top_k; k += PER_TOKEN) {
      float total = 0.f, p = div_(exp_(sub(o.chosen[k], m)), sum);
      if (renormalise) {
        for (int i = 0; i < top_k; i++) {
          float each = div_(exp_(sub(o.chosen[i], m)), sum);
          total = i ? add(total, each) : each;
        }
        p = div_(p, total);
      }
      weights[k] = p;
    }
}
#endif

#ifdef KERNEL_route
KERNEL(128)
route(const float* logits, int* picks, float* weights, u32* status, int tokens, int experts,
      int top_k, int renormalise, int op) {
  __shared__ float room[2 * MOST_EXPERTS + 68];
  Routing o = routing_in(room, experts, top_k, 0);
  follow();
  size_t at = (size_t)blockIdx.x * top_k;
  route_token(o, logits + (size_t)blockIdx.x * experts, picks + at, weights + at, status, experts,
              top_k, renormalise, op, threadIdx.x, true);
}
#endif

#if defined(KERNEL_assign) || defined(KERNEL_dispatch)
struct Lanes {
  short pick[MOST_ENTRIES], first[MOST_ENTRIES], lanes[MOST_ENTRIES];
  int served[LANES], missing, linked;
};

// Entries of the picks in `o.pick`, which are there once all threads of the block (1024) have come here.
DEV void fill_entries(Lanes& o, const Cell* cells, const int* share, const float* x, Entry* entries,
                      float* rows, float* host_rows, u64* counts, float* mail_x, int* mail_picks,
                      int* mail_lanes, int* mail_host, i64* mail_word, const i64* round, int tokens,
                      int top_k, int inputs, int outputs) {
  int tid = threadIdx.x, n = tokens * top_k;
  if (tid < LANES) o.served[tid] = 0;
  if (tid == 0) o.missing = 0;
  __syncthreads();
  Cell cell;
  if (tid < n) {
    int i = 0;
    while (o.pick[i] != o.pick[tid]) i++;
    o.first[tid] = (short)i;
    cell = cells[o.pick[tid]];
    // -1: a miss that may go over the link, -2: one that may not
    o.lanes[tid] = (short)(cell.slot[0] ? HIT : cell.helper ? HELPER + cell.helper - 1
               : cell.alias[0] ? -1 : -2);
    if (o.lanes[tid] < 0 && i == tid) atomicAdd(&o.missing, 1);
  }
  __syncthreads();
  if (tid == 0) o.linked = share[o.missing];
  __syncthreads();
  int lane = 0;
  if (tid < n) {
    int home = o.first[tid];
    lane = o.lanes[home];
    if (lane == -1) {
      int before = 0;
      for (int i = 0; i < home; i++) before += o.lanes[i] == -1 && o.first[i] == i;
      lane = before < o.linked ? LINK : HOST;
    } else if (lane == -2) {
      lane = HOST;
    }
    const u64* at = lane == HIT ? cell.slot : cell.alias;
    bool here = lane == HIT || lane == LINK;
    Entry e = {here ? at[0] : 0, here ? at[1] : 0, here ? at[2] : 0,
               (u64)((here ? rows : host_rows) + (size_t)tid * outputs),
               o.pick[tid], lane, home, 0};
    entries[tid] = e;
    atomicAdd(&o.served[lane], 1);
    if (mail_picks) mail_picks[tid] = o.pick[tid];
    if (mail_word) {
      mail_lanes[tid] = lane;
      mail_host[tid] = lane == HOST ? o.pick[tid] : -1;
    }
  }
  if (mail_word) {
    for (int i = tid; i < tokens * inputs; i += 1024) mail_x[i] = x[i];
    fence_system();
  }
  __syncthreads();
  if (tid < LANES) counts[tid] += (u64)o.served[tid];
  if (tid == 0 && mail_word) {
    fence_system();
    *(volatile i64*)mail_word = *round;
  }
}
#endif

#ifdef KERNEL_assign
KERNEL(1024)
assign(const int* picks, const Cell* cells, const int* share, const float* x, Entry* entries,
       float* rows, float* host_rows, u64* counts, float* mail_x, int* mail_picks, int* mail_lanes,
       int* mail_host, i64* mail_word, const i64* round, int tokens, int top_k, int inputs,
       int outputs) {
  __shared__ Lanes o;
  follow();
  if (threadIdx.x < tokens * top_k) o.pick[threadIdx.x] = (short)picks[threadIdx.x];
  fill_entries(o, cells, share, x, entries, rows, host_rows, counts, mail_x, mail_picks, mail_lanes,
               mail_host, mail_word, round, tokens, top_k, inputs, outputs);
}
#endif

#ifdef KERNEL_dispatch
KERNEL(1024)
dispatch(const float* logits, int* picks, float* weights, u32* status, const Cell* cells,
         const int* share, const float* x, Entry* entries, float* rows, float* host_rows, u64* counts,
         float* mail_x, int* mail_picks, int* mail_lanes, int* mail_host, i64* mail_word,
         const i64* round, int tokens, int experts, int top_k, int inputs, int outputs,
         int renormalise, int op) {
  __shared__ Lanes o;
  SHARED_BYTES(bytes);
  int token = threadIdx.x / PER_TOKEN, tid = threadIdx.x % PER_TOKEN, n = tokens * top_k;
  // a table that was not looked at since the last round comes from far
  for (int i = threadIdx.x; i < experts; i += 1024) prefetch(cells + i);
  if (threadIdx.x <= n) prefetch(share + threadIdx.x);
  bool in = token < tokens;
  if (!in) token = 0;
  Routing mine = routing_in((float*)bytes, experts, top_k, token);
  follow();
  route_token(mine, logits + (size_t)token * experts, o.pick + token * top_k, weights + token * top_k,
              status, experts, top_k, renormalise, op, tid, in);
  __syncthreads();
  if (threadIdx.x < n) picks[threadIdx.x] = o.pick[threadIdx.x];
  fill_entries(o, cells, share, x, entries, rows, host_rows, counts, mail_x, mail_picks, mail_lanes,
               mail_host, mail_word, round, tokens, top_k, inputs, outputs);
}
#endif

#ifdef KERNEL_claim
KERNEL(256)
claim(const int* mail_picks, const int* mail_lanes, const Cell* cells, Entry* entries,
      float* host_rows, int count, int lane, int outputs) {
  follow();
  for (int i = threadIdx.x; i < count; i += 256) {
    int pick = ((volatile const int*)mail_picks)[i], whose = ((volatile const int*)mail_lanes)[i];
    int home = 0;
    while (((volatile const int*)mail_picks)[home] != pick) home++;
    Entry e = {0, 0, 0, (u64)(host_rows + (size_t)i * outputs), pick, whose, home, 0};
    if (whose == lane) {
      const Cell& cell = cells[pick];
      e.gate = cell.slot[0], e.up = cell.slot[1], e.down = cell.slot[2];
    }
    entries[i] = e;
  }
}
#endif
