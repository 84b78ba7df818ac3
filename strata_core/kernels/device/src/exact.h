// docs/arithmetic.md, sections 1, 2 and 5: folds, elementary functions, the blocks of activations.
#ifndef STRATA_EXACT_H
#define STRATA_EXACT_H

// Fold of the stripes that 8 neighbouring lanes hold, on every lane: ((s0 + s1) + s2) ... + s7.
DEV float fold8(float s) {
  float total = LANE(s, 0, 8);
#pragma unroll
  for (int i = 1; i < 8; i++) total = add(total, LANE(s, i, 8));
  return total;
}

// Fold of 64 stripes of which lane j of 8 holds j, j + 8, ..., j + 56.
DEV float fold64(const float* s) {
  float t = s[0];
#pragma unroll
  for (int k = 1; k < 8; k++) t = add(t, s[k]);
  return fold8(t);
}

// The same fold of 64 stripes in shared memory, by 8 neighbouring lanes, on every one of them.
DEV float fold64_of(const float* s) {
  int j = threadIdx.x & 7;
  float t = s[j];
#pragma unroll
  for (int k = 1; k < 8; k++) t = add(t, s[j + 8 * k]);
  return fold8(t);
}

// The same fold where lane i of 32 holds stripe i as `a` and stripe i + 32 as `b`.
DEV float fold64_of_pair(float a, float b) {
  int j = threadIdx.x & 7;
  float t = LANE(a, j, 32);
  t = add(t, LANE(a, j + 8, 32));
  t = add(t, LANE(a, j + 16, 32));
  t = add(t, LANE(a, j + 24, 32));
  t = add(t, LANE(b, j, 32));
  t = add(t, LANE(b, j + 8, 32));
  t = add(t, LANE(b, j + 16, 32));
  t = add(t, LANE(b, j + 24, 32));
  return fold8(t);
}

// Fold of stripes j mod 8 of what 32 lanes hold, ascending, on every lane; a lane without part holds
// +0, which changes nothing.
DEV float fold32(float v) {
  int j = threadIdx.x & 7;
  float t = add(0.f, LANE(v, j, 32));
  t = add(t, LANE(v, j + 8, 32));
  t = add(t, LANE(v, j + 16, 32));
  t = add(t, LANE(v, j + 24, 32));
  return fold8(t);
}

// The factor of a norm over `dim` floats that lie in shared memory; all threads of the block, 64 or
// more of them, come here.
#define NORM_FACTOR(row, dim, eps)                                             \
  __shared__ float stripes[64];                                               \
  if (threadIdx.x < 64) {                                                     \
    float acc = 0.f;                                                          \
    _Pragma("unroll 8") for (int i = threadIdx.x; i < (dim); i += 64)         \
        acc = fma_((row)[i], (row)[i], acc);                                  \
    stripes[threadIdx.x] = acc;                                               \
  }                                                                           \
  __syncthreads();                                                            \
  float factor = div_(1.f, sqrt_(add(div_(fold64_of(stripes), (float)(dim)), (eps))))

DEV float exp_(float x) {
  // 1.5 * 2^23 added and taken away rounds to an integer, ties to even; the sum's low bits are it
  float sum = add(mul(x, 0x1.715476p+0f), 0x1.8p+23f), n = sub(sum, 0x1.8p+23f);
  float r = fma_(n, -0x1.7f7d1cp-20f, fma_(n, -0x1.62e4p-1f, x));
  float p = 0x1.6a5228p-10f;
  p = fma_(p, r, 0x1.12396cp-7f);
  p = fma_(p, r, 0x1.5558aap-5f);
  p = fma_(p, r, 0x1.555492p-3f);
  p = fma_(p, r, 0x1.fffffcp-2f);
  p = add(fma_(mul(r, r), p, r), 1.f);
  p = float_of(bits_of(p) + (bits_of(sum) << 23));
  if (!(x <= 88.f)) p = add(x, float_of(0x7f800000u));
  return x < -87.f ? 0.f : p;
}

DEV float sigmoid(float x) { return div_(1.f, add(1.f, exp_(-x))); }
DEV float silu(float x) { return div_(x, add(1.f, exp_(-x))); }

// --- activations: records of 256, as layout.py sizes them --------------------------------------
// 16-byte pieces [4 pieces][8 blocks]: piece 0 and 1 the upper plane of weights 0..15 and 16..31 of
// a block, 2 and 3 the lower plane; then 8 scales, then 8 sums.
#define RECORD_BYTES 576
#define LARGEST 16383.f

