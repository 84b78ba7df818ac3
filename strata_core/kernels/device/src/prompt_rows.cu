// Rows of prompts (sections 2 and 5 to 8): norms with what stands before and behind them, a block a row
// and four neighbouring elements a thread; and the heads of q, k and v, a warp each.

#if defined(KERNEL_prompt_norm) || defined(KERNEL_prompt_add_norm) || defined(KERNEL_prompt_combine_norm)
// A row of `dim` floats, made four by four (`from(i)`), its norm and, where there are `records`,
// those. Warps stay together to the end, so that lanes can meet.
template <class From>
DEV void normed_row(float* row, From from, float* out, const float* gain, u8* records, u32* status,
                    int dim, float eps, int op) {
  for (int i = 4 * threadIdx.x; i < dim; i += 1024) *(float4*)(row + i) = from(i);
  __syncthreads();
  NORM_FACTOR(row, dim, eps);
  for (int i = 4 * threadIdx.x; (i & ~127) < dim; i += 1024) {
    bool in = i < dim;
    float4 v = {0.f, 0.f, 0.f, 0.f};
    if (in) {
      float4 x = *(const float4*)(row + i), g = *(const float4*)(gain + i);
      v.x = mul(mul(x.x, factor), g.x), v.y = mul(mul(x.y, factor), g.y);
      v.z = mul(mul(x.z, factor), g.z), v.w = mul(mul(x.w, factor), g.w);
      *(float4*)(out + i) = v;
    }
    if (records) store_fours(records, i >> 5, threadIdx.x & 7, in, v, status, op);
  }
}

DEV u8* records_at(u8* records, int dim) {
  return records ? records + blockIdx.x * record_pitch(dim) : 0;
}
#endif

#ifdef KERNEL_prompt_norm
KERNEL(256)
prompt_norm(const float* x, float* out, const float* gain, u8* records, u32* status, int rows, int dim,
            float eps, int op) {
  follow();
  SHARED_BYTES(bytes);
  size_t at = (size_t)blockIdx.x * dim;
  auto from = [=](int i) { return *(const float4*)(x + at + i); };
  normed_row((float*)bytes, from, out + at, gain, records_at(records, dim), status, dim, eps, op);
}
#endif

#ifdef KERNEL_prompt_add_norm
KERNEL(256)
prompt_add_norm(float* x, const float* y, float* out, const float* gain, u8* records, u32* status,
                int rows, int dim, float eps, int op) {
  follow();
  SHARED_BYTES(bytes);
  size_t at = (size_t)blockIdx.x * dim;
  auto from = [=](int i) {
    float4 a = *(const float4*)(x + at + i), b = *(const float4*)(y + at + i);
    a.x = add(a.x, b.x), a.y = add(a.y, b.y), a.z = add(a.z, b.z), a.w = add(a.w, b.w);
    *(float4*)(x + at + i) = a;
    return a;
  };
  normed_row((float*)bytes, from, out + at, gain, records_at(records, dim), status, dim, eps, op);
}
#endif

#ifdef KERNEL_prompt_combine_norm
#define AT_ONCE 8

KERNEL(256)
prompt_combine_norm(float* x, const float* experts, const float* weights, float* out,
                    const float* gain, u8* records, u32* status, int rows, int dim, int top_k,
                    float eps, int op) {
  follow();
  SHARED_BYTES(bytes);
  size_t at = (size_t)blockIdx.x * dim, first = (size_t)blockIdx.x * top_k;
  auto from = [=](int i) {
    float4 acc = {0.f, 0.f, 0.f, 0.f};
    const float* mine = experts + first * dim + i;
    for (int k = 0; k < top_k; k += AT_ONCE) {
      float4 a[AT_ONCE];
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++)  // asked for together
        a[n] = *(const float4*)(mine + (size_t)(k + n < top_k ? k + n : k) * dim);
#pragma unroll
      for (int n = 0; n < AT_ONCE; n++)
        if (k + n < top_k) {
          float w = weights[first + k + n];
          acc.x = fma_(w, a[n].x, acc.x), acc.y = fma_(w, a[n].y, acc.y);
          acc.z = fma_(w, a[n].z, acc.z), acc.w = fma_(w, a[n].w, acc.w);
        }
    }
    float4 old = *(const float4*)(x + at + i);
    acc.x = add(old.x, acc.x), acc.y = add(old.y, acc.y);
    acc.z = add(old.z, acc.z), acc.w = add(old.w, acc.w);
    *(float4*)(x + at + i) = acc;
    return acc;
  };
  normed_row((float*)bytes, from, out + at, gain, records_at(records, dim), status, dim, eps, op);
}
#endif

