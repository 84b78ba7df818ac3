// The device sources on the host, to run them where no device is: stands in front of them in place
// of what portable.h names. A thread of a block is a fiber; lanes meet in shuffles, threads of a
// block in __syncthreads. Lanes of a warp that meet in different places, or that have ended, are an
// error here, as they are (silently) on a device.
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define STRATA_EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define KERNEL(threads) static void
#define signal signal_kernel  // the C library has one

struct Three {
  int x, y, z;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
static Three threadIdx, blockIdx, blockDim, gridDim;

// --- fibers ------------------------------------------------------------------------------------
#define FIBERS 1024
#define STACK (128 << 10)
static ucontext_t contexts[FIBERS];  // to start on a stack of its own; from then on by longjmp,
static jmp_buf scheduler, places[FIBERS];  // which asks nothing of the system
static bool started[FIBERS];
static char* stacks;
static int current, threads, running;
static bool ended[FIBERS], followed[FIBERS];
static unsigned long long posted[FIBERS];
static int met[FIBERS];           // the place where a fiber waits; 0 where it does not
static int arrived[FIBERS / 32], waiting;
static unsigned turn[FIBERS / 32], turns;
static char problem[200];

static void fail(const char* what, int place, int other) {
  if (!problem[0])
    snprintf(problem, sizeof problem, "%s: thread %d of block (%d, %d, %d), at %d and %d", what,
             current, blockIdx.x, blockIdx.y, blockIdx.z, place, other);
  ended[current] = true;
  running = -1;
  _longjmp(scheduler, 1);
}

static void yield_fiber() {
  if (!_setjmp(places[current])) _longjmp(scheduler, 1);
}

static __attribute__((noinline)) void resume() {
  if (_setjmp(scheduler)) return;
  if (started[current]) _longjmp(places[current], 1);
  started[current] = true;
  setcontext(&contexts[current]);
}

static int lanes_of(int warp) { return threads - warp * 32 < 32 ? threads - warp * 32 : 32; }

// All lanes of the warp are here; `place` is the line that they must share.
static void meet_warp(int place) {
  int warp = current / 32;
  unsigned mine = turn[warp];
  for (int i = warp * 32; i < warp * 32 + lanes_of(warp); i++) {
    if (ended[i]) fail("a lane has ended while others meet", place, 0);
    if (met[i] && met[i] != place) fail("lanes meet in different places", place, met[i]);
  }
  met[current] = place;
  if (++arrived[warp] == lanes_of(warp)) {
    arrived[warp] = 0;
    for (int i = warp * 32; i < warp * 32 + lanes_of(warp); i++) met[i] = 0;
    turn[warp]++;
    return;
  }
  while (turn[warp] == mine) yield_fiber();
}

// Threads that have ended are not waited for.
static void pass_block() {
  if (!waiting || waiting < running) return;
  waiting = 0;
  for (int i = 0; i < threads; i++) met[i] = 0;
  turns++;
}

static void meet_block(int place) {
  unsigned mine = turns;
  met[current] = -place;
  waiting++;
  pass_block();
  while (turns == mine) yield_fiber();
}
#define __syncthreads() meet_block(__LINE__)

template <class T>
static T exchange(T v, int source, int width, int place) {
  static_assert(sizeof(T) <= 8, "a lane's value");
  memcpy(&posted[current], &v, sizeof(T));
  meet_warp(place);
  int base = current / width * width, from = base + (source & (width - 1));
  T got;
  memcpy(&got, &posted[from], sizeof(T));
  meet_warp(place + 1000000);  // nobody posts the next value before all have read this one
  return got;
}

// --- what portable.h names ---------------------------------------------------------------------
static inline float __uint_as_float(unsigned b) {
  float f;
  memcpy(&f, &b, 4);
  return f;
}
static inline unsigned __float_as_uint(float f) {
  unsigned b;
  memcpy(&b, &f, 4);
  return b;
}
static inline float half_of(unsigned h) {
  uint16_t bits = (uint16_t)h;
  _Float16 f;
  memcpy(&f, &bits, 2);
  return (float)f;
}
static inline unsigned short to_half(float v) {
  _Float16 f = (_Float16)v;
  uint16_t bits;
  memcpy(&bits, &f, 2);
  return bits;
}
static inline unsigned to_halves(float a, float b) { return to_half(a) | (unsigned)to_half(b) << 16; }
static inline unsigned mul_halves(unsigned a, unsigned b) {
  return to_halves(half_of(a) * half_of(b), half_of(a >> 16) * half_of(b >> 16));
}
static inline unsigned sub_halves(unsigned a, unsigned b) {
  return to_halves(half_of(a) - half_of(b), half_of(a >> 16) - half_of(b >> 16));
}
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
  return c;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
template <class T>
static T atomicAdd(T* at, T v) {
  T old = *at;
  *at += v;
  return old;
}
static inline unsigned atomicMin(unsigned* at, unsigned v) {
  unsigned old = *at;
  if (v < old) *at = v;
  return old;
}
static inline void __threadfence_system() {}
static unsigned long long looks;  // the clock of waits: it ticks when it is looked at
static inline unsigned long long ticks() { return ++looks; }
static inline long long word_of_host(const long long* word) { return *(const volatile long long*)word; }
#define MEET_WARP() meet_warp(__LINE__)
static char dynamic_bytes[256 << 10] __attribute__((aligned(128)));
#define SHARED_BYTES(name) static unsigned char* const name = (unsigned char*)dynamic_bytes
#define LANE(v, source, width) exchange(v, source, width, __LINE__)
#define SWAP(v, mask, width) exchange(v, (current & 31) ^ (mask), 32, __LINE__)

// --- matrix units, with fragments as the PTX ISA tells of them. Lane 4g + t holds of A words t of
// rows g and g + 8, of their first 16 bytes and then of the second; of B word t of the first and of
// the second 16 bytes of column g; of C rows g and g + 8 of columns 2t and 2t + 1.
static unsigned fragments[FIBERS][6];

static void load_matrices(const unsigned char* base, unsigned at, unsigned* out, int place) {
  if ((size_t)(base + at) & 15) fail("a row of a matrix is not aligned", place, 0);
  posted[current] = (size_t)(base + at);
  meet_warp(place);
  int warp = current / 32 * 32, lane = current & 31;
  for (int i = 0; i < 4; i++)
    memcpy(&out[i], (const char*)posted[warp + 8 * i + lane / 4] + lane % 4 * 4, 4);
  meet_warp(place + 1000000);
}

// `halves` of 16 bytes of K: 2 for m16n8k32, 1 for m16n8k16.
static void multiply_fragments(int* c, const unsigned* a, const unsigned* b, int from, int halves,
                               int place) {
  memcpy(fragments[current], a, 8 * halves);
  memcpy(fragments[current] + 4, b, 4 * halves);
  meet_warp(place);
  int warp = current / 32 * 32, lane = current & 31;
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    c[i] = from;
    for (int k = 0; k < 16 * halves; k++) {
      int t = k % 16 / 4, half = k / 16, shift = k % 4 * 8;
      unsigned of_row = fragments[warp + row % 8 * 4 + t][2 * half + row / 8];
      unsigned of_column = fragments[warp + column * 4 + t][4 + half];
      c[i] += (int)(int8_t)(of_row >> shift) * (int)(int8_t)(of_column >> shift);
    }
  }
  meet_warp(place + 1000000);
}
static inline float half_in(unsigned word, int upper) { return half_of(word >> 16 * upper & 0xffff); }

