// Which experts, and who computes them: route (section 10), assign, both in one (dispatch), claim.

#define MOST_EXPERTS 1024
#define MOST_ENTRIES 1024

#if defined(KERNEL_route) || defined(KERNEL_dispatch)
// Logits of one token by `per` threads, a power of two, whole groups of 32. An expert's place in the
// router order is the number of those before it, which up to 8 neighbouring threads count together.
struct Routing {
  u32 *keys, *best;
  float *stripes, *chosen;
};

#define FLOATS_BESIDE 96

// Logits as integers of the same order; what is no number comes last, -0 is +0.
DEV u32 key_of(float x) {
  u32 u = bits_of(add(x, 0.f));
  return x == x ? u ^ ((u32)((int)u >> 31) | 0x80000000u) : 0;
}
DEV float value_of(u32 key) { return float_of(key >> 31 ? key ^ 0x80000000u : ~key); }

// Its memory: fused_table.py says how much that is.
DEV Routing routing_in(float* room, int experts, int top_k, int token) {
  float* at = room + token * (experts + FLOATS_BESIDE + top_k);
  Routing o = {(u32*)at, (u32*)at + experts, at + experts + 32, at + experts + FLOATS_BESIDE};
  return o;
}

// `tid` counts a token's threads; `in`: whether it is one of the window's. All threads of the block
// come here. `pick` are the token's picks; they and what they weigh as logits are there for all
// threads when this returns. Returns the largest logit.
template <class P>
DEV float pick_experts(const Routing& o, const float* row, P* pick, u32* status, int experts, int top_k,
                       int op, int per, int tid, bool in) {
  int bad = 0;
  u32 top = 0;
  if (in)
    for (int i = tid; i < experts; i += per) {
      float v = row[i];
      u32 key = o.keys[i] = key_of(v);
      bad |= !finite(v);
      top = key > top ? key : top;
    }
  if (bad) latch(status, op);
  top = most_of(top);
  if (in && (tid & 31) == 0) o.best[tid >> 5] = top;
  __syncthreads();
  if (!in) top = 0;
  else {
    top = o.best[0];
    for (int w = 1; w * 32 < per && w * 32 < experts; w++) top = o.best[w] > top ? o.best[w] : top;
  }
  float m = value_of(top);
  if (in) {
    int parts = 8;
    while (parts > 1 && parts * experts > per) parts >>= 1;
    // of equals the lower index comes first
    for (int base = 0; base < experts; base += per / parts) {
      int i = base + tid / parts, before = 0;
      u32 key = i < experts ? o.keys[i] : 0;
      if (i < experts)
#pragma unroll 4
        for (int k = tid & (parts - 1); k < experts; k += parts) before += o.keys[k] + (k < i) > key;
      for (int k = parts >> 1; k; k >>= 1) before += SWAP(before, k, 32);
      if (i < experts && !(tid & (parts - 1)) && before < top_k)
        pick[before] = (P)i, o.chosen[before] = value_of(key);
    }
    int s = tid - (per - 64);  // the last of a token's threads have the least to count
    if (s >= 0) {
      float acc = 0.f;
      for (int i = s; i < experts; i += 64) acc = add(acc, exp_(sub(value_of(o.keys[i]), m)));
      o.stripes[s] = acc;
    }
  }
  __syncthreads();
  return m;
}

// What the picks weigh, in two steps between which all threads of the block meet.
DEV void weigh_picks(const Routing& o, float m, int top_k, int per, int tid, bool in) {
  float sum = fold64_of(o.stripes);
  if (in)
    for (int k = tid; k < top_k; k += per) o.chosen[k] = div_(exp_(sub(o.chosen[k], m)), sum);
}

