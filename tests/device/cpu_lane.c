/* A stand-in for the CPU lane: exact Q4_K experts (two planes, 8 stripes) on plain threads, only to
   measure how host memory is shared with the link. Build: gcc -O3 -march=native -ffp-contract=off
   -shared -fPIC -pthread. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SB = 144, MAX_BLOCKS = 512, RUN = 16 };
#ifndef AHEAD
#define AHEAD 2304 /* bytes that a row's prefetch runs ahead */
#endif

/* Activations of one row. xd, xs and q are in the lane order that the kernel below likes. */
typedef struct {
  int8_t q[MAX_BLOCKS / 8][2][256] __attribute__((aligned(64)));
  float d[MAX_BLOCKS] __attribute__((aligned(64)));
  float s[MAX_BLOCKS] __attribute__((aligned(64)));
} act_t;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static float half_float(uint16_t h) { return _cvtsh_ss(h); }

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define KERNEL "avx512-vnni"
static const int LANE[8] = {0, 1, 4, 5, 2, 3, 6, 7}; /* block of each vector lane */
static int q_place(int j) { /* byte of block j's first element in a plane's 256 */
  static const int at[8] = {0, 64, 32, 96, 128, 192, 160, 224};
  return at[j];
}
#elif defined(__AVX2__)
#define KERNEL "avx2"
static const int LANE[8] = {0, 1, 2, 3, 4, 5, 6, 7};
static int q_place(int j) { return j * 32; }
#else
#error "needs AVX2"
#endif

const char *lane_kernel(void) { return KERNEL; }

static void quantise(const float *x, int n, act_t *a) {
  for (int b = 0; b < n / 32; b++) {
    float m = 0;
    for (int i = 0; i < 32; i++) m = fmaxf(m, fabsf(x[b * 32 + i]));
    float d = m / 16383.f, id = 16383.f / m;
    int dead = d == 0 || isinf(id), sum = 0, lane = 0;
    for (int i = 0; i < 32; i++) {
      float r = dead ? 0 : rintf(x[b * 32 + i] * id);
      int q = (int)fminf(fmaxf(r, -16383.f), 16383.f);
      sum += q;
      a->q[b / 8][0][q_place(b % 8) + i] = (int8_t)(q >> 7);
      a->q[b / 8][1][q_place(b % 8) + i] = (int8_t)(q & 127);
    }
    while (LANE[lane] != b % 8) lane++;
    a->d[b / 8 * 8 + lane] = dead ? 0 : d;
    a->s[b / 8 * 8 + lane] = (float)sum;
  }
}

static inline void scales(const uint8_t *p, __m256 *d, __m256 *m, __m256i *sc, __m256 *mn) {
  uint32_t a, b, c;
  memcpy(&a, p + 4, 4);
  memcpy(&b, p + 8, 4);
  memcpy(&c, p + 12, 4);
  uint64_t s = (a & 0x3f3f3f3f) | (uint64_t)((c & 0x0f0f0f0f) | ((a >> 2) & 0x30303030)) << 32;
  uint64_t n = (b & 0x3f3f3f3f) | (uint64_t)(((c >> 4) & 0x0f0f0f0f) | ((b >> 2) & 0x30303030)) << 32;
  __m128i order = _mm_setr_epi8(LANE[0], LANE[1], LANE[2], LANE[3], LANE[4], LANE[5], LANE[6],
                                LANE[7], -1, -1, -1, -1, -1, -1, -1, -1);
  *sc = _mm256_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi64_si128((long long)s), order));
  *mn = _mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi64_si128((long long)n), order)));
  uint16_t h[2];
  memcpy(h, p, 4);
  *d = _mm256_set1_ps(half_float(h[0]));
  *m = _mm256_set1_ps(half_float(h[1]));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
