/* A HIP runtime and hiprtc on host memory, for tests: everything is done at once, by the rules.
 *
 * The functions that tests steer it with begin with `stub_`: the n-th call from now on, or the n-th
 * of one name, answers a status; what is alive is counted. One kernel exists, `add_rows`.
 * OLD_LIBRARY leaves out what HIP 5 had not, WITHOUT_GRAPHS a verb.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
typedef void *P;

enum { DEVICES = 2, MEMORY = 1 << 30, MOST = 4096, STEPS = 64 };
enum { INVALID = 1, OOM = 2, NO_DEVICE = 101, HANDLE = 400, NOT_FOUND = 500, AGAIN = 712, NOT_LOCKED = 713 };
enum { BLOCK = 1, PINNED, REGISTERED, STREAM, EVENT, GRAPH, INSTANCE, MODULE, PROGRAM, KINDS };

typedef struct { int what; char *to; const char *from; size_t n; int value; } Step;
typedef struct { int count; Step steps[STEPS]; } Steps;
typedef struct { int kind, device; P at, raw; size_t n; Steps *record; } Thing;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Thing things[MOST];
static size_t used[DEVICES];
static long calls, fail_at;
static int fail_status;
static char fail_name[64], last_name[64];
static __thread int device, last;

/* --- steering ------------------------------------------------------------------------------- */
EXPORT void stub_fail(const char *name, long nth, int status) {
  snprintf(fail_name, sizeof fail_name, "%s", name ? name : "");
  fail_at = nth;
  fail_status = status;
  calls = 0;
}
EXPORT long stub_calls(void) { return calls; }
EXPORT const char *stub_failed(void) { return last_name; }
EXPORT int stub_alive(int kind) {
  int count = 0;
  for (int i = 0; i < MOST; i++) count += things[i].kind == kind;
  return count;
}
EXPORT void stub_sweep(void) {
  for (int i = 0; i < MOST; i++)
    if (things[i].kind) {
      if (things[i].kind == BLOCK) used[things[i].device] -= things[i].n;
      free(things[i].raw);
      free(things[i].record);
      things[i].kind = 0;
    }
}
static char arms[DEVICES][64] = {"gfx1030", "gfx90a:sramecc+:xnack-"};
EXPORT void stub_architecture(int d, const char *name) {
  snprintf(arms[d], sizeof arms[d], "%s", name);
}
EXPORT int stub_device(void) { return device; }

static int told(int status) {
  if (status && status != 600) last = status;
  return status;
}

static size_t ticks;

static int refuse(const char *name) {
  if (*fail_name && strcmp(fail_name, name)) return 0;
  if (++calls != fail_at) return 0;
  snprintf(last_name, sizeof last_name, "%s", name);
  return told(fail_status);
}