DEV void write_weights(const Routing& o, float* weights, int top_k, int renormalise, int per, int tid,
                       bool in) {
  if (in)
    for (int k = tid; k < top_k; k += per) {
      float p = o.chosen[k], total = o.chosen[0];
      if (renormalise) {
#pragma unroll 8
        for (int i = 1; i < top_k; i++) total = add(total, o.chosen[i]);
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
  __shared__ float room[2 * MOST_EXPERTS + FLOATS_BESIDE];
  Routing o = routing_in(room, experts, top_k, 0);
  follow();
  size_t at = (size_t)blockIdx.x * top_k;
  const float* row = logits + (size_t)blockIdx.x * experts;
  float m = pick_experts(o, row, picks + at, status, experts, top_k, op, 128, threadIdx.x, true);
  weigh_picks(o, m, top_k, 128, threadIdx.x, true);
  __syncthreads();
  write_weights(o, weights + at, top_k, renormalise, 128, threadIdx.x, true);
}
#endif

#if defined(KERNEL_assign) || defined(KERNEL_dispatch)
struct Lanes {
  short pick[MOST_ENTRIES], first[MOST_ENTRIES], lanes[MOST_ENTRIES];
  int missing;
};

// Entry i's cell, once the picks are there and `missing` is 0. The first entry with its expert, and
// its lane: -1 for a miss that may go over the link, -2 for one that may not.
DEV Cell look_up(Lanes& o, const Cell* cells, int i, int tokens, int count) {
  int mine = o.pick[i], first = i;
  Cell cell = cells[mine];
  if (tokens > 1)  // a single token picks an expert once
#pragma unroll 8
    for (int k = count - 1; k >= 0; k--) first = o.pick[k] == mine ? k : first;
  o.first[i] = (short)first;
  int lane = cell.slot[0] ? HIT : cell.helper ? HELPER + cell.helper - 1 : cell.alias[0] ? -1 : -2;
  o.lanes[i] = (short)lane;
  if (lane < 0 && first == i) atomicAdd(&o.missing, 1);
  return cell;
}

// Entry i's lane at last, once all have been looked up, and what follows from it.
DEV void fill_entry(const Lanes& o, const Cell& cell, int i, const int* share, Entry* entries,
                    float* rows, float* host_rows, u64* counts, int* mail_picks, int* mail_lanes,
                    int* mail_host, bool mail, int outputs) {
  int home = o.first[i], lane = o.lanes[home];
  if (lane == -1) {
    int before = 0, linked = share[o.missing];
    for (int k = 0; k < home; k++) before += o.lanes[k] == -1 && o.first[k] == k;
    lane = before < linked ? LINK : HOST;
  } else if (lane == -2) {
    lane = HOST;
  }
  bool hit = lane == HIT, here = hit || lane == LINK;
  u64 at[3];
#pragma unroll
  for (int k = 0; k < 3; k++) at[k] = hit ? cell.slot[k] : here ? cell.alias[k] : 0;
  Entry e = {at[0], at[1], at[2], (u64)((here ? rows : host_rows) + (size_t)i * outputs),
             o.pick[i], lane, home, 0};
  entries[i] = e;
  atomicAdd(counts + lane, (u64)1);
  if (mail_picks) mail_picks[i] = o.pick[i];
  if (mail) {
    mail_lanes[i] = lane;
    mail_host[i] = lane == HOST ? o.pick[i] : -1;
  }
}

// The rest of the mail, and the word; all threads of the block (1024) come here.
DEV void send_mail(const float* x, float* mail_x, i64* mail_word, const i64* round, int tokens,
                   int inputs) {
  for (int i = threadIdx.x; i < tokens * inputs; i += 1024) mail_x[i] = x[i];
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
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
  int i = threadIdx.x, n = tokens * top_k;
  Cell cell;
  follow();
  if (i < n) o.pick[i] = (short)picks[i];
  if (i == 0) o.missing = 0;
  __syncthreads();
  if (i < n) cell = look_up(o, cells, i, tokens, n);
  __syncthreads();
  if (i < n)
    fill_entry(o, cell, i, share, entries, rows, host_rows, counts, mail_picks, mail_lanes, mail_host,
               mail_word != 0, outputs);
  if (mail_word) send_mail(x, mail_x, mail_word, round, tokens, inputs);
}
#endif

#ifdef KERNEL_dispatch
// Cells lie in shared memory where they and the logits fit into this.
#define NEAR_BYTES 40960

ROOMY(1024, 1)
dispatch(const float* logits, int* picks, float* weights, u32* status, const Cell* cells,
         const int* share, const float* x, Entry* entries, float* rows, float* host_rows, u64* counts,
         float* mail_x, int* mail_picks, int* mail_lanes, int* mail_host, i64* mail_word,
         const i64* round, int tokens, int experts, int top_k, int inputs, int outputs,
         int renormalise, int op) {
  __shared__ Lanes o;
  SHARED_BYTES(bytes);
  int n = tokens * top_k, per = 1024;
  while (per * tokens > 1024) per >>= 1;
  int token = threadIdx.x / per, tid = threadIdx.x % per;
  // a table that was not looked at since the last round comes from far
  int far = experts * (int)sizeof(Cell);
  bool near = far + 4 * tokens * (experts + FLOATS_BESIDE + top_k) <= NEAR_BYTES;
  if (near)
    for (int i = threadIdx.x * 16; i < far; i += 1024 * 16) copy16(bytes + i, (const u8*)cells + i);
  else
    for (int i = threadIdx.x; i < experts; i += 1024) prefetch(cells + i);
  copies_sent();
  if (threadIdx.x <= n) prefetch(share + threadIdx.x);
  if (threadIdx.x == 0) o.missing = 0;
  bool in = token < tokens;
  if (!in) token = 0;
  Routing mine = routing_in((float*)(bytes + (near ? far : 0)), experts, top_k, token);
  copies_done<0>();
  follow();
  float m = pick_experts(mine, logits + (size_t)token * experts, o.pick + token * top_k, status, experts,
                         top_k, op, per, tid, in);
  // the first threads of a token weigh its picks while the block's last ones look them up
  int i = n <= 512 ? (int)threadIdx.x - 512 : (int)threadIdx.x;
  bool entry = i >= 0 && i < n;
  Cell cell;
  if (entry) cell = look_up(o, near ? (const Cell*)bytes : cells, i, tokens, n);
  weigh_picks(mine, m, top_k, per, tid, in);
  __syncthreads();
  if (entry) {
    picks[i] = o.pick[i];
    fill_entry(o, cell, i, share, entries, rows, host_rows, counts, mail_picks, mail_lanes, mail_host,
               mail_word != 0, outputs);
  }
  write_weights(mine, weights + token * top_k, top_k, renormalise, per, tid, in);
  if (mail_word) send_mail(x, mail_x, mail_word, round, tokens, inputs);
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
    while (home < i && ((volatile const int*)mail_picks)[home] != pick) home++;
    Entry e = {0, 0, 0, (u64)(host_rows + (size_t)i * outputs), pick, whose, home, 0};
    if (whose == lane) {
      const Cell& cell = cells[pick];
      e.gate = cell.slot[0], e.up = cell.slot[1], e.down = cell.slot[2];
    }
    entries[i] = e;
  }
}
#endif
