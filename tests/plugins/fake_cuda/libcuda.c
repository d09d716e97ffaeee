// A CUDA driver with no GPU behind it: answers what cuda.core asks before a launch, and writes what it is told to $FAKE_CUDA_LOG.
//
// With it the code between Python and the driver runs for real: argument types, handles, arguments of a kernel.
// $FAKE_CUDA_ARGUMENTS: bytes of each argument of the next launch, as in "8,8,4,".
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, LAUNCH_FAILED = 719 };
enum { MULTIPROCESSORS = 16, COMPUTE_MAJOR = 75, COMPUTE_MINOR = 76 };  // CUdevice_attribute

static void note(const char* format, ...) {
  FILE* log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  __builtin_va_list values;
  __builtin_va_start(values, format);
  vfprintf(log, format, values);
  __builtin_va_end(values);
  fclose(log);
}

static int nothing(void) { return SUCCESS; }
static int driver_version(int* out) { return *out = 13000, SUCCESS; }
static int device_count(int* out) { return *out = 1, SUCCESS; }
static int device_get(int* out, int ordinal) { return *out = ordinal, SUCCESS; }
static int device_name(char* out, int size) { return snprintf(out, size, "made-up GPU"), SUCCESS; }
static int any_handle(void** out) { return *out = (void*)0xC0, SUCCESS; }
static int context_device(int* out) { return *out = 0, SUCCESS; }

static int device_attribute(int* out, int which) {
  *out = which == COMPUTE_MAJOR ? 9 : which == COMPUTE_MINOR ? 0 : which == MULTIPROCESSORS ? 132 : 1;
  return SUCCESS;
}

static int load(void** library, const char* image) {
  note("load %s\n", memcmp(image, "\x7f" "ELF", 4) ? "ptx" : "cubin");
  *library = (void*)0xA0;
  return SUCCESS;
}

static int get_kernel(void** kernel, void* library, const char* name) {
  note("kernel %s of %p\n", name, library);
  *kernel = (void*)0xD0;
  return SUCCESS;
}

static int allocate(uint64_t* out, size_t bytes, void* pool, void* stream) {
  (void)pool;
  note("allocate %zu on %p\n", bytes, stream);
  *out = 0x7000000;
  return SUCCESS;
}

static int release(uint64_t pointer) {
  note("free %llx\n", (unsigned long long)pointer);
  return SUCCESS;
}

static int fill(uint64_t pointer, unsigned char value, size_t bytes, void* stream) {
  note("fill %llx with %d, %zu on %p\n", (unsigned long long)pointer, value, bytes, stream);
  return SUCCESS;
}

static int launch(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                  void* stream, void** parameters, void** extra) {
  if (getenv("FAKE_CUDA_FAILS")) return LAUNCH_FAILED;
  note("launch %p grid %u %u %u block %u %u %u shared %u on %p extra %d ", kernel, gx, gy, gz, bx, by, bz, shared, stream, extra != 0);
  const char* sizes = getenv("FAKE_CUDA_ARGUMENTS");
  for (int argument = 0; *sizes; ++argument) {
    char* end;
    const long bytes = strtol(sizes, &end, 10);
    for (long i = 0; i < bytes; ++i) note("%02x", ((unsigned char*)parameters[argument])[i]);
    sizes = end + 1;
  }
  note("\n");
  return SUCCESS;
}

static int error_text(int error, const char** out) { return (void)error, *out = "unspecified launch failure", SUCCESS; }

static const struct { const char* name; void* function; } kFunctions[] = {
    {"cuDriverGetVersion", driver_version}, {"cuDeviceGetCount", device_count}, {"cuDeviceGet", device_get},
    {"cuDeviceGetName", device_name}, {"cuDeviceGetAttribute", device_attribute}, {"cuDevicePrimaryCtxRetain", any_handle},
    {"cuCtxGetCurrent", any_handle}, {"cuCtxGetDevice", context_device}, {"cuDeviceGetMemPool", any_handle},
    {"cuDeviceGetDefaultMemPool", any_handle}, {"cuLibraryLoadData", load}, {"cuLibraryGetKernel", get_kernel},
    {"cuMemAllocFromPoolAsync", allocate}, {"cuMemFreeAsync", release},
    {"cuMemsetD8Async", fill}, {"cuLaunchKernel", launch}, {"cuGetErrorString", error_text},
};

int cuGetProcAddress_v2(const char* name, void** out, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  if (status) *status = 0;
  *out = strcmp(name, "cuGetProcAddress") ? (void*)nothing : (void*)cuGetProcAddress_v2;
  for (size_t i = 0; i < sizeof kFunctions / sizeof *kFunctions; ++i)
    if (!strcmp(kFunctions[i].name, name)) *out = kFunctions[i].function;
  return SUCCESS;
}