#ifdef KERNEL_prompt_heads
#define WARPS 8
#define HEADS_EACH 2
#ifdef STRATA_HIP  // where conditions of lanes take scalar registers, which are few
#define VALUES_AT_ONCE 1
#else
#define VALUES_AT_ONCE 8
#endif

// PARTS * 32 elements of a head, of which lane i of a warp holds i, i + 32, ...: those that turn
// together are the same lane's.
template <int PARTS>
DEV void turn_heads(float* q, float* k, const float* v, const float* q_gain, const float* k_gain,
                    const float* cos, const float* sin, const int* positions, const Place* places,
                    u32* status, i64 layer_offset, int heads, int kv_heads, int width, float eps,
                    int op) {
  const int dim = 32 * PARTS, HALF = PARTS / 2;
  int lane = threadIdx.x & 31, token = blockIdx.y;
  int head = blockIdx.x * WARPS * HEADS_EACH + (threadIdx.x >> 5);
  float c[HALF], s[HALF];
#pragma unroll
  for (int n = 0; n < HALF; n++) {
    c[n] = cos[(size_t)token * (dim / 2) + lane + 32 * n];
    s[n] = sin[(size_t)token * (dim / 2) + lane + 32 * n];
  }
  for (int turn = 0; turn < HEADS_EACH && head < heads + kv_heads; turn++, head += WARPS) {
    bool key = head >= heads;
    int of_kind = key ? head - heads : head;
    float* x = (key ? k : q) + ((size_t)token * (key ? kv_heads : heads) + of_kind) * dim + lane;
    const float* gain = key ? k_gain : q_gain;
    float e[PARTS];
#pragma unroll
    for (int n = 0; n < PARTS; n++) e[n] = x[32 * n];
    if (gain) {
      float a = 0.f, b = 0.f;
#pragma unroll
      for (int n = 0; n < PARTS; n += 2) a = fma_(e[n], e[n], a), b = fma_(e[n + 1], e[n + 1], b);
      float factor = div_(1.f, sqrt_(add(div_(fold64_of_pair(a, b), (float)dim), eps)));
#pragma unroll
      for (int n = 0; n < PARTS; n++) e[n] = mul(mul(e[n], factor), gain[lane + 32 * n]);
    }
#pragma unroll
    for (int n = 0; n < HALF; n++) {
      float a = e[n], b = e[n + HALF];
      x[32 * n] = e[n] = fma_(-b, s[n], mul(a, c[n]));
      x[32 * (n + HALF)] = e[n + HALF] = fma_(b, c[n], mul(a, s[n]));
    }
    if (!key) continue;
    const Place& place = places[token];
    size_t to = (size_t)(layer_offset + positions[token]) * width + of_kind * dim + lane;
    const float* value = v + ((size_t)token * kv_heads + of_kind) * dim + lane;
    bool good = true;
#pragma unroll
    for (int n = 0; n < PARTS; n++)
      good = keep((Stored*)place.k, (u16*)place.k_scales, to + 32 * n, e[n]) && good;
#pragma unroll(VALUES_AT_ONCE)
    for (int n = 0; n < PARTS; n++)
      good = keep((Stored*)place.v, (u16*)place.v_scales, to + 32 * n, value[32 * n]) && good;
    if (!good) latch(status, op);
  }
}

KERNEL(32 * WARPS)
prompt_heads(float* q, float* k, const float* v, const float* q_gain, const float* k_gain,
             const float* cos, const float* sin, const int* positions, const Place* places,
             u32* status, i64 layer_offset, int tokens, int heads, int kv_heads, int head_dim, int half,
             int width, float eps, int op) {
  follow();
#define TURN(parts)                                                                              \
  turn_heads<parts>(q, k, v, q_gain, k_gain, cos, sin, positions, places, status, layer_offset, heads, \
                    kv_heads, width, eps, op)
  if (head_dim == 64) TURN(2);
  else if (head_dim == 128) TURN(4);
  else TURN(8);
}
#endif