// m16n8k16 of halves: lane 4g + t holds of A halves 2t and 2t + 1 of rows g and g + 8, of the first
// eight columns and then of the others; of B likewise, of column g. Summed as floats, ascending: a unit
// has an order of its own, which nothing here may depend on.
static void multiply_fragments_of_halves(float* c, const unsigned* a, const unsigned* b, int place) {
  memcpy(fragments[current], a, 16);
  memcpy(fragments[current] + 4, b, 8);
  meet_warp(place);
  int warp = current / 32 * 32, lane = current & 31;
  for (int i = 0; i < 4; i++) {
    int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      int t = k % 8 / 2, half = k / 8;
      unsigned of_row = fragments[warp + row % 8 * 4 + t][2 * half + row / 8];
      unsigned of_column = fragments[warp + column * 4 + t][4 + half];
      c[i] += half_in(of_row, k & 1) * half_in(of_column, k & 1);
    }
  }
  meet_warp(place + 1000000);
}

// ldmatrix with .trans: lane 4g + t holds halves 2t and 2t + 1 of column g.
static void load_turned(const unsigned char* base, unsigned at, unsigned* out, int place) {
  if ((size_t)(base + at) & 15) fail("a row of a matrix is not aligned", place, 0);
  posted[current] = (size_t)(base + at);
  meet_warp(place);
  int warp = current / 32 * 32, lane = current & 31;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 2; k++)
      memcpy((char*)&out[i] + 2 * k,
             (const char*)posted[warp + 8 * i + lane % 4 * 2 + k] + lane / 4 * 2, 2);
  meet_warp(place + 1000000);
}
#define matrices_turned(base, at, out) load_turned(base, at, out, __LINE__)
#define multiply_halves(c, a, b) multiply_fragments_of_halves(c, a, b, __LINE__)
#define matrices(base, at, out) load_matrices(base, at, out, __LINE__)
#define multiply32(c, a, b, from) multiply_fragments(c, a, b, from, 2, __LINE__)
static inline void multiply16_at(int* c, const unsigned* a, unsigned b, int from, int place) {
  multiply_fragments(c, a, &b, from, 1, place);
}
#define multiply16(c, a, b, from) multiply16_at(c, a, b, from, __LINE__)

// --- copies to shared memory that arrive late, in place of portable.h's. What is copied is what is
// there when a copy is sent (a device may read that early); until the thread has waited for its group,
// rubbish is where it goes. Only groups that were ended are waited for.
struct Sent {
  unsigned char *to, bytes[16];
  int group;
};
static std::vector<Sent> under_way[FIBERS];
static int groups[FIBERS];  // ended ones

