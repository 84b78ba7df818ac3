// The rest of a round, so that its launches, waits and bytes are a real one's: norms, heads,
// attention, routing, combine; and the words that GPU and host leave for each other.
#include "exact.cuh"

// One 64-byte line a layer in mapped host memory. The GPU writes `published`, the host `answered`;
// both hold the number of the round, so nothing is reset.
struct Line {
  u32 published, ids[8], pad0[7];
};
struct Answer {
  u32 answered, pad[15];
};
struct State {
  u32 round, latch, timeout_us, position;
};

DEV u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

DEV u32 load_system(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Every wait is bounded: on time-out the latch is set and later waits fall through at once.
DEV void wait_for(const u32* word, u32 round, State* st) {
  if (*(volatile u32*)&st->latch) return;
  u64 end = now_ns() + (u64)st->timeout_us * 1000;
  while ((int)(load_system(word) - round) < 0) {
    if (now_ns() > end) {
      *(volatile u32*)&st->latch = 1;
      return;
    }
  }
  __threadfence_system();
}

// One CTA of 1024 threads; H = 2048. x += sum of weight * row in router order (where rows is given),
// then norm, quantise, and the quantised activations once more for the host (where mail_q is
// given). Where `answered` is given, the host's word for this round is awaited first.
extern "C" __global__ void __launch_bounds__(1024)
combine_norm(float* x, const float* rows, const float* weights, const float* gain, float* normed,
             u8* q, float2* scale, u8* mail_q, const u32* answered, State* st, int H) {
  __shared__ float part[32];
  int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  depend();
  if (answered) {
    if (tid == 0) wait_for(answered, st->round, st);
    __syncthreads();
  }
  float v[2] = {x[tid], x[1024 + tid]};
  if (rows) {
    float r[2][8];
#pragma unroll
    for (int k = 0; k < 8; k++) r[0][k] = rows[(size_t)k * H + tid], r[1][k] = rows[(size_t)k * H + 1024 + tid];
#pragma unroll
    for (int k = 0; k < 8; k++)
      v[0] = __fmaf_rn(weights[k], r[0][k], v[0]), v[1] = __fmaf_rn(weights[k], r[1][k], v[1]);
    x[tid] = v[0], x[1024 + tid] = v[1];
  }
  float sum = __fmaf_rn(v[0], v[0], __fmul_rn(v[1], v[1]));
  for (int o = 16; o; o >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
  if (lane == 0) part[warp] = sum;
  __syncthreads();
  sum = part[lane];
  for (int o = 16; o; o >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, o));
  float r = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, (float)H), 1e-6f)));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int e = i * 1024 + tid;
    float n = __fmul_rn(__fmul_rn(v[i], r), gain[e]);
    normed[e] = n;
    store_stripe<2>(q, scale, e >> 5, lane, n, 0);
  }
  if (mail_q) {
    __syncthreads();
    if (tid < 256) ((int4*)mail_q)[tid] = ((int4*)q)[tid];
    if (tid < H / 64) ((int4*)(mail_q + 4096))[tid] = ((int4*)scale)[tid];
  }
}

// 40 CTAs of 128 threads: heads 0-31 q, 32-35 k, 36-39 v. Norm, rope, append.
extern "C" __global__ void heads(const float* qkv, const float* rope, float* q, u16* kc, u16* vc,
                                 const State* st) {
  __shared__ float part[4], v[128];
  int h = blockIdx.x, e = threadIdx.x, pos = st->position;
  depend();
  float a = qkv[h * 128 + e];
  if (h >= 36) {
    vc[(size_t)pos * 512 + (h - 36) * 128 + e] = to_half(a);
    return;
  }
  float s = __fmul_rn(a, a);
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  if ((e & 31) == 0) part[e >> 5] = s;
  __syncthreads();
  s = __fadd_rn(__fadd_rn(part[0], part[1]), __fadd_rn(part[2], part[3]));
  a = __fdiv_rn(a, __fsqrt_rn(__fadd_rn(__fmul_rn(s, 1.f / 128), 1e-6f)));
  v[e] = a;
  __syncthreads();
  float c = rope[(size_t)pos * 128 + (e & 63)], d = rope[(size_t)pos * 128 + 64 + (e & 63)];
  float b = v[e ^ 64];
  a = e < 64 ? __fmaf_rn(a, c, -__fmul_rn(b, d)) : __fmaf_rn(a, c, __fmul_rn(b, d));
  if (h < 32)
    q[h * 128 + e] = a;
  else
    kc[(size_t)pos * 512 + (h - 32) * 128 + e] = to_half(a);
}

