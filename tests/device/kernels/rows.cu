// Exact expert and dense rows: a warp holds 4 rows of 8 lanes; whole rows are staged in shared
// memory by 16-byte copies (all in flight at once), or read in place (Q4_K, whose pieces align).
#include "exact.cuh"

template <int P, int T>
DEV void load_x(const int4* xq, const float2* xs, int nsb, int sb, int j, int t, int* x,
                float2& s) {
#pragma unroll
  for (int i = 0; i < 2 * P; i++)
    ((int4*)x)[i] = __ldg(xq + (size_t)t * nsb * 16 * P + (sb * 2 * P + i) * 8 + j);
  s = __ldg(xs + t * nsb * 8 + sb * 8 + j);
}

// gate and up rows of 32 indices (8 warps x 4), silu, product, and the 32 results as one block of
// activations for `down`. grid (F/32, experts), 256 threads.
template <class W, int P, int T, bool STAGE>
DEV void gate_up(const u64* tab, const int* ids, const int4* xq, const float2* xs, u8* hq,
                 float2* hs, int K, int F) {
  extern __shared__ __align__(16) u8 smem[];
  __shared__ float h[T][32];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 3, j = lane & 7;
  int nsb = K >> 8, rb = nsb * W::SB, row = blockIdx.x * 32 + warp * 4, k = blockIdx.y;
  depend();
  const u8* blob = (const u8*)tab[ids[k]];
  const u8 *pg = blob + (size_t)row * rb, *pu = blob + (size_t)(F + row) * rb;
  if (STAGE) {
    u8* mine = smem + warp * 8 * rb;
    stage_rows(mine, pg, 4 * rb, lane);
    stage_rows(mine + 4 * rb, pu, 4 * rb, lane);
    copies_done();
    pg = mine + g * rb;
    pu = mine + (4 + g) * rb;
  } else {
    pg += g * rb;
    pu += g * rb;
  }
  float ag[T], au[T];
#pragma unroll
  for (int t = 0; t < T; t++) ag[t] = au[t] = 0.f;
#pragma unroll(T == 1 ? 4 : 1)
  for (int sb = 0; sb < nsb; sb++) {
    Frag fg, fu;
    W::load(pg, sb, j, fg);
    W::load(pu, sb, j, fu);
#pragma unroll
    for (int t = 0; t < T; t++) {
      int x[8 * P];
      float2 s;
      load_x<P, T>(xq, xs, nsb, sb, j, t, x, s);
      ag[t] = block_step<W, P>(fg, x, s, ag[t]);
      au[t] = block_step<W, P>(fu, x, s, au[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < T; t++) {
    float a = fold8(ag[t]), b = fold8(au[t]);
    if (j == 0) h[t][warp * 4 + g] = __fmul_rn(silu(a), b);
  }
  __syncthreads();
  if (warp < T) {
    size_t tok = (size_t)k * T + warp;
    store_stripe<P>(hq + tok * F * P, hs + tok * (F / 32), blockIdx.x, lane, h[warp][lane],
                    W::ORDER);
  }
}

// Rows of one matrix, R rows a group. y[(k*T + t)*rows + r]. x belongs to (k, t) when per_k.
template <class W, int P, int T, int R>
DEV void plain_rows(const u8* base, const int4* xq, const float2* xs, float* y, const float* add,
                    int K, int rows, int k) {
  extern __shared__ __align__(16) u8 smem[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 3, j = lane & 7;
  int nsb = K >> 8, rb = nsb * W::SB;
  int row = (blockIdx.x * (blockDim.x >> 5) + warp) * 4 * R;
  if (row >= rows) {
    depend();
    return;
  }
  u8* mine = smem + warp * 4 * R * rb;
  stage_rows(mine, base + (size_t)row * rb, 4 * R * rb, lane);
  depend();
  copies_done();
  const u8* p = mine + g * R * rb;
  float acc[R][T];
#pragma unroll
  for (int i = 0; i < R * T; i++) acc[i / T][i % T] = 0.f;
#pragma unroll(T == 1 ? 2 : 1)
  for (int sb = 0; sb < nsb; sb++) {
    Frag f[R];
#pragma unroll
    for (int r = 0; r < R; r++) W::load(p + r * rb, sb, j, f[r]);
#pragma unroll
    for (int t = 0; t < T; t++) {
      int x[8 * P];
      float2 s;
      load_x<P, T>(xq, xs, nsb, sb, j, t, x, s);
#pragma unroll
      for (int r = 0; r < R; r++) acc[r][t] = block_step<W, P>(f[r], x, s, acc[r][t]);
    }
  }
#pragma unroll
  for (int i = 0; i < R * T; i++) {
    float v = fold8(acc[i / T][i % T]);
    int r = row + g * R + i / T;
    size_t at = ((size_t)k * T + i % T) * rows + r;
    if (j == 0) y[at] = add ? __fadd_rn(v, add[at]) : v;
  }
}

template <class W, int P, int T, int R>
DEV void down(const u64* tab, const int* ids, const int4* hq, const float2* hs, float* y, int F,
              int H, size_t skip) {
  int k = blockIdx.y;
  const u8* blob = (const u8*)tab[ids[k]] + skip;
  size_t tok = (size_t)k * T;
  plain_rows<W, P, T, R>(blob, hq + tok * F * P / 16, hs + tok * (F / 32), y, 0, F, H, k);
}

// The same two kernels cut elsewhere: gate_up hands over h as floats (CTAs of 16 rows, so that 8
// experts fill the machine evenly), down quantises it while its own rows are on their way.
template <class W, int P>
DEV void gate_up_h(const u64* tab, const int* ids, const int4* xq, const float2* xs, float* h,
                   int K, int F) {
  extern __shared__ __align__(16) u8 smem[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 3, j = lane & 7;
  int nsb = K >> 8, rb = nsb * W::SB, row = blockIdx.x * 16 + warp * 4, k = blockIdx.y;
  depend();
  const u8* blob = (const u8*)tab[ids[k]];
  u8* mine = smem + warp * 8 * rb;
  stage_rows(mine, blob + (size_t)row * rb, 4 * rb, lane);
  stage_rows(mine + 4 * rb, blob + (size_t)(F + row) * rb, 4 * rb, lane);
  copies_done();
  const u8 *pg = mine + g * rb, *pu = mine + (4 + g) * rb;
  float ag = 0.f, au = 0.f;
#pragma unroll 4
  for (int sb = 0; sb < nsb; sb++) {
    Frag fg, fu;
    int x[8 * P];
    float2 s;
    load_x<P, 1>(xq, xs, nsb, sb, j, 0, x, s);
    W::load(pg, sb, j, fg);
    W::load(pu, sb, j, fu);
    ag = block_step<W, P>(fg, x, s, ag);
    au = block_step<W, P>(fu, x, s, au);
  }
  float a = fold8(ag), b = fold8(au);
  if (j == 0) h[(size_t)k * F + row + g] = __fmul_rn(silu(a), b);
}

template <class W, int P>
DEV void down_h(const u64* tab, const int* ids, const float* h, float* y, int F, int H,
                size_t skip) {
  extern __shared__ __align__(16) u8 smem[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 3, j = lane & 7;
  int nsb = F >> 8, rb = nsb * W::SB, k = blockIdx.y, row = (blockIdx.x * 8 + warp) * 8;
  u8* q = smem + 64 * rb;
  float2* s = (float2*)(q + F * P);
  u8* mine = smem + warp * 8 * rb;
  const u8* from = (const u8*)tab[ids[k]] + skip + (size_t)row * rb;
  stage_rows(mine, from, 8 * rb, lane);
  depend();
  for (int b = warp; b < F / 32; b += 8)
    store_stripe<P>(q, s, b, lane, h[(size_t)k * F + b * 32 + lane], W::ORDER);
  copies_done();
  __syncthreads();
  const u8* p = mine + g * 2 * rb;
  float acc[2] = {0.f, 0.f};
  for (int sb = 0; sb < nsb; sb++) {
    int x[8 * P];
#pragma unroll
    for (int i = 0; i < 2 * P; i++) ((int4*)x)[i] = ((int4*)q)[(sb * 2 * P + i) * 8 + j];
    float2 d = s[sb * 8 + j];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      Frag f;
      W::load(p + r * rb, sb, j, f);
      acc[r] = block_step<W, P>(f, x, d, acc[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float v = fold8(acc[r]);
    if (j == 0) y[(size_t)k * H + row + g * 2 + r] = v;
  }
}

#define SPLIT(W, P)                                                                              \
  extern "C" __global__ void __launch_bounds__(128) gate_up_h_##W##_p##P(                        \
      const u64* tab, const int* ids, const int4* xq, const float2* xs, float* h, int K, int F) {\
    gate_up_h<W, P>(tab, ids, xq, xs, h, K, F);                                                  \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) down_h_##W##_p##P(                           \
      const u64* tab, const int* ids, const float* h, float* y, int F, int H, size_t skip) {     \
    down_h<W, P>(tab, ids, h, y, F, H, skip);                                                    \
  }
SPLIT(Q4K, 2) SPLIT(Q80, 2) SPLIT(MX4, 2)

#define QUANTISE(P)                                                                              \
  extern "C" __global__ void quantise_p##P(const float* x, u8* q, float2* s, int K, int order) { \
    int b = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, t = blockIdx.y;        \
    store_stripe<P>(q + (size_t)t * K * P, s + t * (K / 32), b, lane,                            \
                    x[(size_t)t * K + b * 32 + lane], order);                                    \
  }                                                                                              \
  extern "C" __global__ void quantise_fragment_p##P(const float* x, u8* q, float2* s, int K) {   \
    int b = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, t = blockIdx.y;        \
    store_fragment<P>(q, s, K / 32, t, b, lane, x[(size_t)t * K + b * 32 + lane]);               \
  }
QUANTISE(1)
QUANTISE(2)

#define EXPERT(W, P, T)                                                                          \
  extern "C" __global__ void __launch_bounds__(256) gate_up_##W##_p##P##_t##T(                   \
      const u64* tab, const int* ids, const int4* xq, const float2* xs, u8* hq, float2* hs,      \
      int K, int F) {                                                                            \
    gate_up<W, P, T, true>(tab, ids, xq, xs, hq, hs, K, F);                                      \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) down_##W##_p##P##_t##T(                      \
      const u64* tab, const int* ids, const int4* hq, const float2* hs, float* y, int F, int H,  \
      size_t skip) {                                                                             \
    down<W, P, T, 2>(tab, ids, hq, hs, y, F, H, skip);                                           \
  }
#define DIRECT(P, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(256) gate_up_direct_Q4K_p##P##_t##T(              \
      const u64* tab, const int* ids, const int4* xq, const float2* xs, u8* hq, float2* hs,      \
      int K, int F) {                                                                            \
    gate_up<Q4K, P, T, false>(tab, ids, xq, xs, hq, hs, K, F);                                   \
  }
#define TOKENS(W, P) EXPERT(W, P, 1) EXPERT(W, P, 4) EXPERT(W, P, 8)
TOKENS(Q4K, 1) TOKENS(Q4K, 2) TOKENS(Q80, 1) TOKENS(Q80, 2) TOKENS(MX4, 1) TOKENS(MX4, 2)
DIRECT(1, 1) DIRECT(2, 1)

#define DENSE(W, P, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(256) dense_##W##_p##P##_t##T(                     \
      const u8* w, const int4* xq, const float2* xs, float* y, const float* add, int K,          \
      int rows) {                                                                                \
    plain_rows<W, P, T, 1>(w, xq, xs, y, add, K, rows, 0);                                       \
  }
DENSE(Q80, 1, 1) DENSE(Q80, 2, 1) DENSE(Q80, 2, 4) DENSE(Q80, 2, 8) DENSE(Q4K, 2, 1)
