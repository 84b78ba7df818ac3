// Expert products on int8 matrix units (mma.sync m16n8k32) that keep ARITHMETIC's order, beside the
// same kernel with an order that needs fewer accumulators, and without any float work at all.
#include "exact.cuh"

DEV void mma(int* c, const int* a, const int* b, const int* from) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%10,%11,%12,%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from[0]),
        "r"(from[1]), "r"(from[2]), "r"(from[3]));
#endif
}

#ifndef MATRIX_PAD
#define MATRIX_PAD 32  // Q4_K rows: 8 rows of a fragment in different banks
#endif

// What a row contributes at one block: d and the scales as exact floats, off = -MAGIC_F * sc.
struct RowScale {
  float d, m, sc, mn, off;
};

// The A operand: k slots are a permutation of a block's elements (exact sums do not mind): lane t
// of a quad holds elements 8t..8t+7 of row g (a0, a2) and of row g+8 (a1, a3).
struct A4K {
  static const int SB = 144, PAD = MATRIX_PAD;
  static const bool MINS = true, SCALED = true;
  DEV static void load(const u8* row, int b, int t, int& w0, int& w1) {
    const uint2 q = *(const uint2*)(row + (b >> 3) * SB + 16 + ((b & 7) >> 1) * 32 + t * 8);
    int n = (b & 1) * 4;
    w0 = (q.x >> n) & 0x0f0f0f0f;
    w1 = (q.y >> n) & 0x0f0f0f0f;
  }
  DEV static void scales(const u8* row, int b, RowScale& s) {
    const uint4 h = *(const uint4*)(row + (b >> 3) * SB);
    int j = b & 7, i = (j & 3) * 8;
    int x = (h.y >> i) & 255, y = (h.z >> i) & 255, e = (h.w >> i) & 255;
    s.d = half_bits(h.x & 0xffff);
    s.m = half_bits(h.x >> 16);
    s.sc = (float)(j < 4 ? x & 63 : (e & 15) | ((x >> 6) << 4));
    s.mn = (float)(j < 4 ? y & 63 : (e >> 4) | ((y >> 6) << 4));
    s.off = -MAGIC_F * s.sc;
  }
};

struct A80 {
  static const int SB = 272, PAD = 16;
  static const bool MINS = false, SCALED = false;
  DEV static void load(const u8* row, int b, int t, int& w0, int& w1) {
    int o = b * 34 + 2 + t * 8;
    const u32* p = (const u32*)(row + (o & ~3));
    u32 sh = (o & 2) * 8;
    w0 = (int)__funnelshift_r(p[0], p[1], sh);
    w1 = (int)__funnelshift_r(p[1], p[2], sh);
  }
  DEV static void scales(const u8* row, int b, RowScale& s) {
    s.d = half_bits(*(const u16*)(row + b * 34));
    s.m = s.mn = s.off = 0.f;
    s.sc = 1.f;
  }
};

// float(S) from the planes' magic-based ints: every step but the last rounds nothing.
template <class A, int P>
DEV float block_float(int hi, int lo, const RowScale& r) {
  float h = A::SCALED ? __fmaf_rn(__int_as_float(hi), r.sc, r.off)
                      : __fadd_rn(__int_as_float(hi), -MAGIC_F);
  if (P == 1) return h;
  float l = A::SCALED ? __fmaf_rn(__int_as_float(lo), r.sc, r.off)
                      : __fadd_rn(__int_as_float(lo), -MAGIC_F);
  return __fmaf_rn(h, 128.f, l);
}

template <class A, int P>
DEV void block_epilogue(const int* hi, const int* lo, const RowScale* r, float4 s, float* acc) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const RowScale& row = r[i >> 1];
    float d = (i & 1) ? s.z : s.x, sum = (i & 1) ? s.w : s.y;
    if (A::MINS) acc[i] = __fmaf_rn(-__fmul_rn(row.mn, sum), __fmul_rn(row.m, d), acc[i]);
    acc[i] = __fmaf_rn(block_float<A, P>(hi[i], lo[i], row), __fmul_rn(row.d, d), acc[i]);
  }
}

template <int P>
DEV void load_b(const u8* q, size_t tile_block, int lane, int* hi, int* lo) {
  if (P == 2) {
    int4 v = __ldg((const int4*)(q + tile_block * 512) + lane);
    hi[0] = v.x, hi[1] = v.y, lo[0] = v.z, lo[1] = v.w;
  } else {
    int2 v = __ldg((const int2*)(q + tile_block * 256) + lane);
    hi[0] = v.x, hi[1] = v.y;
  }
}

