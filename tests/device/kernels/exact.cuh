// Shared by the measuring kernels: ARITHMETIC's block product and order, on 8 lanes a row.
// No header is included, so that the run-time compiler needs no include path.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV __device__ __forceinline__
#define MAGIC 0x4B400000  // 1.5 * 2^23 as float bits: an int added to it is a float's mantissa
#define MAGIC_F 12582912.0f

DEV float half_bits(u32 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
  return f;
}

DEV u16 to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

// Launched early (programmatic dependence), a kernel may read what nobody in this round writes, and
// what the kernel before its predecessor wrote; then it waits here. The trigger stands behind the
// wait, which is what makes the second half of that true. A plain launch passes through.
DEV void depend() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEV float exp_poly(float x) {
  x = fminf(fmaxf(x, -87.f), 87.f);
  float t = __fmul_rn(x, 1.4426950408889634f), n = rintf(t), f = __fadd_rn(t, -n);
  float r = 1.5403530e-4f;
  r = __fmaf_rn(r, f, 1.3333558e-3f);
  r = __fmaf_rn(r, f, 9.6181291e-3f);
  r = __fmaf_rn(r, f, 5.5504109e-2f);
  r = __fmaf_rn(r, f, 2.4022651e-1f);
  r = __fmaf_rn(r, f, 6.9314718e-1f);
  r = __fmaf_rn(r, f, 1.f);
  return __int_as_float(__float_as_int(r) + ((int)n << 23));
}

DEV float silu(float g) { return __fdiv_rn(g, __fadd_rn(1.f, exp_poly(-g))); }

// Fold of the 8 stripes that 8 neighbouring lanes hold: ((s0+s1)+s2)+...+s7, on every lane.
DEV float fold8(float a) {
  float s = __shfl_sync(~0u, a, 0, 8);
#pragma unroll
  for (int i = 1; i < 8; i++) s = __fadd_rn(s, __shfl_sync(~0u, a, i, 8));
  return s;
}

// --- activations -------------------------------------------------------------------------------
// Two layouts of the same numbers. STRIPE (one token): 16-byte pieces [superblock][piece][stripe],
// piece = 2 * plane + half. FRAGMENT (tiles of 8 tokens): the B operand of m16n8k32, 16 bytes a
// lane. `order` interleaves the halves of a block, as MXFP4's nibbles stand.
// scale[...] = (d, sum of q), one pair a block.

template <int P>
DEV int quantise_lane(float v, float& d) {
  float a = fabsf(v);
#pragma unroll
  for (int o = 16; o; o >>= 1) a = fmaxf(a, __shfl_xor_sync(~0u, a, o));
  const float top = P == 2 ? 16383.f : 127.f;
  d = __fdiv_rn(a, top);
  float id = __fdiv_rn(top, a);
  if (d == 0.f || isinf(id)) {
    d = 0.f;
    return 0;
  }
  return (int)fminf(fmaxf(rintf(__fmul_rn(v, id)), -top), top);
}

template <int P>
DEV void store_stripe(u8* q, float2* scale, int b, int lane, float v, int order) {
  float d;
  int n = quantise_lane<P>(v, d), sum = n;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  int pos = order ? (lane < 16 ? 2 * lane : 2 * lane - 31) : lane;
  u8* at = q + ((b >> 3) * 2 * P * 8 + (pos >> 4) * 8 + (b & 7)) * 16 + (pos & 15);
  at[0] = (u8)(P == 2 ? n >> 7 : n);
  if (P == 2) at[2 * 8 * 16] = (u8)(n & 127);
  if (lane == 0) scale[b] = make_float2(d, (float)sum);
}

template <int P>
DEV void store_fragment(u8* q, float2* scale, int nblocks, int t, int b, int lane, float v) {
  float d;
  int n = quantise_lane<P>(v, d), sum = n;
#pragma unroll
  for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
  size_t at = (size_t)(t >> 3) * nblocks + b;
  u8* to = q + (at * 32 + (t & 7) * 4 + (lane >> 3)) * 8 * P + (lane & 7);
  to[0] = (u8)(P == 2 ? n >> 7 : n);
  if (P == 2) to[8] = (u8)(n & 127);
  if (lane == 0) scale[at * 8 + (t & 7)] = make_float2(d, (float)sum);
}

// --- weights -----------------------------------------------------------------------------------
// What one lane holds of a block: 32 signed bytes in 8 words, the scale that S takes as an integer,
// the block's float scales.
struct Frag {
  int v[8];
  int sc, mn;
  float d, m;
};

