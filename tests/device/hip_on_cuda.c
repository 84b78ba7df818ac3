/* The HIP runtime and hiprtc on top of the CUDA driver, runtime and NVRTC, for tests alone: the real
 * hip-python drives the real strata-hip plugin on a machine that has no AMD device.
 *
 *   gcc -shared -fPIC -O1 -o ROCM/lib/libamdhip64.so tests/device/hip_on_cuda.c -ldl
 *   ln -s libamdhip64.so ROCM/lib/libhiprtc.so
 *
 * Only what the plugin calls is here; anything else is a missing symbol, which the binding reports.
 * No header of either vendor is needed. Numbers that HIP shares with CUDA (copy kinds, flags, most
 * errors) pass through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef void *P;

static P library(const char *variable, const char *const *names) {
  const char *given = getenv(variable);
  P found = given ? dlopen(given, RTLD_NOW | RTLD_GLOBAL) : NULL;
  for (; !found && *names; names++) found = dlopen(*names, RTLD_NOW | RTLD_GLOBAL);
  if (!found) {
    fprintf(stderr, "hip_on_cuda: %s\n", dlerror());
    abort();
  }
  return found;
}

static P symbol(int which, const char *name) {
  static P libraries[3];
  static const char *const runtime[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so", NULL};
  static const char *const driver[] = {"libcuda.so.1", NULL};
  static const char *const compiler[] = {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", NULL};
  static const char *const *const names[] = {runtime, driver, compiler};
  static const char *const variables[] = {"HIP_ON_CUDA_CUDART", "HIP_ON_CUDA_DRIVER",
                                          "HIP_ON_CUDA_NVRTC"};
  if (!libraries[which]) libraries[which] = library(variables[which], names[which]);
  P found = dlsym(libraries[which], name);
  if (!found) {
    fprintf(stderr, "hip_on_cuda: no %s\n", name);
    abort();
  }
  return found;
}

/* A forwarded function: its HIP name, parameters, the CUDA name in library `which`, arguments. */
#define FORWARD(hip, parameters, which, cuda, types, arguments) \
  EXPORT int hip parameters {                                   \
    static int(*real_) types;                                   \
    if (!real_) real_ = (int(*) types)symbol(which, cuda);      \
    return real_ arguments;                                     \
  }

/* A version that knows the architecture told below; CUDA counts otherwise. */
EXPORT int hipRuntimeGetVersion(int *version) {
  *version = 60342134;
  return 0;
}

FORWARD(hipGetDeviceCount, (int *n), 0, "cudaGetDeviceCount", (int *), (n))
FORWARD(hipSetDevice, (int d), 0, "cudaSetDevice", (int), (d))
FORWARD(hipDeviceSynchronize, (void), 0, "cudaDeviceSynchronize", (void), ())
FORWARD(hipGetLastError, (void), 0, "cudaGetLastError", (void), ())
/* Kernels are CUDA's here: their clock counts nanoseconds. */
EXPORT int hipDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 1000000;
  return 0;
}
FORWARD(hipMemGetInfo, (size_t *a, size_t *b), 0, "cudaMemGetInfo", (size_t *, size_t *), (a, b))
FORWARD(hipMalloc, (P *p, size_t n), 0, "cudaMalloc", (P *, size_t), (p, n))
FORWARD(hipFree, (P p), 0, "cudaFree", (P), (p))
FORWARD(hipHostMalloc, (P *p, size_t n, unsigned f), 0, "cudaHostAlloc", (P *, size_t, unsigned),
        (p, n, f))
FORWARD(hipHostFree, (P p), 0, "cudaFreeHost", (P), (p))
FORWARD(hipHostRegister, (P p, size_t n, unsigned f), 0, "cudaHostRegister",
        (P, size_t, unsigned), (p, n, f))
FORWARD(hipHostUnregister, (P p), 0, "cudaHostUnregister", (P), (p))
FORWARD(hipHostGetDevicePointer, (P *d, P h, unsigned f), 0, "cudaHostGetDevicePointer",
        (P *, P, unsigned), (d, h, f))
FORWARD(hipStreamCreateWithFlags, (P *s, unsigned f), 0, "cudaStreamCreateWithFlags",
        (P *, unsigned), (s, f))
FORWARD(hipStreamDestroy, (P s), 0, "cudaStreamDestroy", (P), (s))
FORWARD(hipStreamSynchronize, (P s), 0, "cudaStreamSynchronize", (P), (s))
FORWARD(hipStreamWaitEvent, (P s, P e, unsigned f), 0, "cudaStreamWaitEvent", (P, P, unsigned),
        (s, e, f))
FORWARD(hipEventCreateWithFlags, (P *e, unsigned f), 0, "cudaEventCreateWithFlags",
        (P *, unsigned), (e, f))
FORWARD(hipEventDestroy, (P e), 0, "cudaEventDestroy", (P), (e))
FORWARD(hipEventRecord, (P e, P s), 0, "cudaEventRecord", (P, P), (e, s))
FORWARD(hipEventQuery, (P e), 0, "cudaEventQuery", (P), (e))
FORWARD(hipEventElapsedTime, (float *ms, P a, P b), 0, "cudaEventElapsedTime", (float *, P, P),
        (ms, a, b))