// ORDER 0: ascending, one accumulator (not ARITHMETIC's). 1: stripe by stripe, a running stripe and
// the fold so far. 2: integers only (no floats: the ceiling of the rest of the kernel).
// CTA: WM warps of 32 rows, WN warps of 32 tokens. grid (rows/32WM, tokens/32WN, experts).
// y[expert][token][row].
template <class A, int P, int ORDER, int WM, int WN>
DEV void gemm(const u8* w, const u8* q, const float2* scale, float* y, int K, int rows,
              int tokens) {
  extern __shared__ __align__(16) u8 smem[];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int nb = K / 32, rb = nb / 8 * A::SB, st = rb + A::PAD, z = blockIdx.z;
  int row0 = blockIdx.x * 32 * WM, m0 = (warp % WM) * 32;
  int tile0 = (blockIdx.y * WN + warp / WM) * 4;
  w += ((size_t)z * rows + row0) * rb;
  for (int r = warp; r < 32 * WM; r += WM * WN)
    for (int i = lane * 16; i < rb; i += 512) copy16(smem + r * st + i, w + (size_t)r * rb + i);
  copies_done();
  __syncthreads();
  q += (size_t)z * tokens * K * P;
  scale += (size_t)z * tokens * nb;
  const int magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
  float run[2][4][4], total[2][4][4];
  int count[2][4][4];
#pragma unroll
  for (int i = 0; i < 32; i++) {
    run[i >> 4][i >> 2 & 3][i & 3] = total[i >> 4][i >> 2 & 3][i & 3] = 0.f;
    count[i >> 4][i >> 2 & 3][i & 3] = 0;
  }
  const u8* arow = smem + (m0 + g) * st;
  const int stripes = ORDER == 1 ? 8 : 1, steps = nb / stripes;
  for (int stripe = 0; stripe < stripes; stripe++) {
   for (int i = 0; i < steps; i++) {
    int b = i * stripes + stripe;
    int bh[4][2], bl[4][2];
    float4 s[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      size_t at = (size_t)(tile0 + n) * nb + b;
      load_b<P>(q, at, lane, bh[n], bl[n]);
      if (ORDER != 2) s[n] = __ldg((const float4*)(scale + at * 8 + t * 2));
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
      int a[4];
      RowScale r[2];
      const u8 *r0 = arow + m * 16 * st, *r1 = r0 + 8 * st;
      A::load(r0, b, t, a[0], a[2]);
      A::load(r1, b, t, a[1], a[3]);
      if (ORDER != 2) {
        A::scales(r0, b, r[0]);
        A::scales(r1, b, r[1]);
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if (ORDER == 2) {
          mma(count[m][n], a, bh[n], count[m][n]);
          if (P == 2) mma(count[m][n], a, bl[n], count[m][n]);
        } else {
          int hi[4], lo[4];
          mma(hi, a, bh[n], magic);
          if (P == 2) mma(lo, a, bl[n], magic);
          block_epilogue<A, P>(hi, lo, r, s[n], run[m][n]);
        }
      }
    }
   }
   if (ORDER == 1) {
#pragma unroll
    for (int e = 0; e < 32; e++) {
      float& a = run[e >> 4][e >> 2 & 3][e & 3];
      float& s = total[e >> 4][e >> 2 & 3][e & 3];
      s = stripe == 0 ? a : __fadd_rn(s, a);
      a = 0.f;
    }
   }
  }
  y += (size_t)z * tokens * rows;
#pragma unroll
  for (int e = 0; e < 32; e++) {
    int m = e >> 4, n = e >> 2 & 3, i = e & 3;
    int row = row0 + m0 + m * 16 + g + (i >> 1) * 8, tok = (tile0 + n) * 8 + t * 2 + (i & 1);
    float v = ORDER == 0 ? run[m][n][i]
              : ORDER == 1 ? total[m][n][i]
                           : (float)count[m][n][i];
    y[(size_t)tok * rows + row] = v;
  }
}

// A window of 8 tokens: 16 rows a warp, half of the stripes each, every stripe its own accumulator,
// blocks ascending. Two warps share a 16-row tile: the first hands its fold on. gate and up of 32
// indices a CTA (8 warps). grid (F/32, experts); the silu product goes out as fragments for `down`.
template <class A, int P>
DEV void stripes_tile(const u8* rows16, int st, const u8* q, const float2* scale, int nb, int half,
                      int lane, float acc[4][4]) {
  int g = lane >> 2, t = lane & 3;
  const int magic[4] = {MAGIC, MAGIC, MAGIC, MAGIC};
  const u8 *r0 = rows16 + g * st, *r1 = r0 + 8 * st;
#pragma unroll
  for (int e = 0; e < 16; e++) acc[e >> 2][e & 3] = 0.f;
  for (int sb = 0; sb < nb / 8; sb++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int b = sb * 8 + half * 4 + j, a[4], bh[2], bl[2], hi[4], lo[4];
      RowScale r[2];
      load_b<P>(q, b, lane, bh, bl);
      float4 s = __ldg((const float4*)(scale + b * 8 + t * 2));
      A::load(r0, b, t, a[0], a[2]);
      A::load(r1, b, t, a[1], a[3]);
      A::scales(r0, b, r[0]);
      A::scales(r1, b, r[1]);
      mma(hi, a, bh, magic);
      if (P == 2) mma(lo, a, bl, magic);
      block_epilogue<A, P>(hi, lo, r, s, acc[j]);
    }
  }
}