#define VERB(name, ...)               \
  EXPORT int name(__VA_ARGS__) {      \
    int status = refuse(#name);       \
    if (status) return status;        \
    pthread_mutex_lock(&lock);
#define END(answer)                   \
    status = (answer);                \
    pthread_mutex_unlock(&lock);      \
    return told(status);              \
  }

static Thing *thing(int kind, P at) {
  for (int i = 0; i < MOST; i++)
    if (things[i].kind == kind && things[i].at == at) return &things[i];
  return NULL;
}

static Thing *make(int kind, P at, size_t n) {
  for (int i = 0; i < MOST; i++)
    if (!things[i].kind) {
      things[i] = (Thing){kind, device, at ? at : malloc(16), NULL, n, NULL};
      things[i].raw = at ? NULL : things[i].at;
      return &things[i];
    }
  abort();
}

static int drop(int kind, P at, int otherwise) {
  Thing *found = thing(kind, at);
  if (!found) return otherwise;
  free(found->raw);
  free(found->record);
  found->kind = 0;
  return 0;
}

static int give(P *out, int kind) {
  *out = make(kind, NULL, 0)->at;
  return 0;
}

/* --- devices and memory --------------------------------------------------------------------- */
VERB(hipGetDeviceCount, int *n) *n = DEVICES; END(0)
VERB(hipRuntimeGetVersion, int *v) *v = 60443483; END(0)
VERB(hipSetDevice, int d) if (d >= 0 && d < DEVICES) device = d; END(d < 0 || d >= DEVICES ? NO_DEVICE : 0)
VERB(hipDeviceSynchronize, void) END(0)
EXPORT int hipGetLastError(void) {
  int found = last;
  last = 0;
  return found;
}
VERB(hipMemGetInfo, size_t *f, size_t *t) *t = MEMORY; *f = MEMORY - used[device]; END(0)

/* kHz of the clock that kernels read, by the number that stub.py gives the attribute */
VERB(hipDeviceGetAttribute, int *v, int a, int d) *v = a == 10017 ? 100000 : 0; END(a == 10017 ? 0 : 1)

static int take(P *p, size_t n) {
  if (n > MEMORY - used[device]) return OOM;
  Thing *made = make(BLOCK, aligned_alloc(256, (n + 511) / 256 * 256), n);
  made->raw = *p = made->at;
  used[device] += n;
  return 0;
}
VERB(hipMalloc, P *p, size_t n) END(take(p, n))

static int leave(P p) {
  Thing *found = thing(BLOCK, p);
  if (found) used[found->device] -= found->n;
  return p ? drop(BLOCK, p, INVALID) : 0;
}
VERB(hipFree, P p) END(leave(p))

static int pin(P *p, size_t n) {
  if (n > MEMORY) return OOM;
  Thing *made = make(PINNED, aligned_alloc(4096, (n + 4096) / 4096 * 4096), n);
  made->raw = *p = made->at;
  return 0;
}
VERB(hipHostMalloc, P *p, size_t n, unsigned f) END(f == 3 ? pin(p, n) : INVALID)
VERB(hipHostFree, P p) END(drop(PINNED, p, INVALID))
VERB(hipHostRegister, P p, size_t n, unsigned f) int twice = thing(REGISTERED, p) != NULL;
if (!twice && f == 3) make(REGISTERED, p, n);
END(twice ? AGAIN : f == 3 ? 0 : INVALID)
VERB(hipHostUnregister, P p) END(drop(REGISTERED, p, NOT_LOCKED))
VERB(hipHostGetDevicePointer, P *d, P h, unsigned f) int there = thing(PINNED, h) || thing(REGISTERED, h);
*d = there ? h : NULL;
END(there && !f ? 0 : INVALID)

/* --- streams, events, copies, graphs -------------------------------------------------------- */
VERB(hipStreamCreateWithFlags, P *s, unsigned f) END(f == 1 ? give(s, STREAM) : INVALID)
VERB(hipStreamDestroy, P s) END(drop(STREAM, s, HANDLE))
VERB(hipStreamSynchronize, P s) END(thing(STREAM, s) ? 0 : HANDLE)
VERB(hipStreamWaitEvent, P s, P e, unsigned f) END(thing(STREAM, s) && thing(EVENT, e) && !f ? 0 : HANDLE)
VERB(hipEventCreateWithFlags, P *e, unsigned f) END(f == 2 || !f ? give(e, EVENT) : INVALID)
VERB(hipEventDestroy, P e) END(drop(EVENT, e, HANDLE))
VERB(hipEventRecord, P e, P s) Thing *marked = thing(EVENT, e);
if (marked) marked->n = ++ticks;
END(thing(STREAM, s) && marked ? 0 : HANDLE)
VERB(hipEventElapsedTime, float *ms, P a, P b) Thing *from = thing(EVENT, a), *to = thing(EVENT, b);
if (from && to) *ms = (float)to->n - (float)from->n;
END(from && to ? 0 : HANDLE)
VERB(hipEventQuery, P e) END(thing(EVENT, e) ? 0 : HANDLE)

static void run(const Step *step) {
  if (step->what == 0) memmove(step->to, step->from, step->n);
  if (step->what == 1) memset(step->to, step->value, step->n);
  if (step->what == 2)
    for (size_t i = 0; i < step->n; i++) ((float *)step->to)[i] += ((const float *)step->from)[i];
}

static int enqueue(P s, Step step) {
  Thing *stream = thing(STREAM, s);
  if (!stream) return HANDLE;
  if (!stream->record) run(&step);
  else if (stream->record->count < STEPS) stream->record->steps[stream->record->count++] = step;
  return 0;
}
VERB(hipMemcpyAsync, P t, const void *f, size_t n, int k, P s)
END(k == 4 ? enqueue(s, (Step){0, t, f, n, 0}) : INVALID)
VERB(hipMemsetAsync, P t, int v, size_t n, P s) END(enqueue(s, (Step){1, t, NULL, n, v}))

static int begin(P s) {
  Thing *stream = thing(STREAM, s);
  if (!stream || stream->record) return HANDLE;
  stream->record = calloc(1, sizeof(Steps));
  return 0;
}
static int end(P s, P *g) {
  Thing *stream = thing(STREAM, s);
  if (!stream || !stream->record) return HANDLE;
  Thing *graph = make(GRAPH, NULL, 0);
  graph->record = stream->record;
  stream->record = NULL;
  *g = graph->at;
  return 0;
}
static int instance(P *e, P g) {
  Thing *graph = thing(GRAPH, g);
  if (!graph) return HANDLE;
  Thing *made = make(INSTANCE, NULL, 0);
  made->record = memcpy(malloc(sizeof(Steps)), graph->record, sizeof(Steps));
  *e = made->at;
  return 0;
}
VERB(hipStreamBeginCapture, P s, int m) END(m == 1 ? begin(s) : INVALID)
VERB(hipStreamEndCapture, P s, P *g) END(end(s, g))
VERB(hipGraphInstantiateWithFlags, P *e, P g, unsigned long long f) END(f ? INVALID : instance(e, g))
VERB(hipGraphDestroy, P g) END(drop(GRAPH, g, HANDLE))
VERB(hipGraphExecDestroy, P g) END(drop(INSTANCE, g, HANDLE))
#ifndef WITHOUT_GRAPHS
static int replay(P g, P s) {
  Thing *graph = thing(INSTANCE, g);
  if (!graph || !thing(STREAM, s)) return HANDLE;
  for (int i = 0; i < graph->record->count; i++) run(&graph->record->steps[i]);
  return 0;
}
VERB(hipGraphLaunch, P g, P s) END(replay(g, s))
#endif

/* --- modules and launches ------------------------------------------------------------------- */
VERB(hipModuleLoadData, P *m, const void *c) END(strcmp(c, "code") ? INVALID : give(m, MODULE))
VERB(hipModuleUnload, P m) END(drop(MODULE, m, HANDLE))
VERB(hipModuleGetFunction, P *f, P m, const char *n) *f = m;
END(!thing(MODULE, m) ? HANDLE : strcmp(n, "add_rows") ? NOT_FOUND : 0)

static int add(P f, unsigned threads, P s, P *params, P *extra) {
  struct { float *x; const float *y; int32_t rows, width; } a;
  if (!thing(MODULE, f)) return HANDLE;
  if (threads > 1024 || params || (size_t)extra[0] != 1 || (size_t)extra[2] != 2 || (size_t)extra[4] != 3)
    return INVALID;
  if (*(size_t *)extra[3] != sizeof a) return INVALID;
  memcpy(&a, extra[1], sizeof a);
  return enqueue(s, (Step){2, (char *)a.x, (const char *)a.y, (size_t)a.rows * a.width, 0});
}
VERB(hipModuleLaunchKernel, P f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
     unsigned bz, unsigned shared, P s, P *params, P *extra)
END(gx * gy * gz == 0 || shared > 65536 ? INVALID : add(f, bx * by * bz, s, params, extra))

#ifndef OLD_LIBRARY
/* hipDeviceProp_tR0600: the fields that the plugin reads, where its bindings have them. */
static int facts(char *out, int d) {
  size_t total = MEMORY;
  int warp = 32, units = 36;
  memset(out, 0, 1472);
  strcpy(out, "Stub");
  memcpy(out + 288, &total, sizeof total);
  memcpy(out + 308, &warp, sizeof warp);
  memcpy(out + 388, &units, sizeof units);
  strcpy(out + 1160, arms[d]);
  return 0;
}
VERB(hipGetDevicePropertiesR0600, char *out, int d) END(facts(out, d))
#endif

/* --- hiprtc: what fails here is a hiprtcResult ---------------------------------------------- */
VERB(hiprtcVersion, int *a, int *b) *a = 9; *b = 0; END(0)
VERB(hiprtcCreateProgram, P *p, const char *s, const char *n, int k, const char **h, const char **i)
END(s && n && !k && !h && !i ? give(p, PROGRAM) : INVALID)
VERB(hiprtcDestroyProgram, P *p) END(drop(PROGRAM, *p, INVALID))
VERB(hiprtcCompileProgram, P p, int n, const char *const *o)
END(thing(PROGRAM, p) && n && !strncmp(o[0], "--offload-arch=gfx", 18) ? 0 : 5)
VERB(hiprtcGetProgramLogSize, P p, size_t *n) *n = 12; END(0)
VERB(hiprtcGetProgramLog, P p, char *t) memcpy(t, "no such arm", 12); END(0)
VERB(hiprtcGetCodeSize, P p, size_t *n) *n = 5; END(0)
VERB(hiprtcGetCode, P p, char *c) memcpy(c, "code", 5); END(0)
