// What CUDA and HIP call differently, and nothing else. No header is included, so that the run-time
// compilers need no include path.
#ifndef STRATA_PORTABLE_H
#define STRATA_PORTABLE_H

#if defined(__HIP__) || defined(__HIPCC__) || defined(__HIP_PLATFORM_AMD__) || defined(__HIP_PLATFORM_HCC__)
#define STRATA_HIP
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__

#if defined(STRATA_EMULATED)
// A test runs the sources on the host and has its own words for these in front.
#elif defined(STRATA_HIP)
#define KERNEL(threads) extern "C" __global__ __launch_bounds__(threads) void
#else
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define ROOMY(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#endif
// Blocks of weights that a lane reads ahead, of one row and of gate and up together, floats that it
// reads ahead, and tiles of values that attention does. On AMD more would take more registers than
// there are: a condition of a lane is a mask there, in scalar registers.
#if defined(STRATA_HIP)
#define AHEAD 2
#define PAIRS_AHEAD 1
#define FLOATS_AHEAD 8
#define TILES_AHEAD 4
#else
#define AHEAD 4
#define PAIRS_AHEAD 2
#define FLOATS_AHEAD 16
#define TILES_AHEAD 8
#endif
#ifndef ROOMY  // a kernel whose registers count for more than blocks beyond so many side by side
#define ROOMY(threads, blocks) KERNEL(threads)
#endif

// --- floats: every operation by name, each one rounding to nearest, so that nothing is contracted.
// AMD's __fsqrt_rn and __fdiv_rn may be the native approximations; its plain operators are correctly
// rounded unless the compiler is told otherwise.
#ifdef STRATA_HIP
#pragma clang fp contract(off)
DEV float add(float a, float b) { return a + b; }
DEV float sub(float a, float b) { return a - b; }
DEV float mul(float a, float b) { return a * b; }
DEV float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEV float div_(float a, float b) { return a / b; }
DEV float sqrt_(float a) { return __builtin_sqrtf(a); }
#else
DEV float add(float a, float b) { return __fadd_rn(a, b); }
DEV float sub(float a, float b) { return __fadd_rn(a, -b); }
DEV float mul(float a, float b) { return __fmul_rn(a, b); }
DEV float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEV float div_(float a, float b) { return __fdiv_rn(a, b); }
DEV float sqrt_(float a) { return __fsqrt_rn(a); }
#endif
DEV float float_of(u32 bits) { return __uint_as_float(bits); }
DEV u32 bits_of(float x) { return __float_as_uint(x); }
DEV bool finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
DEV float largest(float a, float b) { return a > b ? a : b; }

// --- halves
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
DEV float half_of(u32 h) {
  union { u16 u; _Float16 f; } x;
  x.u = (u16)h;
  return (float)x.f;
}
DEV u16 to_half(float v) {
  union { u16 u; _Float16 f; } x;
  x.f = (_Float16)v;
  return x.u;
}
#else
DEV float half_of(u32 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)h));
  return f;
}
DEV u16 to_half(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
#endif

// Two halves in a word, the first one below: made from floats, and what two such words give.
#if !defined(STRATA_HIP) && !defined(STRATA_EMULATED)
#if __CUDA_ARCH__ >= 800
DEV u32 to_halves(float a, float b) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
  return both;
}
#else
DEV u32 to_halves(float a, float b) { return to_half(a) | (u32)to_half(b) << 16; }
#endif
DEV u32 mul_halves(u32 a, u32 b) {
  u32 both;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}
DEV u32 sub_halves(u32 a, u32 b) {
  u32 both;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
}
#endif

// --- lanes: groups of 8 and of 32 neighbouring threads, whatever a wave is
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
#define LANE(v, source, width) __shfl(v, source, width)
#define SWAP(v, mask, width) __shfl_xor(v, mask, width)
#else
#define LANE(v, source, width) __shfl_sync(~0u, v, source, width)
#define SWAP(v, mask, width) __shfl_xor_sync(~0u, v, mask, width)
#endif

// The largest of 32 neighbours' values, and their sum, on every one of them.
#if !defined(STRATA_HIP) && !defined(STRATA_EMULATED) && __CUDA_ARCH__ >= 800
DEV u32 most_of(u32 v) { return __reduce_max_sync(~0u, v); }
DEV int sum_of(int v) { return (int)__reduce_add_sync(~0u, (u32)v); }
#else
DEV u32 most_of(u32 v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) {
    u32 other = SWAP(v, o, 32);
    v = other > v ? other : v;
  }
  return v;
}
DEV int sum_of(int v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += SWAP(v, o, 32);
  return v;
}
#endif