static inline __m256i dots(const uint8_t *p, const int8_t (*q)[256]) {
  const __m512i low = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
  __m512i v[4], z[4];
  for (int i = 0; i < 2; i++) {
    __m512i w = _mm512_loadu_si512(p + 16 + i * 64);
    v[2 * i] = _mm512_and_si512(w, low);
    v[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
  }
  for (int i = 0; i < 4; i++) {
    __m512i hi = _mm512_dpbusd_epi32(zero, v[i], _mm512_load_si512(q[0] + i * 64));
    z[i] = _mm512_dpbusd_epi32(_mm512_slli_epi32(hi, 7), v[i], _mm512_load_si512(q[1] + i * 64));
  }
  __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(z[0], z[1]), _mm512_unpackhi_epi32(z[0], z[1]));
  __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(z[2], z[3]), _mm512_unpackhi_epi32(z[2], z[3]));
  a = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  __m512i even = _mm512_shuffle_i64x2(a, a, 0x08), odd = _mm512_shuffle_i64x2(a, a, 0x0d);
  return _mm512_castsi512_si256(_mm512_add_epi32(even, odd));
}
#else
static inline __m256i dots(const uint8_t *p, const int8_t (*q)[256]) {
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  __m256i z[8];
  for (int c = 0; c < 4; c++) {
    __m256i w = _mm256_loadu_si256((const __m256i *)(p + 16 + c * 32));
    __m256i v[2] = {_mm256_and_si256(w, low), _mm256_and_si256(_mm256_srli_epi16(w, 4), low)};
    for (int i = 0; i < 2; i++) {
      int j = 2 * c + i;
      __m256i h = _mm256_maddubs_epi16(v[i], _mm256_load_si256((const __m256i *)(q[0] + j * 32)));
      __m256i l = _mm256_maddubs_epi16(v[i], _mm256_load_si256((const __m256i *)(q[1] + j * 32)));
      h = _mm256_slli_epi32(_mm256_madd_epi16(h, one), 7);
      z[j] = _mm256_add_epi32(h, _mm256_madd_epi16(l, one));
    }
  }
  __m256i a = _mm256_hadd_epi32(_mm256_hadd_epi32(z[0], z[1]), _mm256_hadd_epi32(z[2], z[3]));
  __m256i b = _mm256_hadd_epi32(_mm256_hadd_epi32(z[4], z[5]), _mm256_hadd_epi32(z[6], z[7]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                          _mm256_permute2x128_si256(a, b, 0x31));
}
#endif

static float row(const uint8_t *p, int nsb, const act_t *x) {
  __m256 acc = _mm256_setzero_ps();
  for (int i = 0; i < nsb; i++, p += SB) {
    __m256 d, m, mn;
    __m256i sc;
    for (int a = 0; a < SB; a += 64) _mm_prefetch((const char *)p + AHEAD + a, _MM_HINT_T0);
    scales(p, &d, &m, &sc, &mn);
    __m256 xd = _mm256_load_ps(x->d + i * 8), xs = _mm256_load_ps(x->s + i * 8);
    __m256i s = _mm256_mullo_epi32(dots(p, x->q[i]), sc);
    acc = _mm256_fnmadd_ps(_mm256_mul_ps(mn, xs), _mm256_mul_ps(m, xd), acc);
    acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s), _mm256_mul_ps(d, xd), acc);
  }
  float lanes[8], stripe[8], t;
  _mm256_storeu_ps(lanes, acc);
  for (int i = 0; i < 8; i++) stripe[LANE[i]] = lanes[i];
  t = stripe[0];
  for (int i = 1; i < 8; i++) t += stripe[i];
  return t;
}

void lane_rows(const uint8_t *w, int rows, int k, const float *x, float *y) {
  act_t *a = aligned_alloc(64, sizeof(act_t));
  quantise(x, k, a);
  for (int r = 0; r < rows; r++) y[r] = row(w + (size_t)r * (k / 256) * SB, k / 256, a);
  free(a);
}

static float exponential(float x) {
  x = fminf(fmaxf(x, -87.f), 87.f);
  float t = x * 1.4426950408889634f, n = rintf(t), f = t - n;
  float r = 1.5403530e-4f;
  const float c[6] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f};
  for (int i = 0; i < 6; i++) r = fmaf(r, f, c[i]);
  int32_t bits;
  memcpy(&bits, &r, 4);
  bits += (int32_t)n << 23;
  memcpy(&r, &bits, 4);
  return r;
}

/* --- layers on threads ------------------------------------------------------------------------ */
typedef struct {
  const uint8_t *arena;
  long experts, blob;
  int hidden, inner, threads, picks, pin;
  double until;
  _Alignas(64) atomic_int arrived;
  _Alignas(64) atomic_int phase;
  _Alignas(64) atomic_long done;
  int stop;
  act_t *x, *hx;
  float *h, *y;
  uint64_t seed;
  long chosen[64];
  double busy;
} job_t;

typedef struct {
  job_t *job;
  int index;
} worker_t;

static void barrier(job_t *j, int *phase) {
  int next = ++*phase;
  if (atomic_fetch_add(&j->arrived, 1) == j->threads - 1) {
    atomic_store(&j->arrived, 0);
    atomic_store_explicit(&j->phase, next, memory_order_release);
  } else {
    int spins = 0;
    while (atomic_load_explicit(&j->phase, memory_order_acquire) < next) {
      _mm_pause();
      if (++spins > 20000) sched_yield();
    }
  }
}

static void draw(job_t *j) {
  for (int i = 0; i < j->picks; i++) {
    j->seed = j->seed * 6364136223846793005ull + 1442695040888963407ull;
    j->chosen[i] = (long)((j->seed >> 33) % (uint64_t)j->experts);
  }
}

static void share(long n, int parts, int part, long *a, long *b) {
  *a = n * part / parts;
  *b = n * (part + 1) / parts;
}

/* A worker of a layer: its share of all picked experts' gate and up rows, then of their down rows;
   h is quantised by whoever takes the expert's number. */