static void send_copy(unsigned char* to, const unsigned char* from) {
  if (((size_t)to | (size_t)from) & 15) fail("a copy is not aligned", (int)((size_t)to & 15), (int)((size_t)from & 15));
  Sent sent = {to, {}, groups[current]};
  memcpy(sent.bytes, from, 16);
  memset(to, 0xff, 16);
  under_way[current].push_back(sent);
}
static void end_group() { groups[current]++; }
template <int LEFT>
static void wait_for_groups() {
  auto& sent = under_way[current];
  size_t n = 0;
  for (; n < sent.size() && sent[n].group < groups[current] - LEFT; n++)
    memcpy(sent[n].to, sent[n].bytes, 16);
  sent.erase(sent.begin(), sent.begin() + n);
}

// --- memory that the launch before this one writes: stale for each block until all of its threads
// have followed, so that who reads it before that computes with what is not there yet
struct Late {
  char* at;
  const char *stale, *fresh;
  size_t nbytes;
};
static Late late[16];
static int lates, behind;

extern "C" void set_late(int count, char** at, const char** stale, const char** fresh,
                         const size_t* nbytes) {
  lates = count;
  for (int i = 0; i < count; i++) late[i] = {at[i], stale[i], fresh[i], nbytes[i]};
}

static void before_predecessor() {
  behind = 0;
  for (int i = 0; i < lates; i++) memcpy(late[i].at, late[i].stale, late[i].nbytes);
}

static void has_followed() {
  if (followed[current]) return;
  followed[current] = true;
  if (!lates) return;
  if (++behind == threads)
    for (int i = 0; i < lates; i++) memcpy(late[i].at, late[i].fresh, late[i].nbytes);
  while (behind < threads) yield_fiber();
}

// --- launching ---------------------------------------------------------------------------------
static void (*body)();
static void start_fiber() {
  body();
  if (!followed[current]) fail("a thread ends that has not waited for what is before", 0, 0);
  if (!under_way[current].empty()) fail("a thread ends that has not waited for its copies", 0, 0);
  ended[current] = true;
  running--;
  pass_block();
  _longjmp(scheduler, 1);
}

static void start_block() {
  before_predecessor();
  running = threads;
  waiting = 0;
  memset(ended, 0, sizeof ended);
  memset(followed, 0, sizeof followed);
  memset(started, 0, sizeof started);
  memset(met, 0, sizeof met);
  memset(arrived, 0, sizeof arrived);
  for (int i = 0; i < threads; i++) {
    under_way[i].clear();
    groups[i] = 0;
    getcontext(&contexts[i]);
    contexts[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
    contexts[i].uc_stack.ss_size = STACK;
    contexts[i].uc_link = 0;
    makecontext(&contexts[i], start_fiber, 0);
  }
}

// Runs fibers in turn until all have ended, or none gets on; every other time the last one first, so
// that what one writes and another reads without meeting in between is found.
static void run_block() {
  static bool back;
  start_block();
  for (long idle = 0; running > 0;) {
    int before = running;
    unsigned long long state = turns;
    for (int i = 0; i < threads / 32 + 1; i++) state += turn[i < FIBERS / 32 ? i : 0];
    back = !back;
    for (int k = 0; k < threads && running > 0; k++) {
      int i = back ? threads - 1 - k : k;
      if (ended[i]) continue;
      current = i;
      threadIdx = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
      resume();
    }
    unsigned long long now = turns;
    for (int i = 0; i < threads / 32 + 1; i++) now += turn[i < FIBERS / 32 ? i : 0];
    idle = before == running && now == state ? idle + 1 : 0;
    if (idle > 2 && running > 0) {
      snprintf(problem, sizeof problem, "threads of block (%d, %d, %d) wait for others for ever",
               blockIdx.x, blockIdx.y, blockIdx.z);
      return;
    }
  }
}

static const char* run_grid(const int* grid, const int* block) {
  if (!stacks) stacks = (char*)malloc((size_t)FIBERS * STACK);
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  threads = block[0] * block[1] * block[2];
  problem[0] = 0;
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block();
        if (problem[0]) return problem;
      }
  return 0;
}

// --- argument blocks: each argument at its natural alignment -----------------------------------
template <class P>
static P take(const unsigned char* block, size_t& at) {
  at = (at + alignof(P) - 1) / alignof(P) * alignof(P);
  P value;
  memcpy(&value, block + at, sizeof(P));
  at += sizeof(P);
  return value;
}

template <auto F, class... P>
static const char* launch(void (*)(P...), const int* grid, const int* block,
                          const unsigned char* args) {
  static std::tuple<P...>* values;
  size_t at = 0;
  std::tuple<P...> here{take<P>(args, at)...};
  values = &here;
  body = [] { std::apply(F, *values); };
  return run_grid(grid, block);
}