// --- the thread's number, read anew wherever it is asked for: what follows from it is made again and
// need not stay in registers meanwhile
#if defined(STRATA_HIP) || defined(STRATA_EMULATED)
DEV int thread_now() { return threadIdx.x; }
#else
DEV int thread_now() {
  int i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
#endif

// --- one group of 32: what its threads wrote to shared memory is there for all of them
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
#define MEET_WARP()                                    \
  do {                                                 \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
    __builtin_amdgcn_wave_barrier();                   \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
  } while (0)
#else
#define MEET_WARP() __syncwarp()
#endif

// --- dynamic shared memory
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
#define SHARED_BYTES(name) extern __shared__ __attribute__((aligned(128))) u8 name[]
#else
#define SHARED_BYTES(name) extern __shared__ __align__(128) u8 name[]
#endif

// --- early starts: a kernel that is launched early may read weights, and what the kernel before its
// predecessor wrote; it writes nothing; then it waits here. The sign for the next kernel stands behind
// the wait, which is what makes the second half of that true. A plain launch passes through. Every
// kernel comes here, in every block, whatever it has to do.
DEV void follow() {
#if defined(STRATA_EMULATED)
  has_followed();
#elif !defined(STRATA_HIP) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- 16 bytes to shared memory; both places are multiples of 16. All that a thread sent has arrived
// once `copies_done` returns but for the last LEFT groups, each ended by `copies_sent`.
#if !defined(STRATA_HIP) && !defined(STRATA_EMULATED) && __CUDA_ARCH__ >= 800
DEV void copy16(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)),
               "l"(from)
               : "memory");
}
DEV void copies_sent() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
DEV void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#else
DEV void copy16(u8* to, const u8* from) { *(int4*)to = *(const int4*)from; }
DEV void copies_sent() {}
template <int LEFT>
DEV void copies_done() {}
#endif

// --- integers: four signed bytes times four signed bytes, added to c
#if defined(STRATA_HIP)
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__) || \
    defined(__gfx940__) || defined(__gfx941__) || defined(__gfx1011__) || defined(__gfx1012__) || \
    defined(__gfx1030__) || defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1033__) || \
    defined(__gfx1034__) || defined(__gfx1035__) || defined(__gfx1036__)
DEV int dot4(int a, int b, int c) { return __builtin_amdgcn_sdot4(a, b, c, false); }
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || \
    defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__) || \
    defined(__gfx1152__) || defined(__gfx1153__) || defined(__gfx1200__) || defined(__gfx1201__)
DEV int dot4(int a, int b, int c) { return __builtin_amdgcn_sudot4(true, a, true, b, c, false); }
#else
#define STRATA_PLAIN_DOT4
#endif
#elif __CUDA_ARCH__ >= 610 || defined(STRATA_EMULATED)
DEV int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
#else
#define STRATA_PLAIN_DOT4
#endif
#ifdef STRATA_PLAIN_DOT4
DEV int dot4(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += (int)(i8)(a >> i) * (int)(i8)(b >> i);
  return c;
}
#endif

// --- the same number, which the compiler does not know to be the same: what is made from it is made
// anew here and not kept from before in registers that are scarce
DEV int fresh(int v) {
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+r"(v));
#endif
  return v;
}

// --- the same address, likewise; and one that was read from a table, told to be of the device's memory
// (or of memory that the device sees) by counting from an argument
#if defined(STRATA_EMULATED) || defined(STRATA_HIP)
DEV const u8* fresh_pointer(const u8* p) { return p; }
DEV const u8* counted_from(const void*, u64 p) { return (const u8*)p; }
#else
DEV const u8* fresh_pointer(const u8* p) {
  asm volatile("" : "+l"(p));
  return p;
}
DEV const u8* counted_from(const void* argument, u64 p) {
  u64 by = p - (u64)argument;
  asm volatile("" : "+l"(by));
  return (const u8*)argument + by;
}
#endif