struct Q4K {
  static const int SB = 144, ORDER = 0;
  static const bool MINS = true, SCALED = true;
  DEV static void load(const u8* row, int sb, int j, Frag& f) {
    const uint4* p = (const uint4*)(row + sb * SB);
    uint4 h = p[0], q0 = p[1 + (j >> 1) * 2], q1 = p[2 + (j >> 1) * 2];
    f.d = half_bits(h.x & 0xffff);
    f.m = half_bits(h.x >> 16);
    int s = (j & 3) * 8, a = (h.y >> s) & 255, b = (h.z >> s) & 255, e = (h.w >> s) & 255;
    f.sc = j < 4 ? a & 63 : (e & 15) | ((a >> 6) << 4);
    f.mn = j < 4 ? b & 63 : (e >> 4) | ((b >> 6) << 4);
    int n = (j & 1) * 4;
    u32 w[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
#pragma unroll
    for (int i = 0; i < 8; i++) f.v[i] = (w[i] >> n) & 0x0f0f0f0f;
  }
};

struct Q80 {
  static const int SB = 272, ORDER = 0;
  static const bool MINS = false, SCALED = false;
  DEV static void load(const u8* row, int sb, int j, Frag& f) {
    int o = (sb * 8 + j) * 34;
    const u32* p = (const u32*)(row + (o & ~3));
    u32 w[9], sh = (j & 1) ? 32 : 16;
#pragma unroll
    for (int i = 0; i < 9; i++) w[i] = p[i];
    f.d = half_bits((j & 1) ? w[0] >> 16 : w[0] & 0xffff);
    f.m = 0.f;
    f.sc = 1;
    f.mn = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) f.v[i] = (int)__funnelshift_rc(w[i], w[i + 1], sh);
  }
};

// Four nibbles (in the low 16 bits of q) to four signed bytes of the E2M1 table, doubled.
DEV int e2m1(u32 q) {
  u32 lo = __byte_perm(0x03020100, 0x0c080604, q & 0x7777);
  u32 hi = __byte_perm(0xfdfeff00, 0xf4f8fafc, q & 0x7777);
  return (int)__byte_perm(lo, hi, 0x3210 + ((q & 0x8888) >> 1));
}

struct MX4 {
  static const int SB = 136, ORDER = 1;
  static const bool MINS = false, SCALED = false;
  DEV static void load(const u8* row, int sb, int j, Frag& f) {
    const u8* at = row + (sb * 8 + j) * 17;
    u32 e = at[0], sh = ((size_t)(at + 1) & 3) * 8;
    const u32* p = (const u32*)((size_t)(at + 1) & ~(size_t)3);
    f.d = __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    f.m = 0.f;
    f.sc = 1;
    f.mn = 0;
    u32 a = p[0];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // The last word is a neighbour's when the block ends on a word: never read it then.
      u32 b = i < 3 || sh ? p[i + 1] : 0, q = __funnelshift_r(a, b, sh);
      f.v[2 * i] = e2m1(q & 0xffff);
      f.v[2 * i + 1] = e2m1(q >> 16);
      a = b;
    }
  }
};

// One block of one row times one token's block. x holds the planes' words, s = (d, sum of q).
template <class W, int P>
DEV float block_step(const Frag& f, const int* x, float2 s, float acc) {
  int hi = 0, lo = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    hi = __dp4a(f.v[i], x[i], hi);
    if (P == 2) lo = __dp4a(f.v[i], x[8 + i], lo);
  }
  int dot = P == 2 ? hi * 128 + lo : hi;
  if (W::SCALED) dot *= f.sc;
  if (W::MINS) acc = __fmaf_rn(-__fmul_rn((float)f.mn, s.y), __fmul_rn(f.m, s.x), acc);
  return __fmaf_rn((float)dot, __fmul_rn(f.d, s.x), acc);
}

// --- staging -----------------------------------------------------------------------------------
DEV void copy16(u8* to, const u8* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)),
               "l"(from));
#else
  *(uint4*)to = *(const uint4*)from;
#endif
}

DEV void copies_done() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
#endif
  __syncwarp();
}

// Stage nbytes of rows as one run. Lines must keep their place within 128 bytes: rows padded off it
// (against bank conflicts) halved what mapped memory gives, 25 instead of 50 GB/s.
DEV void stage_rows(u8* to, const u8* from, int nbytes, int lane) {
  for (int i = lane * 16; i < nbytes; i += 512) copy16(to + i, from + i);
}
