/* A `libcuda.so.1` without a GPU: the virtual memory of CUDA's driver over the host's, and its rules.
 *
 * NVIDIA's `cuda-bindings` load it as they load the real one, so that what we pass through them is seen by C as a GPU's
 * driver sees it. Names, values and structures are those of cuda.h. Where the driver lets something pass that we never
 * want (memory that is released while it is mapped), this one is stricter.
 *
 * Functions that begin with `host_` are for tests. One thread at a time.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };
enum { GRANULARITY = 2 << 20, MOST = 4096, NAMES_BYTES = 1 << 16 };
enum { PINNED = 1, ON_DEVICE = 1, READ_WRITE = 3, HAS_VMM = 102, HAS_RDMA_WITH_VMM = 110 };

typedef int CUresult;
typedef uint64_t CUdeviceptr;
typedef struct { int type, id; } Location;
typedef struct {
    int type, requested_handle_types;
    Location location;
    void *win32;
    struct { unsigned char compression, gpu_direct_rdma_capable; unsigned short usage; unsigned char reserved[4]; } flags;
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;

typedef struct { int file; size_t size; int is_rdma_capable; } Handle;    /* `file` 0: none; index + 1 is the handle */
typedef struct { CUdeviceptr address; size_t size; uint64_t handle; int is_readable; } Range;

static Handle handles[MOST];
static Range reserved[MOST], mapped[MOST]; /* `size` 0: none */
static Range pending[MOST];                /* what kernels that have not ended read and write; `size` 0: none */
static size_t free_bytes;
static int can_remap, is_initialized, fail_in, num_failures;
static char names[NAMES_BYTES];
static __thread void *context;

/* For tests ------------------------------------------------------------------------------------------------------- */

/* Of a test: how much may be allocated from here on. What is allocated already stays with those who have it. */
void host_begin(size_t memory_bytes, int remaps) {
    free_bytes = memory_bytes, can_remap = remaps, fail_in = -1, num_failures = 0, names[0] = 0, context = NULL;
    memset(pending, 0, sizeof pending);
}

/* A kernel that uses this range runs from here on, until someone waits for the device. */
void host_launch(CUdeviceptr address, size_t size) {
    for (int i = 0; i < MOST; i++)
        if (!pending[i].size) {
            pending[i] = (Range){address, size, 0, 0};
            return;
        }
}

/* The call of a cuMem function that comes after `calls` others fails, and so do the next `times` - 1. */
void host_fail(int calls, int times) { fail_in = calls, num_failures = times; }

/* Names of the cuMem functions that were called, each with a blank behind it. */
char *host_names(void) { return names; }

static int count(const Range *ranges) {
    int n = 0;
    for (int i = 0; i < MOST; i++) n += ranges[i].size != 0;
    return n;
}

int host_num_reserved(void) { return count(reserved); }

int host_num_mapped(void) { return count(mapped); }

int host_num_handles(void) {
    int n = 0;
    for (int i = 0; i < MOST; i++) n += handles[i].file != 0;
    return n;
}

/* Handle behind an address that may be read and written; 0: it may not. */
uint64_t host_readable(CUdeviceptr address) {
    for (int i = 0; i < MOST; i++)
        if (mapped[i].address <= address && address < mapped[i].address + mapped[i].size)
            return mapped[i].is_readable ? mapped[i].handle : 0;
    return 0;
}

int host_is_rdma_capable(uint64_t handle) { return handles[handle - 1].is_rdma_capable; }

/* Of a device ------------------------------------------------------------------------------------------------------ */

CUresult cuInit(unsigned flags) {
    is_initialized = flags == 0;
    return is_initialized ? OK : INVALID_VALUE;
}

