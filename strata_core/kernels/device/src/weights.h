// docs/arithmetic.md, section 3: what one lane holds of a block of 32 weights, type by type.
#ifndef STRATA_WEIGHTS_H
#define STRATA_WEIGHTS_H

// 32 signed bytes in 8 words, in the order of the weights; integer scales of the two halves;
// minimum's integer; float scales. What a type does not use is not touched.
struct Block {
  int w[8];
  int scale[2], low;
  float d, m;
};

// N words from any address. No byte beyond the last whole word that holds one of them is read, and
// nothing branches, so that the loads of several blocks can be on their way together.
template <int N>
DEV void words(const u8* p, u32* out) {
  u32 shift = (u32)((size_t)p & 3) * 8;
  const u32* from = (const u32*)((size_t)p & ~(size_t)3);
  u32 n[N + 1];
#pragma unroll
  for (int i = 0; i < N; i++) n[i] = from[i];
  n[N] = from[shift ? N : N - 1];
#pragma unroll
  for (int i = 0; i < N; i++) out[i] = slide(n[i], n[i + 1], shift);
}

DEV u32 half_at(const u8* p) { return p[0] | (u32)p[1] << 8; }

// Low and high nibbles of 16 bytes as 32 bytes.
DEV void nibbles(const u8* p, int* w) {
  u32 n[4];
  words<4>(p, n);
#pragma unroll
  for (int i = 0; i < 4; i++) w[i] = n[i] & 0x0f0f0f0f, w[4 + i] = n[i] >> 4 & 0x0f0f0f0f;
}

// Bit i of `h` as bit 4 of byte i of the 32.
DEV void fifth_bits(u32 h, int* w) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 four = h >> 4 * i & 15;
    w[i] |= (int)((four & 1) << 4 | (four & 2) << 11 | (four & 4) << 18 | (four & 8) << 25);
  }
}

// How a type sums: SCALED by integers (1), or each half by its own (2); SIGN of its minimum; BIAS
// that its integers lack. WIDE: rows that begin at multiples of 16 are read in pieces of 16 bytes.
#define TRAITS(bytes, scaled, sign, bias)                                 \
  static const int BLOCK_BYTES = bytes, SCALED = scaled, SIGN = sign, BIAS = bias
#define NARROW                      \
  static const bool WIDE = false;   \
  template <bool>                   \
  DEV static void load_as(const u8* row, int b, Block& o) { load(row, b, o); }
#define WIDE_ROWS                                      \
  static const bool WIDE = true;                       \
  DEV static void load(const u8* row, int b, Block& o) { \
    if (((size_t)row & 15) == 0) load_as<true>(row, b, o); \
    else load_as<false>(row, b, o);                    \
  }

struct Q8_0 {
  TRAITS(34, 0, 0, 0);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    // scale and bytes lie in nine words, from two bytes before them or from the scale on
    const u8* p = row + (size_t)b * 34;
    u32 odd = (u32)(size_t)p & 2, n[9];
    const u32* from = (const u32*)(p - odd);
#pragma unroll
    for (int i = 0; i < 9; i++) n[i] = from[i];
    o.d = half_of(odd ? n[0] >> 16 : n[0] & 0xffff);
#pragma unroll
    for (int i = 0; i < 8; i++) o.w[i] = (int)slide(n[i], n[i + 1], odd ? 32 : 16);
  }
};

struct Q4_0 {
  TRAITS(18, 0, 0, 8);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)b * 18;
    o.d = half_of(half_at(p));
    nibbles(p + 2, o.w);
  }
};

struct Q4_1 {
  TRAITS(20, 0, 1, 0);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)b * 20;
    o.d = half_of(half_at(p)), o.m = half_of(half_at(p + 2));
    nibbles(p + 4, o.w);
  }
};

struct Q5_0 {
  TRAITS(22, 0, 0, 16);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)b * 22;
    o.d = half_of(half_at(p));
    nibbles(p + 6, o.w);
    fifth_bits(half_at(p + 2) | half_at(p + 4) << 16, o.w);
  }
};