// The fold of a tile: warps of half 0 leave ((s0+s1)+s2)+s3 in `out`, then those of half 1 add on.
DEV void fold_tile(float* out, int half, int lane, float acc[4][4]) {
  float* to = out + lane * 4;
  if (half == 0) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      to[i] = __fadd_rn(__fadd_rn(__fadd_rn(acc[0][i], acc[1][i]), acc[2][i]), acc[3][i]);
  }
  __syncthreads();
  if (half == 1) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      float v = to[i];
#pragma unroll
      for (int j = 0; j < 4; j++) v = __fadd_rn(v, acc[j][i]);
      to[i] = v;
    }
  }
  __syncthreads();
}

// Element (row 0..15, token 0..7) of a tile as the C operand's lanes hold it.
DEV float tile_at(const float* tile, int row, int tok) {
  return tile[((row & 7) * 4 + (tok >> 1)) * 4 + (row >> 3) * 2 + (tok & 1)];
}

template <class A, int P>
DEV void gate_up8(const u64* tab, const int* ids, const u8* q, const float2* scale, u8* hq,
                  float2* hs, int K, int F) {
  extern __shared__ __align__(16) u8 smem[];
  __shared__ float tiles[4][128];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, k = blockIdx.y;
  int nb = K / 32, rb = nb / 8 * A::SB, st = rb + A::PAD;
  const u8* blob = (const u8*)tab[ids[k]];
  for (int r = warp; r < 64; r += 8) {
    const u8* from = blob + (size_t)(blockIdx.x * 32 + (r & 31) + (r >> 5) * F) * rb;
    for (int i = lane * 16; i < rb; i += 512) copy16(smem + r * st + i, from + i);
  }
  copies_done();
  __syncthreads();
  float acc[4][4];
  stripes_tile<A, P>(smem + (warp >> 1) * 16 * st, st, q, scale, nb, warp & 1, lane, acc);
  fold_tile(tiles[warp >> 1], warp & 1, lane, acc);
  float gate = tile_at(tiles[lane >> 4], lane & 15, warp);
  float up = tile_at(tiles[2 + (lane >> 4)], lane & 15, warp);
  size_t base = (size_t)k * F / 32;
  store_fragment<P>(hq + base * 256 * P, hs + base * 8, F / 32, warp, blockIdx.x, lane,
                    __fmul_rn(silu(gate), up));
}

// 64 rows of `down` for 8 tokens: 4 tiles of 16 rows. grid (H/64, experts).
template <class A, int P>
DEV void down8(const u64* tab, const int* ids, const u8* hq, const float2* hs, float* y, int F,
               int H, size_t skip) {
  extern __shared__ __align__(16) u8 smem[];
  __shared__ float tiles[4][128];
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, k = blockIdx.y;
  int nb = F / 32, rb = nb / 8 * A::SB, st = rb + A::PAD, row0 = blockIdx.x * 64;
  const u8* from = (const u8*)tab[ids[k]] + skip + (size_t)row0 * rb;
  for (int r = warp; r < 64; r += 8)
    for (int i = lane * 16; i < rb; i += 512) copy16(smem + r * st + i, from + r * rb + i);
  copies_done();
  __syncthreads();
  float acc[4][4];
  stripes_tile<A, P>(smem + (warp >> 1) * 16 * st, st, hq + (size_t)k * nb * 256 * P,
                     hs + (size_t)k * nb * 8, nb, warp & 1, lane, acc);
  fold_tile(tiles[warp >> 1], warp & 1, lane, acc);
  for (int i = threadIdx.x; i < 512; i += 256) {
    int row = i & 63, tok = i >> 6;
    y[((size_t)k * 8 + tok) * H + row0 + row] = tile_at(tiles[row >> 4], row & 15, tok);
  }
}

#ifndef CTAS
#define CTAS 1
#endif
#define GEMM(A, P, O, WM, WN)                                                                    \
  extern "C" __global__ void __launch_bounds__(256, CTAS) gemm_##A##_p##P##_o##O(                \
      const u8* w, const u8* q, const float2* scale, float* y, int K, int rows, int tokens) {    \
    gemm<A, P, O, WM, WN>(w, q, scale, y, K, rows, tokens);                                      \
  }
#define ORDERS(A, P, WM, WN) GEMM(A, P, 0, WM, WN) GEMM(A, P, 1, WM, WN) GEMM(A, P, 2, WM, WN)
ORDERS(A4K, 1, 2, 4) ORDERS(A4K, 2, 2, 4) ORDERS(A80, 1, 1, 8) ORDERS(A80, 2, 1, 8)

#define WINDOW8(A, P)                                                                            \
  extern "C" __global__ void __launch_bounds__(256) gate_up8_##A##_p##P(                         \
      const u64* tab, const int* ids, const u8* q, const float2* scale, u8* hq, float2* hs,      \
      int K, int F) {                                                                            \
    gate_up8<A, P>(tab, ids, q, scale, hq, hs, K, F);                                            \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(256) down8_##A##_p##P(                            \
      const u64* tab, const int* ids, const u8* hq, const float2* hs, float* y, int F, int H,    \
      size_t skip) {                                                                             \
    down8<A, P>(tab, ids, hq, hs, y, F, H, skip);                                                \
  }
WINDOW8(A4K, 1) WINDOW8(A4K, 2)
