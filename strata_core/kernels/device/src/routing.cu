// Which experts, and who computes them: route (section 10), assign, claim.

#define MOST_EXPERTS 1024
#define MOST_ENTRIES 1024

#ifdef KERNEL_route
KERNEL(256)
route(const float* logits, int* picks, float* weights, u32* status, int tokens, int experts,
      int top_k, int renormalise, int op) {
  __shared__ float x[MOST_EXPERTS], stripes[64], best[8], sum;
  __shared__ int where[8], chosen;
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, bad = 0;
  const float* row = logits + (size_t)blockIdx.x * experts;
  float top = -float_of(0x7f800000u);
  for (int i = tid; i < experts; i += 256) {
    x[i] = row[i];
    bad |= !finite(x[i]);
    top = largest(top, x[i]);
  }
  if (bad) latch(status, op);
#pragma unroll
  for (int o = 16; o; o >>= 1) top = largest(top, SWAP(top, o, 32));
  if (lane == 0) best[warp] = top;
  __syncthreads();
  float m = best[0];
  for (int w = 1; w < 8; w++) m = largest(m, best[w]);
  if (tid < 64) {
    float acc = 0.f;
    for (int i = tid; i < experts; i += 64) acc = add(acc, exp_(sub(x[i], m)));
    stripes[tid] = acc;
  }
  __syncthreads();
  if (tid == 0) sum = fold64_of(stripes);
  __syncthreads();
  float total = 0.f;
  for (int k = 0; k < top_k; k++) {
    // the largest that is left, ties to the lowest index; what was taken is a NaN from then on
    float v = 0.f;
    int at = -1;
    for (int i = tid; i < experts; i += 256)
      if (x[i] == x[i] && (at < 0 || x[i] > v)) v = x[i], at = i;
#pragma unroll
    for (int o = 16; o; o >>= 1) {
      float other = SWAP(v, o, 32);
      int index = SWAP(at, o, 32);
      if (index >= 0 && (at < 0 || other > v || (other == v && index < at))) v = other, at = index;
    }
    if (lane == 0) best[warp] = v, where[warp] = at;
    __syncthreads();
    if (tid == 0) {
      for (int w = 1; w < 8; w++)
        if (where[w] >= 0 && (at < 0 || best[w] > v || (best[w] == v && where[w] < at)))
          v = best[w], at = where[w];
      if (at < 0) at = 0;  // only where logits were no numbers, which is latched
      float p = div_(exp_(sub(v, m)), sum);
      picks[(size_t)blockIdx.x * top_k + k] = at;
      weights[(size_t)blockIdx.x * top_k + k] = p;
      total = k ? add(total, p) : p;
      chosen = at;
    }
    __syncthreads();
    if (tid == 0) x[chosen] = float_of(0x7fc00000u);
    __syncthreads();
  }
  if (tid == 0 && renormalise)
    for (int k = 0; k < top_k; k++) {
      float* w = weights + (size_t)blockIdx.x * top_k + k;
      *w = div_(*w, total);
    }
}
#endif

#ifdef KERNEL_assign
KERNEL(1024)
assign(const int* picks, const Cell* cells, const int* share, const float* x, Entry* entries,
       float* rows, float* host_rows, u64* counts, float* mail_x, int* mail_picks, int* mail_lanes,
       int* mail_host, i64* mail_word, const i64* round, int tokens, int top_k, int inputs,
       int outputs) {
  __shared__ int pick[MOST_ENTRIES], first[MOST_ENTRIES], lanes[MOST_ENTRIES];
  __shared__ int served[LANES], missing, linked;
  int tid = threadIdx.x, n = tokens * top_k;
  if (tid < LANES) served[tid] = 0;
  if (tid == 0) missing = 0;
  if (tid < n) pick[tid] = picks[tid];
  __syncthreads();
  Cell cell;
  if (tid < n) {
    int i = 0;
    while (pick[i] != pick[tid]) i++;
    first[tid] = i;
    cell = cells[pick[tid]];
    // -1: a miss that may go over the link, -2: one that may not
    lanes[tid] = cell.slot[0] ? HIT : cell.helper ? HELPER + cell.helper - 1
               : cell.alias[0] ? -1 : -2;
    if (lanes[tid] < 0 && i == tid) atomicAdd(&missing, 1);
  }
  __syncthreads();
  if (tid == 0) linked = share[missing];
  __syncthreads();
  int lane = 0;
  if (tid < n) {
    int home = first[tid];
    lane = lanes[home];
    if (lane == -1) {
      int before = 0;
      for (int i = 0; i < home; i++) before += lanes[i] == -1 && first[i] == i;
      lane = before < linked ? LINK : HOST;
    } else if (lane == -2) {
      lane = HOST;
    }
    const u64* at = lane == HIT ? cell.slot : cell.alias;
    bool here = lane == HIT || lane == LINK;
    Entry e = {here ? at[0] : 0, here ? at[1] : 0, here ? at[2] : 0,
               (u64)((here ? rows : host_rows) + (size_t)tid * outputs),
               pick[tid], lane, home, 0};
    entries[tid] = e;
    atomicAdd(&served[lane], 1);
    if (mail_picks) mail_picks[tid] = pick[tid];
    if (mail_word) {
      mail_lanes[tid] = lane;
      mail_host[tid] = lane == HOST ? pick[tid] : -1;
    }
  }
  if (mail_word)
    for (int i = tid; i < tokens * inputs; i += 1024) mail_x[i] = x[i];
  fence_system();
  __syncthreads();
  if (tid < LANES) counts[tid] += (u64)served[tid];
  if (tid == 0 && mail_word) {
    fence_system();
    *(volatile i64*)mail_word = *round;
  }
}
#endif

#ifdef KERNEL_claim
KERNEL(256)
claim(const int* mail_picks, const int* mail_lanes, const Cell* cells, Entry* entries,
      float* host_rows, int count, int lane, int outputs) {
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