static void *worker(void *arg) {
  job_t *j = ((worker_t *)arg)->job;
  int me = ((worker_t *)arg)->index, phase = 0, F = j->inner, H = j->hidden;
  if (j->pin) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(me, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  int wide = H / 256 * SB, narrow = F / 256 * SB;
  for (;;) {
    if (me == 0) {
      draw(j);
      j->stop = seconds() > j->until;
    }
    barrier(j, &phase);
    if (j->stop) return 0;
    long a, b;
    share((long)j->picks * F, j->threads, me, &a, &b);
    for (long i = a, n; i < b; i += n) { /* runs of rows, so that each stream stays long */
      long r = i % F;
      float gate[RUN], up[RUN];
      n = b - i < RUN ? b - i : RUN;
      n = F - r < n ? F - r : n;
      const uint8_t *w = j->arena + j->chosen[i / F] * j->blob + r * wide;
      for (long k = 0; k < n; k++) gate[k] = row(w + k * wide, H / 256, j->x);
      for (long k = 0; k < n; k++) up[k] = row(w + (F + k) * wide, H / 256, j->x);
      for (long k = 0; k < n; k++) j->h[i + k] = gate[k] / (1.f + exponential(-gate[k])) * up[k];
    }
    barrier(j, &phase);
    for (int k = me; k < j->picks; k += j->threads) quantise(j->h + k * F, F, j->hx + k);
    barrier(j, &phase);
    share((long)j->picks * H, j->threads, me, &a, &b);
    for (long i = a; i < b; i++) {
      const uint8_t *w = j->arena + j->chosen[i / H] * j->blob + 2L * F * wide + (i % H) * narrow;
      j->y[i] = row(w, F / 256, j->hx + i / H);
    }
    barrier(j, &phase);
    if (me == 0) atomic_fetch_add(&j->done, 1);
  }
}

/* Runs layers of `picks` random experts for `run` seconds; returns GB/s of expert bytes. */
double lane_bandwidth(const uint8_t *arena, long experts, long blob, int hidden, int inner,
                      int threads, int picks, double run, int pin, double *layer_us) {
  job_t *j = aligned_alloc(64, (sizeof(job_t) + 63) / 64 * 64);
  memset(j, 0, sizeof *j);
  j->arena = arena, j->experts = experts, j->blob = blob, j->hidden = hidden, j->inner = inner;
  j->threads = threads, j->picks = picks, j->pin = pin, j->seed = 12345;
  j->x = aligned_alloc(64, sizeof(act_t));
  j->hx = aligned_alloc(64, sizeof(act_t) * picks);
  j->h = malloc(sizeof(float) * picks * inner);
  j->y = malloc(sizeof(float) * picks * hidden);
  float *x = malloc(sizeof(float) * hidden);
  for (int i = 0; i < hidden; i++) x[i] = (float)(i * 37 % 101 - 50) / 50.f;
  quantise(x, hidden, j->x);
  pthread_t *t = malloc(sizeof(pthread_t) * threads);
  worker_t *w = malloc(sizeof(worker_t) * threads);
  double start = seconds();
  j->until = start + run;
  for (int i = 0; i < threads; i++) {
    w[i] = (worker_t){j, i};
    pthread_create(t + i, 0, worker, w + i);
  }
  for (int i = 0; i < threads; i++) pthread_join(t[i], 0);
  double took = seconds() - start;
  long layers = atomic_load(&j->done);
  *layer_us = took / (double)layers * 1e6;
  free(x), free(t), free(w), free(j->x), free(j->hx), free(j->h), free(j->y), free(j);
  return (double)layers * picks * (double)blob / took / 1e9;
}

/* Plain reads for `run` seconds: GB/s, the ceiling of the machine. */
typedef struct {
  const uint8_t *p;
  size_t n;
  double until, bytes;
  int pin;
} reader_t;
static void *reader(void *arg) {
  reader_t *r = arg;
  if (r->pin >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(r->pin, &set);
    sched_setaffinity(0, sizeof set, &set);
  }
  __m256i a = _mm256_setzero_si256();
  while (seconds() < r->until) {
    for (size_t i = 0; i + 128 <= r->n; i += 128)
      for (int k = 0; k < 4; k++)
        a = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)(r->p + i + 32 * k)));
    r->bytes += (double)r->n;
  }
  volatile int sink = _mm256_extract_epi32(a, 0);
  (void)sink;
  return 0;
}
double read_bandwidth(const uint8_t *arena, size_t n, int threads, double run, int pin) {
  pthread_t t[256];
  reader_t r[256];
  double start = seconds(), sum = 0;
  for (int i = 0; i < threads; i++) {
    size_t part = n / (size_t)threads & ~(size_t)127;
    r[i] = (reader_t){arena + part * (size_t)i, part, start + run, 0, pin ? i : -1};
    pthread_create(t + i, 0, reader, r + i);
  }
  for (int i = 0; i < threads; i++) pthread_join(t[i], 0), sum += r[i].bytes;
  return sum / (seconds() - start) / 1e9;
}