// Bytes from one row of activations to the next: as records; as the type of the weights wants them;
// of `down`'s, which have room for floats.
DEV size_t record_pitch(int width) { return (size_t)((width + 255) / 256) * RECORD_BYTES; }
DEV size_t row_pitch(int width) {
#ifdef QUANTISED
  return record_pitch(width);
#else
  return (size_t)width * 4;
#endif
}
DEV size_t inner_pitch(int width) { return (size_t)((width + 255) / 256) * 1024; }

DEV const u8* record_of(const u8* row, int block) { return row + (size_t)(block >> 3) * RECORD_BYTES; }

// 32 neighbouring threads hold the 32 values of a block: its record's part is written. `lane` is the
// thread's place among them. Latches `op` where a value is not finite.
DEV void store_block(u8* row, int block, int lane, float x, u32* status, int op) {
  // absolute values are in order as integers, and what is not finite comes last
  u32 most = most_of(bits_of(x) & 0x7fffffffu);
  float amax = float_of(most);
  bool good = finite(amax);
  float d = div_(amax, LARGEST), id = div_(LARGEST, amax);
  int q = 0;
  if (good && d != 0.f && finite(id)) q = (int)rintf(mul(x, id));
  else d = 0.f;
  int sum = sum_of(q);
  u8* at = row + (size_t)(block >> 3) * RECORD_BYTES;
  int j = block & 7;
  u8* piece = at + ((lane >> 4) * 8 + j) * 16 + (lane & 15);
  piece[0] = (u8)(q >> 7);
  piece[2 * 8 * 16] = (u8)(q & 127);
  if (lane == 0) {
    ((float*)(at + 512))[j] = d;
    ((int*)(at + 544))[j] = sum;
    if (!good) latch(status, op);
  }
}

// The same where 8 neighbouring threads hold four neighbouring values each, `lane` being the thread's
// place among them. All of a warp come here; who is not `in` a row writes nothing.
DEV void store_fours(u8* row, int block, int lane, bool in, float4 x, u32* status, int op) {
  float v[4] = {x.x, x.y, x.z, x.w};
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 one = bits_of(v[i]) & 0x7fffffffu;
    most = one > most ? one : most;
  }
#pragma unroll
  for (int o = 4; o; o >>= 1) {
    u32 other = SWAP(most, o, 32);
    most = other > most ? other : most;
  }
  float amax = float_of(most), d = div_(amax, LARGEST), id = div_(LARGEST, amax);
  bool good = finite(amax), any = good && d != 0.f && finite(id);
  if (!any) d = 0.f;
  u32 high = 0, low = 0;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int q = any ? (int)rintf(mul(v[i], id)) : 0;
    sum += q, high |= (u32)(q >> 7 & 255) << 8 * i, low |= (u32)(q & 127) << 8 * i;
  }
#pragma unroll
  for (int o = 4; o; o >>= 1) sum += SWAP(sum, o, 32);
  if (!in) return;
  u8* at = row + (size_t)(block >> 3) * RECORD_BYTES;
  int j = block & 7;
  u32* piece = (u32*)(at + ((lane >> 2) * 8 + j) * 16) + (lane & 3);
  piece[0] = high, piece[2 * 8 * 4] = low;
  if (lane == 0) {
    ((float*)(at + 512))[j] = d;
    ((int*)(at + 544))[j] = sum;
    if (!good) latch(status, op);
  }
}

// The same of the activations of `down`, entry by entry, as its type wants them.
DEV void store_inner(u8* inner, int entry, int rows, int block, int lane, float h, u32* status, int op) {
  u8* to = inner + entry * inner_pitch(rows);
#ifdef DOWN_QUANTISED
  store_block(to, block, lane, h, status, op);
#else
  ((float*)to)[block * 32 + lane] = h;
#endif
}

// One block of activations as a lane of a row's product reads it.
struct Activations {
  int high[8], low[8], sum;
  float d;
};

DEV void load_block(const u8* row, int block, Activations& a) {
  const u8* at = record_of(row, block);
  int j = block & 7;
  const int4* piece = (const int4*)at + j;
  int4 p[4] = {piece[0], piece[8], piece[16], piece[24]};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    a.high[4 * i] = p[i].x, a.high[4 * i + 1] = p[i].y;
    a.high[4 * i + 2] = p[i].z, a.high[4 * i + 3] = p[i].w;
    a.low[4 * i] = p[2 + i].x, a.low[4 * i + 1] = p[2 + i].y;
    a.low[4 * i + 2] = p[2 + i].z, a.low[4 * i + 3] = p[2 + i].w;
  }
  a.d = ((const float*)(at + 512))[j];
  a.sum = ((const int*)(at + 544))[j];
}

#endif