struct Q5_1 {
  TRAITS(24, 0, 1, 0);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)b * 24;
    o.d = half_of(half_at(p)), o.m = half_of(half_at(p + 2));
    nibbles(p + 8, o.w);
    fifth_bits(half_at(p + 4) | half_at(p + 6) << 16, o.w);
  }
};

struct MXFP4 {
  TRAITS(17, 0, 0, 0);
  NARROW
  // Four nibbles, one in each of the low 16 bits' nibbles, to twice their E2M1 values as bytes.
  DEV static u32 values(u32 n) {
    u32 positive = choose(0x03020100, 0x0c080604, n & 0x7777);
    u32 negative = choose(0xfdfeff00, 0xf4f8fafc, n & 0x7777);
    u32 signs = n >> 3 & 0x1111, mask = 0;
    mask = ((signs & 1) | (signs & 0x10) << 4 | (signs & 0x100) << 8 | (signs & 0x1000) << 12) * 255;
    return (positive & ~mask) | (negative & mask);
  }
  DEV static u32 gather(u32 n) {
    n &= 0x0f0f0f0f;
    n = (n | n >> 4) & 0x00ff00ff;
    return (n | n >> 8) & 0xffff;
  }
  // 255 means no number: the row becomes one that is not finite, which is then found.
  DEV static float scale(u32 e) {
    return float_of(e == 255 ? 0x7f800000u : e < 2 ? 0x00200000u << e : (e - 1) << 23);
  }
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)b * 17;
    u32 n[4];
    o.d = scale(p[0]);
    words<4>(p + 1, n);
#pragma unroll
    for (int i = 0; i < 4; i++)
      o.w[i] = (int)values(gather(n[i])), o.w[4 + i] = (int)values(gather(n[i] >> 4));
  }
};

// Scales and minima of block j of a superblock of Q4_K or Q5_K.
DEV void k_scales(const u8* p, int j, Block& o) {
  const u8* s = p + 4;
  o.d = half_of(half_at(p)), o.m = half_of(half_at(p + 2));
  if (j < 4) {
    o.scale[0] = s[j] & 63, o.low = s[j + 4] & 63;
  } else {
    o.scale[0] = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    o.low = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
  }
}

// The same from the 16 bytes that a superblock begins with, in one piece.
DEV void k_header(const u8* p, int j, Block& o) {
  uint4 h = *(const uint4*)p;
  int s = (j & 3) * 8;
  u32 a = h.y >> s & 255, b = h.z >> s & 255, e = h.w >> s & 255;
  o.d = half_of(h.x & 0xffff), o.m = half_of(h.x >> 16);
  o.scale[0] = (int)(j < 4 ? a & 63 : (e & 15) | a >> 6 << 4);
  o.low = (int)(j < 4 ? b & 63 : e >> 4 | b >> 6 << 4);
}

// 32 bytes in two pieces, or by words where they are not aligned.
template <bool whole>
DEV void pieces(const u8* p, u32* n) {
  if (whole) {
    uint4 a = ((const uint4*)p)[0], b = ((const uint4*)p)[1];
    n[0] = a.x, n[1] = a.y, n[2] = a.z, n[3] = a.w;
    n[4] = b.x, n[5] = b.y, n[6] = b.z, n[7] = b.w;
  } else {
    words<8>(p, n);
  }
}

struct Q4_K {
  TRAITS(18, 1, -1, 0);
  WIDE_ROWS
  template <bool whole>
  DEV static void load_as(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)(b >> 3) * 144;
    int j = b & 7;
    u32 n[8];
    if (whole) k_header(p, j, o);
    else k_scales(p, j, o);
    pieces<whole>(p + 16 + 32 * (j >> 1), n);
#pragma unroll
    for (int i = 0; i < 8; i++) o.w[i] = n[i] >> 4 * (j & 1) & 0x0f0f0f0f;
  }
};