// --- matrix units: a warp multiplies 16 rows of signed bytes by 8 columns of them. A fragment is what
// a lane holds: with g = lane / 4 and t = lane % 4, of the rows word t of rows g and g + 8, of the
// columns word t of column g, each a word of 16 bytes; of the result rows g and g + 8 of columns 2t
// and 2t + 1. Every lane of the warp comes here.
//
// `matrices`: lane 8i + r says where row r of matrix i (16 bytes, aligned) begins, counted from `base`
// in shared memory; out[i] is word t of row g of matrix i.
// `multiply32`: a and b of 32 bytes a row, the second halves behind the first; `multiply16`: of 16.
// The sums begin at `from`. `matrices_turned` gives columns for rows: out[i] is halves 2t and 2t + 1 of
// column g of matrix i. `multiply_halves`: rows of 16 halves, added to c as floats, in the unit's order.
// Other devices have none of these, nor the kernels that call them.
#if defined(STRATA_EMULATED)
#elif !defined(STRATA_HIP) && __CUDA_ARCH__ >= 750
DEV void matrices(const u8* base, u32 at, u32* out) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"((u32)__cvta_generic_to_shared(base) + at)
               : "memory");
}
DEV void matrices_turned(const u8* base, u32 at, u32* out) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"((u32)__cvta_generic_to_shared(base) + at)
               : "memory");
}
#if __CUDA_ARCH__ >= 800
DEV void multiply_halves(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEV void multiply32(int* c, const u32* a, const u32* b, int from) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(from));
}
DEV void multiply16(int* c, const u32* a, u32 b, int from) {
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, "
      "{%7,%7,%7,%7};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b), "r"(from));
}
#else
DEV void multiply_half_of_halves(float* c, const u32* a, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}
DEV void multiply_halves(float* c, const u32* a, const u32* b) {
  multiply_half_of_halves(c, a, b[0]), multiply_half_of_halves(c, a + 2, b[1]);
}
DEV void multiply_eight(int* c, u32 a, u32 b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a), "r"(b));
}
DEV void multiply16(int* c, const u32* a, u32 b, int from) {
  c[0] = c[1] = c[2] = c[3] = from;
  multiply_eight(c, a[0], b), multiply_eight(c + 2, a[1], b);
}
DEV void multiply32(int* c, const u32* a, const u32* b, int from) {
  multiply16(c, a, b[0], from);
  multiply_eight(c, a[2], b[1]), multiply_eight(c + 2, a[3], b[1]);
}
#endif
#endif

// A value that all threads of a block have alike, told so: AMD keeps what follows from it in scalar
// registers, instead of one for each lane and a mask for each condition.
#ifdef STRATA_HIP
DEV int alike(int v) { return __builtin_amdgcn_readfirstlane(v); }
#else
DEV int alike(int v) { return v; }
#endif

// Bytes 4..7 of which the selector's nibbles choose four: what two words hold, byte by byte.
#ifdef STRATA_HIP
DEV u32 choose(u32 low, u32 high, u32 nibbles) {
  u64 both = (u64)high << 32 | low;
  u32 out = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) out |= (u32)((both >> 8 * (nibbles >> 4 * i & 7)) & 255) << 8 * i;
  return out;
}
#else
DEV u32 choose(u32 low, u32 high, u32 nibbles) { return __byte_perm(low, high, nibbles); }
#endif

// --- a line that is asked for long before it is read
DEV void prefetch(const void* p) {
#if !defined(STRATA_HIP) && !defined(STRATA_EMULATED)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// --- one of `parts` equal parts of many lines of 128 bytes that are asked for long before they are
// read; all threads of a block come here, a block for each part
DEV void prefetch_part(const u8* from, int lines, int part, int parts) {
  int each = (lines + parts - 1) / parts, begin = part * each;
  int count = lines - begin < each ? lines - begin : each;
#if defined(STRATA_EMULATED) || defined(STRATA_HIP)
#elif __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0 && count > 0)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + (size_t)begin * 128),
                 "r"(count * 128)
                 : "memory");
#else
  for (int i = threadIdx.x; i < count; i += blockDim.x) prefetch(from + ((size_t)begin + i) * 128);
#endif
}

// --- 32 bits of two words, from bit `from` of the lower one on; 32 gives the upper one
DEV u32 slide(u32 low, u32 high, u32 from) {
#if defined(STRATA_HIP) || defined(STRATA_EMULATED)
  return (u32)(((u64)high << 32 | low) >> from);
#else
  return __funnelshift_rc(low, high, from);
#endif
}

// --- memory that others see
DEV void fence_system() { __threadfence_system(); }

// --- what a thread needs that waits for the host: a word of the host's memory, behind which this
// thread sees what the host wrote before it; and a clock, whose rate the runtime tells.
#if defined(STRATA_EMULATED)
#elif defined(STRATA_HIP)
DEV i64 word_of_host(const i64* word) {
  return __hip_atomic_load(word, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEV u64 ticks() {
#if defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || \
    defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__) || \
    defined(__gfx1152__) || defined(__gfx1153__) || defined(__gfx1200__) || defined(__gfx1201__)
  return __builtin_amdgcn_s_sendmsg_rtnl(0x83);
#else
  return __builtin_amdgcn_s_memrealtime();
#endif
}
#else
DEV i64 word_of_host(const i64* word) {
  i64 v;
  asm volatile("ld.acquire.sys.global.s64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
DEV u64 ticks() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
#endif

DEV void latch(u32* status, int op) { atomicMin(status, (u32)op); }

#endif