// One split of 256 positions of one head: grid (32, splits), 256 threads.
extern "C" __global__ void attention(const float* q, const u16* kc, const u16* vc, float* part,
                                     const State* st) {
  __shared__ float score[256], red[8], acc[4][128];
  int h = blockIdx.x, kv = h >> 3, tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int p0 = blockIdx.y * 256, n = min(256, (int)st->position + 1 - p0);
  float* out = part + ((size_t)h * gridDim.y + blockIdx.y) * 130;
  depend();
  if (n <= 0) {
    if (tid == 0) out[128] = -1e30f, out[129] = 0.f;
    if (tid < 128) out[tid] = 0.f;
    return;
  }
  // 4 lanes a position, 32 dims each
  float qv[32];
  int sub = lane & 3;
#pragma unroll
  for (int i = 0; i < 32; i++) qv[i] = q[h * 128 + (i >> 3) * 32 + sub * 8 + (i & 7)];
#pragma unroll 4
  for (int p = warp * 8 + (lane >> 2); p < 256; p += 64) {
    float s = 0.f;
    if (p < n) {
      const uint4* k = (const uint4*)(kc + (size_t)(p0 + p) * 512 + kv * 128);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        uint4 w = k[i * 4 + sub];
        u32 u[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = 0; c < 4; c++) {
          s = __fmaf_rn(half_bits(u[c] & 0xffff), qv[i * 8 + c * 2], s);
          s = __fmaf_rn(half_bits(u[c] >> 16), qv[i * 8 + c * 2 + 1], s);
        }
      }
    }
    s = __fadd_rn(s, __shfl_xor_sync(~0u, s, 1));
    s = __fadd_rn(s, __shfl_xor_sync(~0u, s, 2));
    if (sub == 0) score[p] = p < n ? __fmul_rn(s, 0.08838834764831845f) : -1e30f;
  }
  __syncthreads();
  float m = score[tid];
  for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
  if (lane == 0) red[warp] = m;
  __syncthreads();
  m = red[0];
  for (int i = 1; i < 8; i++) m = fmaxf(m, red[i]);
  float e = tid < n ? exp_poly(__fadd_rn(score[tid], -m)) : 0.f, s = e;
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  __syncthreads();
  score[tid] = e;
  if (lane == 0) red[warp] = s;
  __syncthreads();
  s = 0.f;
  for (int i = 0; i < 8; i++) s = __fadd_rn(s, red[i]);
  int d = tid & 63, part4 = tid >> 6;
  float a0 = 0.f, a1 = 0.f;
  const u32* v2 = (const u32*)(vc + (size_t)p0 * 512 + kv * 128) + d;
#pragma unroll 16
  for (int p = part4; p < n; p += 4) {
    u32 w = v2[(size_t)p * 256];
    a0 = __fmaf_rn(score[p], half_bits(w & 0xffff), a0);
    a1 = __fmaf_rn(score[p], half_bits(w >> 16), a1);
  }
  acc[part4][2 * d] = a0, acc[part4][2 * d + 1] = a1;
  __syncthreads();
  if (tid < 128)
    out[tid] = __fadd_rn(__fadd_rn(acc[0][tid], acc[1][tid]), __fadd_rn(acc[2][tid], acc[3][tid]));
  if (tid == 0) out[128] = m, out[129] = s;
}