FORWARD(hipMemcpyAsync, (P t, const void *f, size_t n, int k, P s), 0, "cudaMemcpyAsync",
        (P, const void *, size_t, int, P), (t, f, n, k, s))
FORWARD(hipMemsetAsync, (P t, int v, size_t n, P s), 0, "cudaMemsetAsync", (P, int, size_t, P),
        (t, v, n, s))
FORWARD(hipStreamBeginCapture, (P s, int m), 0, "cudaStreamBeginCapture", (P, int), (s, m))
FORWARD(hipStreamEndCapture, (P s, P *g), 0, "cudaStreamEndCapture", (P, P *), (s, g))
FORWARD(hipGraphInstantiateWithFlags, (P *e, P g, unsigned long long f), 0,
        "cudaGraphInstantiateWithFlags", (P *, P, unsigned long long), (e, g, f))
FORWARD(hipGraphDestroy, (P g), 0, "cudaGraphDestroy", (P), (g))
FORWARD(hipGraphExecDestroy, (P g), 0, "cudaGraphExecDestroy", (P), (g))
FORWARD(hipGraphLaunch, (P g, P s), 0, "cudaGraphLaunch", (P, P), (g, s))
FORWARD(hipModuleLoadData, (P *m, const void *c), 1, "cuModuleLoadData", (P *, const void *),
        (m, c))
FORWARD(hipModuleUnload, (P m), 1, "cuModuleUnload", (P), (m))
FORWARD(hipModuleGetFunction, (P *f, P m, const char *n), 1, "cuModuleGetFunction",
        (P *, P, const char *), (f, m, n))

/* cuLaunchKernel's `extra` has the same marks but for its end, 3 here and 0 there. */
EXPORT int hipModuleLaunchKernel(P f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, P stream, P *params,
                                 P *extra) {
  typedef int (*Launch)(P, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, P,
                        P *, P *);
  static Launch launch;
  if (!launch) launch = (Launch)symbol(1, "cuLaunchKernel");
  P given[5] = {extra[0], extra[1], extra[2], extra[3], NULL};
  return launch(f, gx, gy, gz, bx, by, bz, shared, stream, params, given);
}

/* hipDeviceProp_tR0600: the plugin reads these fields, at the offsets that hip-python has for them. */
enum { PROPERTIES = 1472, TOTAL = 288, WARP = 308, UNITS = 388, ARCHITECTURE = 1160 };

static int attribute(int which, int device) {
  typedef int (*Get)(int *, int, int);
  int value = 0;
  ((Get)symbol(0, "cudaDeviceGetAttribute"))(&value, which, device);
  return value;
}

EXPORT int hipGetDevicePropertiesR0600(char *facts, int device) {
  int status, handle = 0;
  size_t total = 0;
  int warp = 32, units = attribute(16, device);
  memset(facts, 0, PROPERTIES);
  if ((status = ((int (*)(unsigned))symbol(1, "cuInit"))(0))) return status;
  if ((status = ((int (*)(int *, int))symbol(1, "cuDeviceGet"))(&handle, device))) return status;
  ((int (*)(char *, int, int))symbol(1, "cuDeviceGetName"))(facts, 255, handle);
  ((int (*)(size_t *, int))symbol(1, "cuDeviceTotalMem_v2"))(&total, handle);
  memcpy(facts + TOTAL, &total, sizeof total);
  memcpy(facts + WARP, &warp, sizeof warp);
  memcpy(facts + UNITS, &units, sizeof units);
  strcpy(facts + ARCHITECTURE, "gfx1030"); /* served, and of waves of 32 as this device's are */
  return 0;
}

/* --- hiprtc on NVRTC: for this machine's first device, with HIP's own options translated -------- */
FORWARD(hiprtcVersion, (int *a, int *b), 2, "nvrtcVersion", (int *, int *), (a, b))
FORWARD(hiprtcCreateProgram,
        (P *p, const char *s, const char *n, int k, const char **h, const char **i), 2,
        "nvrtcCreateProgram", (P *, const char *, const char *, int, const char **, const char **),
        (p, s, n, k, h, i))
FORWARD(hiprtcDestroyProgram, (P *p), 2, "nvrtcDestroyProgram", (P *), (p))
FORWARD(hiprtcGetProgramLogSize, (P p, size_t *n), 2, "nvrtcGetProgramLogSize", (P, size_t *),
        (p, n))
FORWARD(hiprtcGetProgramLog, (P p, char *t), 2, "nvrtcGetProgramLog", (P, char *), (p, t))
FORWARD(hiprtcGetCodeSize, (P p, size_t *n), 2, "nvrtcGetCUBINSize", (P, size_t *), (p, n))
FORWARD(hiprtcGetCode, (P p, char *c), 2, "nvrtcGetCUBIN", (P, char *), (p, c))

EXPORT int hiprtcCompileProgram(P program, int count, const char *const *options) {
  const char *passed[16] = {"--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"};
  char architecture[64];
  int n = 4;
  for (int i = 0; i < count && n < 15; i++) {
    if (!strncmp(options[i], "-std=", 5)) passed[n++] = options[i];
  }
  snprintf(architecture, sizeof architecture, "--gpu-architecture=sm_%d%d", attribute(75, 0),
           attribute(76, 0));
  passed[n++] = architecture;
  return ((int (*)(P, int, const char *const *))symbol(2, "nvrtcCompileProgram"))(program, n,
                                                                                   passed);
}
