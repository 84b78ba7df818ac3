// HIP's device words in the compiler's own builtins, for a compiler without ROCm's headers and
// libraries: enough to compile the device sources as a check, and to see registers and spills.
#pragma once
#define __HIP_PLATFORM_AMD__ 1
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#define __align__(n) __attribute__((aligned(n)))
typedef __SIZE_TYPE__ size_t;

#define WORD static __device__ __forceinline__
#define PLACE(name, a, b, c)                                                     \
  struct name##_of {                                                                   \
    __declspec(property(get = get_x)) unsigned x;                                      \
    __declspec(property(get = get_y)) unsigned y;                                      \
    __declspec(property(get = get_z)) unsigned z;                                      \
    __device__ __forceinline__ unsigned get_x() const { return a; }                    \
    __device__ __forceinline__ unsigned get_y() const { return b; }                    \
    __device__ __forceinline__ unsigned get_z() const { return c; }                    \
  };                                                                                   \
  extern const __device__ __attribute__((weak)) name##_of name;
PLACE(threadIdx, __builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(),
      __builtin_amdgcn_workitem_id_z())
PLACE(blockIdx, __builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(),
      __builtin_amdgcn_workgroup_id_z())
PLACE(blockDim, __builtin_amdgcn_workgroup_size_x(), __builtin_amdgcn_workgroup_size_y(),
      __builtin_amdgcn_workgroup_size_z())
PLACE(gridDim, __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(),
      __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(),
      __builtin_amdgcn_grid_size_z() / __builtin_amdgcn_workgroup_size_z())

WORD float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
WORD unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
WORD int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
WORD float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
WORD double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
WORD long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }

WORD float rintf(float x) { return __builtin_rintf(x); }
WORD float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
WORD float fminf(float a, float b) { return __builtin_fminf(a, b); }
WORD float fabsf(float x) { return __builtin_fabsf(x); }
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};

WORD void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
WORD void __threadfence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
WORD void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

WORD int lane_of_wave() {
  int low = __builtin_amdgcn_mbcnt_lo(~0u, 0);
  return __builtin_amdgcn_wavefrontsize() == 64 ? __builtin_amdgcn_mbcnt_hi(~0u, low) : low;
}
WORD int __shfl(int v, int source, int width) {
  int self = lane_of_wave();
  return __builtin_amdgcn_ds_bpermute(((source & (width - 1)) + (self & ~(width - 1))) << 2, v);
}
WORD int __shfl_xor(int v, int mask, int width) {
  int self = lane_of_wave(), to = self ^ mask;
  return __builtin_amdgcn_ds_bpermute((to >= ((self + width) & ~(width - 1)) ? self : to) << 2, v);
}
WORD unsigned __shfl(unsigned v, int s, int w) { return (unsigned)__shfl((int)v, s, w); }
WORD unsigned __shfl_xor(unsigned v, int s, int w) { return (unsigned)__shfl_xor((int)v, s, w); }
WORD float __shfl(float v, int s, int w) {
  return __int_as_float(__shfl(__float_as_int(v), s, w));
}
WORD float __shfl_xor(float v, int s, int w) {
  return __int_as_float(__shfl_xor(__float_as_int(v), s, w));
}

template <class T> WORD T atomicAdd(T* at, T v) {
  return __hip_atomic_fetch_add(at, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T> WORD T atomicMin(T* at, T v) {
  return __hip_atomic_fetch_min(at, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
#undef WORD
#undef PLACE