CUresult cuDeviceGet(int *device, int ordinal) {
    if (!is_initialized) return NOT_INITIALIZED;
    *device = ordinal;
    return ordinal == 0 ? OK : INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == HAS_VMM ? can_remap : attribute == HAS_RDMA_WITH_VMM;
    return device == 0 ? OK : INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxRetain(void **found, int device) {
    *found = (void *)7;
    return device == 0 ? OK : INVALID_DEVICE;
}

CUresult cuCtxGetCurrent(void **found) { return *found = context, OK; }

CUresult cuCtxSetCurrent(void *given) { return context = given, OK; }

CUresult cuCtxSynchronize(void) {
    if (!context) return INVALID_CONTEXT;
    memset(pending, 0, sizeof pending);
    return OK;
}

/* Of memory -------------------------------------------------------------------------------------------------------- */

static CUresult called(const char *name) {
    if (strlen(names) + strlen(name) + 2 < sizeof names) strcat(strcat(names, name), " ");
    if (!is_initialized) return NOT_INITIALIZED;
    if (fail_in < 0 || fail_in-- > 0) return OK;
    fail_in = --num_failures > 0 ? 0 : -1;
    return OUT_OF_MEMORY;
}

#define CALLED()                        \
    do {                                \
        CUresult why = called(__func__); \
        if (why) return why;            \
    } while (0)
#define CALLED_IN_CONTEXT()                  \
    do {                                     \
        CALLED();                            \
        if (!context) return INVALID_CONTEXT; \
    } while (0)

static Range *unused(Range *ranges) {
    for (int i = 0; i < MOST; i++)
        if (!ranges[i].size) return &ranges[i];
    return NULL;
}

/* Makes `size` bytes from `address` mean nothing, but keeps them reserved. */
static int make_empty(CUdeviceptr address, size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    return mmap((void *)address, size, PROT_NONE, flags, -1, 0) == MAP_FAILED ? INVALID_VALUE : OK;
}

CUresult cuMemGetAllocationGranularity(size_t *found, const AllocationProp *prop, int option) {
    CALLED();
    *found = GRANULARITY;
    return prop->type == PINNED && prop->location.type == ON_DEVICE && prop->location.id == 0 && option == 0 ? OK : INVALID_VALUE;
}

CUresult cuMemCreate(uint64_t *handle, size_t size, const AllocationProp *prop, unsigned long long flags) {
    CALLED();
    if (prop->type != PINNED || prop->location.type != ON_DEVICE || prop->location.id != 0 || flags) return INVALID_VALUE;
    if (!size || size % GRANULARITY) return INVALID_VALUE;
    if (size > free_bytes) return OUT_OF_MEMORY;
    for (int i = 0; i < MOST; i++)
        if (!handles[i].file) {
            int file = memfd_create("libcuda", MFD_CLOEXEC);
            if (file <= 0 || ftruncate(file, size)) return OUT_OF_MEMORY;
            handles[i] = (Handle){file, size, prop->flags.gpu_direct_rdma_capable};
            free_bytes -= size, *handle = i + 1;
            return OK;
        }
    return OUT_OF_MEMORY;
}

CUresult cuMemRelease(uint64_t handle) {
    CALLED();
    if (!handle || handle > MOST || !handles[handle - 1].file) return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (mapped[i].size && mapped[i].handle == handle) return INVALID_VALUE; /* the driver would keep it until then */
    close(handles[handle - 1].file);
    free_bytes += handles[handle - 1].size, handles[handle - 1].file = 0;
    return OK;
}

CUresult cuMemAddressReserve(CUdeviceptr *found, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    CALLED_IN_CONTEXT();
    if (!size || size % GRANULARITY || alignment || hint || flags) return INVALID_VALUE;
    Range *range = unused(reserved);
    char *whole = mmap(NULL, size + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!range || whole == MAP_FAILED) return OUT_OF_MEMORY;
    char *aligned = (char *)(((uintptr_t)whole + GRANULARITY - 1) / GRANULARITY * GRANULARITY);
    if (aligned > whole) munmap(whole, aligned - whole);
    munmap(aligned + size, whole + GRANULARITY - aligned);
    *range = (Range){(CUdeviceptr)aligned, size, 0, 0}, *found = range->address;
    return OK;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CALLED_IN_CONTEXT();
    for (int i = 0; i < MOST; i++)
        if (mapped[i].size && address <= mapped[i].address && mapped[i].address < address + size) return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (reserved[i].address == address && reserved[i].size == size && size) {
            munmap((void *)address, size);
            reserved[i].size = 0;
            return OK;
        }
    return INVALID_VALUE;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
    CALLED_IN_CONTEXT();
    int is_reserved = 0;
    for (int i = 0; i < MOST; i++)
        is_reserved |= reserved[i].size && reserved[i].address <= address && address + size <= reserved[i].address + reserved[i].size;
    for (int i = 0; i < MOST; i++)
        if (mapped[i].size && mapped[i].address < address + size && address < mapped[i].address + mapped[i].size) return INVALID_VALUE;
    if (!is_reserved || !handle || handle > MOST || !handles[handle - 1].file) return INVALID_VALUE;
    if (handles[handle - 1].size != size || offset || flags || address % GRANULARITY) return INVALID_VALUE;
    Range *range = unused(mapped);
    void *place = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle - 1].file, 0);
    if (!range || place == MAP_FAILED) return OUT_OF_MEMORY;
    *range = (Range){address, size, handle, 0};
    return OK;
}

/* Whether mappings make up exactly this range. */
static int is_whole(CUdeviceptr address, size_t size) {
    size_t found = 0;
    for (int i = 0; i < MOST; i++) {
        if (!mapped[i].size || mapped[i].address + mapped[i].size <= address || address + size <= mapped[i].address) continue;
        if (mapped[i].address < address || address + size < mapped[i].address + mapped[i].size) return 0;
        found += mapped[i].size;
    }
    return size && found == size;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const AccessDesc *access, size_t num) {
    CALLED_IN_CONTEXT();
    if (num != 1 || access->location.type != ON_DEVICE || access->location.id != 0 || access->flags != READ_WRITE) return INVALID_VALUE;
    if (!is_whole(address, size) || mprotect((void *)address, size, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (address <= mapped[i].address && mapped[i].address < address + size) mapped[i].is_readable = 1;
    return OK;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CALLED_IN_CONTEXT();
    for (int i = 0; i < MOST; i++) /* the driver would do it, and the kernel end with an illegal address */
        if (pending[i].size && address < pending[i].address + pending[i].size && pending[i].address < address + size) return ILLEGAL_ADDRESS;
    if (!is_whole(address, size) || make_empty(address, size)) return INVALID_VALUE;
    for (int i = 0; i < MOST; i++)
        if (address <= mapped[i].address && mapped[i].address < address + size) mapped[i].size = 0;
    return OK;
}

/* How the bindings find functions ---------------------------------------------------------------------------------- */

CUresult cuGetProcAddress_v2(const char *symbol, void **found, int version, uint64_t flags, int *status) {
    static void *self;
    (void)version, (void)flags;
    Dl_info info;
    if (!self && dladdr((void *)&cuGetProcAddress_v2, &info)) self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *found = strncmp(symbol, "cu", 2) ? NULL : dlsym(self, symbol);
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}

CUresult cuGetProcAddress(const char *symbol, void **found, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, found, version, flags, NULL);
}
