// Rows of picked experts times activations, as multiply.h has it: gate_up, down. Sections 2 to 5.

#ifdef KERNEL_gate_up
DEV const u8* address_in(int low, int high) { return (const u8*)((u64)(u32)high << 32 | (u32)low); }

// Entries of the window that have the expert of entry `self`, whose first it is; how many. All threads
// of the block come here.
DEV int sharers(const Entry* entries, int self, int count, int top_k, int* found) {
  if (count == top_k) {  // a single token picks an expert once
    if (threadIdx.x == 0) found[0] = self;
    __syncthreads();
    return 1;
  }
  __shared__ int many;
  if (threadIdx.x == 0) many = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (entries[i].first == self) found[atomicAdd(&many, 1)] = i;
  __syncthreads();
  return many;
}

// One row of gate and one of up for T entries; entry t's records begin at from[t].
#ifdef QUANTISED
template <int T, bool WIDE>
DEV void blocks_of_two(const u8* gate, const u8* up, const u8* const* from, int blocks, int j, float* a,
                       float* b) {
#pragma unroll(T == 1 ? PAIRS_TOGETHER(GATE) : 1)
  for (int k = j; k < blocks; k += 8) {
    Block f, g;
    GATE::template load_as<WIDE>(gate, k, f);
    if (T == 1) UP::template load_as<WIDE>(up, k, g);
    Activations v[T];
#pragma unroll
    for (int t = 0; t < T; t++) load_block(from[t], k, v[t]);
#pragma unroll
    for (int t = 0; t < T; t++) a[t] = block_step<GATE>(f, v[t], a[t]);
    if (T > 1) UP::template load_as<WIDE>(up, k, g);
#pragma unroll
    for (int t = 0; t < T; t++) b[t] = block_step<UP>(g, v[t], b[t]);
  }
}
#endif

// The same of T entries of which the first `n` count, by the lanes that hold such a row; to `to`.
template <int T>
DEV void gate_and_up(const u8* gate, const u8* up, const u8* x, const int* found, int n, int top_k,
                     int columns, int lane, float* to) {
  float a[T], b[T];
  const u8* from[T];
#ifdef QUANTISED
  const bool both = GATE::WIDE && UP::WIDE;
  int j = lane & 7;
#else
  int j = lane;
#endif
  size_t pitch = row_pitch(columns);
#pragma unroll
  for (int t = 0; t < T; t++) a[t] = b[t] = 0.f, from[t] = x + alike(found[t < n ? t : 0] / top_k) * pitch;
#ifdef QUANTISED
  if (both && (((size_t)gate | (size_t)up) & 15) == 0)
    blocks_of_two<T, both>(gate, up, from, columns >> 5, j, a, b);
  else blocks_of_two<T, false>(gate, up, from, columns >> 5, j, a, b);
#pragma unroll
  for (int t = 0; t < T; t++) a[t] = fold8(a[t]), b[t] = fold8(b[t]);
#else
  auto row = [=](int t) { return from[t]; };
  float_row<GATE, T>(gate, row, columns, lane, a);
  float_row<UP, T>(up, row, columns, lane, b);
#endif
#pragma unroll
  for (int t = 0; t < T; t++)
    if (t < n && j == 0) to[t * 32] = mul(silu(a[t]), b[t]);
}

// One block: 32 rows of gate and up of one expert, which make one block of `down`'s activations for
// each entry that has the expert. Warps take rows by fours; `warps` of them stage theirs, 0: none does.
ROOMY(256, 2)
gate_up(const Entry* entries, const u8* x, u8* inner, u32* status, i64 gate_stride, i64 up_stride,
        int count, int top_k, int rows, int columns, int op, int warps) {
  SHARED_BYTES(bytes);
  __shared__ float h[MOST_TOKENS][32];
  __shared__ int found[MOST_TOKENS];
  follow();
  // the entry's pieces at once: what follows waits for all of them
  const int4 *pieces = (const int4*)(entries + blockIdx.y), of_rows = pieces[0], of_entry = pieces[2];
  const u8 *gates = address_in(of_rows.x, of_rows.y), *ups = address_in(of_rows.z, of_rows.w);
  if ((gates == 0) | (of_entry.z != blockIdx.y)) return;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, each = blockDim.x >> 5, n = 0;
  u8* slot = bytes + warp * (slot_bytes(gate_stride, 4) + slot_bytes(up_stride, 4));
  for (int base = warp * 4; base < 32; base += each * 4) {
    int first = blockIdx.x * 32 + base;
    const u8* gate = gates + (size_t)first * gate_stride;
    const u8* up = ups + (size_t)first * up_stride;
    if (warps) {
      MEET_WARP();
      gate = stage(slot, gate, (int)(4 * gate_stride), lane);
      up = stage(slot + slot_bytes(gate_stride, 4), up, (int)(4 * up_stride), lane);
    }
    if (!n) n = sharers(entries, blockIdx.y, count, top_k, found);
    if (warps) copies_done<0>();
    MEET_WARP();
#ifdef QUANTISED
    int r = lane >> 3;
#else
#pragma unroll 1
    for (int r = 0; r < 4; r++)
#endif
    {
      const u8 *a = gate + r * gate_stride, *b = up + r * up_stride;
      float* to = h[0] + base + r;
#ifdef QUANTISED
      if (n == 1) gate_and_up<1>(a, b, x, found, 1, top_k, columns, lane, to);
      else  // more than two beside two blocks of weights would spill
        for (int t = 0; t < n; t += 2)
          gate_and_up<2>(a, b, x, found + t, n - t, top_k, columns, lane, to + t * 32);
#else
#pragma unroll 1
      for (int t = 0; t < n; t++)
        gate_and_up<1>(a, b, x, found + t, 1, top_k, columns, lane, to + t * 32);
#endif
    }
  }
  __syncthreads();
  for (int t = warp; t < n; t += each)
    store_inner(inner, found[t], rows, blockIdx.x, lane, h[t][lane], status, op);
}
#endif

#ifdef KERNEL_down
ROOMY(128, 4)
down(const Entry* entries, const u8* inner, i64 stride, int count, int rows, int columns) {
  SHARED_BYTES(bytes);
  __shared__ int found[MOST_TOKENS], many;
  const Entry* e = entries + blockIdx.y;
  if (!e->down || e->first != blockIdx.y) {
    follow();
    return;
  }
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, of_warp = rows_of_block(stride) / 4;
  int first = (blockIdx.x * 4 + warp) * of_warp;
  u8* slot = bytes + warp * slot_bytes(stride, of_warp);
  RowsOf r = begin_rows((const u8*)e->down, stride, first, rows, slot, lane);
  if (threadIdx.x == 0) many = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += 128)
    if (entries[i].first == blockIdx.y) found[atomicAdd(&many, 1)] = i;
  __syncthreads();
  follow();
  int n = many;
  size_t pitch = inner_pitch(columns);
  auto x = [=](int t) { return inner + found[t] * pitch; };
  auto put = [=](int k, int t, float v) { ((float*)entries[found[t]].row)[first + k] = v; };
  finish_tokens<TYPE>(r, x, n, columns, lane, put);
}
#endif