struct Q5_K {
  TRAITS(22, 1, -1, 0);
  WIDE_ROWS
  template <bool whole>
  DEV static void load_as(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)(b >> 3) * 176;
    int j = b & 7;
    u32 n[8], h[8];
    if (whole) k_header(p, j, o);
    else k_scales(p, j, o);
    pieces<whole>(p + 16, h);
    pieces<whole>(p + 48 + 32 * (j >> 1), n);
#pragma unroll
    for (int i = 0; i < 8; i++)
      o.w[i] = (n[i] >> 4 * (j & 1) & 0x0f0f0f0f) | (h[i] >> j & 0x01010101) << 4;
  }
};

struct Q6_K {
  TRAITS(26, 2, 0, 0);
  NARROW
  DEV static void load(const u8* row, int b, Block& o) {
    const u8* p = row + (size_t)(b >> 3) * 210;
    int j = b & 7, g = j >> 2, k = j & 3;
    u32 l[8], h[8];
    o.d = half_of(half_at(p + 208));
    o.scale[0] = (i8)p[192 + 2 * j], o.scale[1] = (i8)p[193 + 2 * j];
    words<8>(p + 64 * g + 32 * (k & 1), l);
    words<8>(p + 128 + 32 * g, h);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      u32 w = (l[i] >> (k >= 2 ? 4 : 0) & 0x0f0f0f0f) | (h[i] >> 2 * k & 0x03030303) << 4;
      o.w[i] = (int)(((w | 0x80808080u) - 0x20202020u) ^ 0x80808080u);
    }
  }
};

// Steps 1 to 3 of section 3 for one block.
template <class W>
DEV float block_step(const Block& f, const Activations& a, float acc) {
  int dot;
  if (W::SCALED == 2) {
    int part[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      int high = 0, low = 0;
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 4; i++)
        high = dot4(f.w[i], a.high[i], high), low = dot4(f.w[i], a.low[i], low);
      part[n] = high * 128 + low;
    }
    dot = f.scale[0] * part[0] + f.scale[1] * part[1];
  } else {
    int high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
      high = dot4(f.w[i], a.high[i], high), low = dot4(f.w[i], a.low[i], low);
    dot = high * 128 + low - W::BIAS * a.sum;
    if (W::SCALED) dot *= f.scale[0];
  }
  if (W::SIGN < 0) acc = fma_(-(float)(f.low * a.sum), mul(f.m, a.d), acc);
  acc = fma_((float)dot, mul(f.d, a.d), acc);
  if (W::SIGN > 0) acc = fma_((float)a.sum, mul(f.m, a.d), acc);
  return acc;
}

// --- single weights (section 3.3) and float rows (section 4) -----------------------------------

// Weights i to i + 3 of a row; i is a multiple of 4.
template <class W>
DEV float4 four_values(const u8* row, int i) {
  Block f;
  W::load(row, i >> 5, f);
  // the word is chosen by halves, not indexed: an array would be kept in memory
#pragma unroll
  for (int half = 4; half; half >>= 1)
#pragma unroll
    for (int n = 0; n < half; n++) f.w[n] = i & 4 * half ? f.w[n + half] : f.w[n];
  int word = f.w[0], scale = W::SCALED == 2 && i & 16 ? f.scale[1] : f.scale[0];
  float v[4];
#pragma unroll
  for (int c = 0; c < 4; c++) {
    int w = (int)(i8)((u32)word >> 8 * c) - W::BIAS;
    if (W::SCALED) w *= scale;
    v[c] = mul(f.d, (float)w);
    if (W::SIGN < 0) v[c] = sub(v[c], mul(f.m, (float)f.low));
    if (W::SIGN > 0) v[c] = add(v[c], f.m);
  }
  float4 o = {v[0], v[1], v[2], v[3]};
  return o;
}

struct F32 {
  static const int BYTES = 4;
  DEV static float at(const u8* row, int i) { return ((const float*)row)[i]; }
};
struct F16 {
  static const int BYTES = 2;
  DEV static float at(const u8* row, int i) { return half_of(((const u16*)row)[i]); }
};
struct BF16 {
  static const int BYTES = 2;
  DEV static float at(const u8* row, int i) { return float_of((u32)((const u16*)row)[i] << 16); }
};

#endif
