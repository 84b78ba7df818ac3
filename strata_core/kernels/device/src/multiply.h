// Rows of weights times activations, sections 2 to 4: what linear, products, gate_up and down share.
// Of quantised rows eight lanes hold one, lane j the blocks with b mod 8 = j; of float rows a warp
// holds one, lane i the stripes i and i + 32.
#ifndef STRATA_MULTIPLY_H
#define STRATA_MULTIPLY_H

#ifdef QUANTISED
#define AT_ONCE 4
#else
#define AT_ONCE 2
#endif

// Blocks of a row that a lane asks for together, and of two rows: fewer of those that come in more
// words.
#define TOGETHER(W) (W::SCALED && W::BLOCK_BYTES > 20 ? AHEAD / 2 : AHEAD)
#define PAIRS_TOGETHER(W) (W::SCALED && W::BLOCK_BYTES > 20 ? 1 : PAIRS_AHEAD)

// T tokens of one quantised row; token t's records begin at from[t].
template <class W, int T, bool WIDE>
DEV void blocks_of_row(const u8* row, const u8* const* from, int blocks, int j, float* acc) {
#pragma unroll(T == 1 ? TOGETHER(W) : 1)
  for (int b = j; b < blocks; b += 8) {
    Block f;
    W::template load_as<WIDE>(row, b, f);
#pragma unroll
    for (int t = 0; t < T; t++) {
      Activations a;
      load_block(from[t], b, a);
      acc[t] = block_step<W>(f, a, acc[t]);
    }
  }
}

// The same; token t's records are at x(t).
template <class W, int T, class X>
DEV void quantised_row(const u8* row, X x, int blocks, int j, float* acc) {
  const u8* from[T];
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = 0.f, from[t] = x(t);
  if (W::WIDE && ((size_t)row & 15) == 0) blocks_of_row<W, T, W::WIDE>(row, from, blocks, j, acc);
  else blocks_of_row<W, T, false>(row, from, blocks, j, acc);
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = fold8(acc[t]);
}

// `columns` floats of a row for T tokens, by a warp; token t's floats are at x(t).
template <class W, int T, class X>
DEV void float_row(const u8* row, X x, int columns, int lane, float* acc) {
  float s[T][2];
  const float* from[T];
  int whole = columns & ~63;
#pragma unroll
  for (int t = 0; t < T; t++) s[t][0] = s[t][1] = 0.f, from[t] = (const float*)x(t) + lane;
#pragma unroll(T == 1 ? FLOATS_AHEAD : 4)  // asked for together: nothing here decides whether to ask
  for (int i = 0; i < whole; i += 64) {
    float w = W::at(row, i + lane), v = W::at(row, i + lane + 32);
#pragma unroll
    for (int t = 0; t < T; t++)
      s[t][0] = fma_(w, from[t][i], s[t][0]), s[t][1] = fma_(v, from[t][i + 32], s[t][1]);
  }
  if (whole < columns) {  // the zero tail takes part: it makes +0 of a stripe that is -0
    bool a = whole + lane < columns, b = whole + lane + 32 < columns;
    float w = a ? W::at(row, whole + lane) : 0.f, v = b ? W::at(row, whole + lane + 32) : 0.f;
#pragma unroll
    for (int t = 0; t < T; t++) {
      s[t][0] = fma_(w, a ? from[t][whole] : 0.f, s[t][0]);
      s[t][1] = fma_(v, b ? from[t][whole + 32] : 0.f, s[t][1]);
    }
  }
#pragma unroll
  for (int t = 0; t < T; t++) acc[t] = fold64_of_pair(s[t][0], s[t][1]);
}

// A warp's rows of a matrix: `count` of them from `first` on. Rows are on their way when `begin_rows`
// returns, which needs nothing that another kernel of the round writes.
struct RowsOf {
  const u8* rows;
  i64 stride;
  int count;
  bool staged;
};

DEV RowsOf begin_rows(const u8* weight, i64 stride, int first, int rows, u8* slot, int lane) {
  RowsOf r;
  int batch = batch_of(stride), most = batch ? batch : 4;
  r.stride = stride, r.rows = weight + (size_t)first * stride;
  r.count = rows - first < most ? rows - first : most;
  r.staged = batch && r.count > 0;
  if (r.staged) r.rows = stage(slot, r.rows, (int)(r.count * stride), lane);
  else for (i64 i = lane * 128; i < r.count * stride; i += 32 * 128) prefetch(r.rows + i);
  return r;
}

DEV int rows_of_block(i64 stride) {
  int batch = batch_of(stride);
  return 4 * (batch ? batch : 4);
}

// Every product of rows and T tokens, of which the first `tokens` count, to put(row, token, value);
// the tokens' rows are at x(token). All of a warp come here.
template <class W, int T, class X, class Put>
DEV void finish_rows(const RowsOf& r, X x, int tokens, int columns, int lane, Put put) {
  float acc[T];
#ifdef QUANTISED
  int g = lane >> 3, j = lane & 7;
  for (int base = 0; base < r.count; base += 4) {
    int n = base + g;
    const u8* row = r.rows + (n < r.count ? n : r.count - 1) * r.stride;  // lanes stay together to fold
    quantised_row<W, T>(row, x, columns >> 5, j, acc);
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < tokens && n < r.count && j == 0) put(n, t, acc[t]);
  }
#else
  for (int n = 0; n < r.count; n++) {
    float_row<W, T>(r.rows + n * r.stride, x, columns, lane, acc);
#pragma unroll
    for (int t = 0; t < T; t++)
      if (t < tokens && lane == 0) put(n, t, acc[t]);
  }
#endif
}

// Tokens by fours (of float rows by twos), by two or one: eight at once would take more registers than
// there are, and the rows are near. A fourth one that there is not repeats the third, so that no
// branch keeps the tokens' loads apart.
template <class W, class X, class Put>
DEV void finish_tokens(const RowsOf& r, X x, int tokens, int columns, int lane, Put put) {
  if (r.staged) copies_done<0>();
  MEET_WARP();
  for (int from = 0; from < tokens; from += AT_ONCE) {
    int n = tokens - from < AT_ONCE ? tokens - from : AT_ONCE;
    auto at = [=](int t) { return x(from + (t < n ? t : n - 1)); };
    auto to = [=](int row, int t, float v) { put(row, from + t, v); };
    if (n == 1) finish_rows<W, 1>(r, at, n, columns, lane, to);
    else if (n == 2) finish_rows<W, 2>(r, at, n, columns, lane, to);
    else finish_rows<W, AT_ONCE>(r, at, n, columns, lane, to);
  }
}

#endif