// Folds the splits ascending and quantises: 32 CTAs of 128 threads.
extern "C" __global__ void attention_fold(const float* part, int splits, u8* q, float2* scale) {
  int h = blockIdx.x, e = threadIdx.x;
  const float* p = part + (size_t)h * splits * 130;
  depend();
  float m = -1e30f, a = 0.f, s = 0.f;
  for (int i = 0; i < splits; i++) m = fmaxf(m, p[i * 130 + 128]);
  for (int i = 0; i < splits; i++) {
    float f = exp_poly(__fadd_rn(p[i * 130 + 128], -m));
    a = __fmaf_rn(p[i * 130 + e], f, a);
    s = __fmaf_rn(p[i * 130 + 129], f, s);
  }
  store_stripe<2>(q, scale, h * 4 + (e >> 5), e & 31, __fdiv_rn(a, s), 0);
}

// Float router rows of 2048, a warp each: 32 CTAs of 128 threads for 128 experts.
extern "C" __global__ void router(const float* x, const float4* w, float* logits, int H) {
  int r = blockIdx.x * 4 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  const float4* row = w + (size_t)r * H / 4;
  float s = 0.f;
  float4 a[16];
#pragma unroll
  for (int i = 0; i < 16; i++) a[i] = row[i * 32 + lane];
  depend();
#pragma unroll
  for (int i = 0; i < 16; i++) {
    float4 b = ((const float4*)x)[i * 32 + lane];
    s = __fmaf_rn(a[i].x, b.x, s);
    s = __fmaf_rn(a[i].y, b.y, s);
    s = __fmaf_rn(a[i].z, b.z, s);
    s = __fmaf_rn(a[i].w, b.w, s);
  }
  for (int o = 16; o; o >>= 1) s = __fadd_rn(s, __shfl_xor_sync(~0u, s, o));
  if (lane == 0) logits[r] = s;
}

// The 8 largest of 128 logits, ties to the lowest index, softmax over them; one warp. Publishes the
// ids where `line` is given.
extern "C" __global__ void top8(const float* logits, int* ids, float* weights, Line* line,
                                const State* st) {
  int lane = threadIdx.x;
  depend();
  u64 key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 b = __float_as_uint(logits[lane * 4 + i]);
    b = b >> 31 ? ~b : b | 0x80000000u;
    key[i] = ((u64)b << 32) | (127 - (lane * 4 + i));
  }
  float first = 0.f, sum = 0.f, mine = 0.f;
  int id = 0;
  for (int k = 0; k < 8; k++) {
    u64 best = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) best = key[i] > best ? key[i] : best;
    for (int o = 16; o; o >>= 1) {
      u64 other = __shfl_xor_sync(~0u, best, o);
      best = other > best ? other : best;
    }
    int e = 127 - (int)(best & 127);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (lane * 4 + i == e) key[i] = 0;
    float l = logits[e];
    if (k == 0) first = l;
    float p = exp_poly(__fadd_rn(l, -first));
    sum = __fadd_rn(sum, p);
    if (lane == k) mine = p, id = e;
  }
  if (lane < 8) {
    ids[lane] = id;
    weights[lane] = __fdiv_rn(mine, sum);
    if (line) line->ids[lane] = id;
  }
  if (line) {
    __threadfence_system();
    __syncwarp();
    if (lane == 0) *(volatile u32*)&line->published = st->round;
  }
}

// First and last node of a round.
extern "C" __global__ void begin_round(State* st) {
  st->round += 1;
}
extern "C" __global__ void end_round(const State* st, u32* done) {
  depend();
  done[1] = st->latch;
  __threadfence_system();
  *(volatile u32*)done = st->round;
}

// Reads of mapped memory as wide as they come, for the link's own figure.
extern "C" __global__ void read_wide(const uint4* p, size_t n, u32* out) {
  size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x, st = (size_t)gridDim.x * blockDim.x;
  u32 a = 0;
  for (; i + 3 * st < n; i += 4 * st) {
    uint4 v[4] = {p[i], p[i + st], p[i + 2 * st], p[i + 3 * st]};
#pragma unroll
    for (int k = 0; k < 4; k++) a ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (a == 0x12345678u) out[0] = a;
}
