// Preloaded by python -m tests.fuzz fault: the n-th large allocation, or the n-th read of a model or trace, fails.
//
// Nothing fails before fault_arm(kind, n); fault_count() says how many calls of that kind there were since. Small allocations are left
// alone: nothing in the C library or the interpreter survives the failure of each. So are those of functions of ggml that use the
// memory unchecked.
//
//   cc -shared -fPIC -o fault_shim.so fault_shim.c -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { NONE, ALLOCATIONS, READS };
static const size_t least_bytes = 64 << 10;

static atomic_int  armed_kind;
static atomic_long fails_at, n_calls;

void fault_arm(int kind, long n) {
    atomic_store(&n_calls, 0);
    atomic_store(&fails_at, n);
    atomic_store(&armed_kind, kind);
}

long fault_count(void) {
    return atomic_load(&n_calls);
}

static int fails(int kind) {
    return atomic_load(&armed_kind) == kind && atomic_fetch_add(&n_calls, 1) + 1 == atomic_load(&fails_at);
}

static int is_checked(const void * caller) {
    Dl_info about;
    return !dladdr(caller, &about) || about.dli_sname == NULL || strcmp(about.dli_sname, "ggml_backend_sched_new") != 0;
}

static int lacks_memory(size_t bytes, const void * caller) {
    if (bytes < least_bytes || atomic_load(&armed_kind) != ALLOCATIONS || !is_checked(caller) || !fails(ALLOCATIONS)) {
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

// a regular file of the cases, not the interpreter's own
static int is_input(int file) {
    char    name[64], target[512];
    ssize_t n;
    if (atomic_load(&armed_kind) != READS) {
        return 0;
    }
    snprintf(name, sizeof(name), "/proc/self/fd/%d", file);
    n = readlink(name, target, sizeof(target) - 1);
    if (n <= 0) {
        return 0;
    }
    target[n] = 0;
    return strstr(target, ".gguf") || strstr(target, ".npz");
}

static int cannot_read(int file) {
    if (!is_input(file) || !fails(READS)) {
        return 0;
    }
    errno = EIO;
    return 1;
}

// the next definition of the function with this name
#define NEXT(name)                                         \
    static __typeof__(name) * next;                        \
    if (!next) {                                           \
        next = (__typeof__(name) *) dlsym(RTLD_NEXT, #name); \
    }

// dlsym allocates with calloc, in glibc by way of its own symbol
extern void * __libc_calloc(size_t n, size_t size);
extern void * __libc_malloc(size_t bytes);
extern void * __libc_realloc(void * from, size_t bytes);

void * malloc(size_t bytes) {
    return lacks_memory(bytes, __builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void * calloc(size_t n, size_t size) {
    return lacks_memory(n * size, __builtin_return_address(0)) ? NULL : __libc_calloc(n, size);
}

void * realloc(void * from, size_t bytes) {
    return lacks_memory(bytes, __builtin_return_address(0)) ? NULL : __libc_realloc(from, bytes);
}

int posix_memalign(void ** out, size_t alignment, size_t bytes) {
    NEXT(posix_memalign)
    return lacks_memory(bytes, __builtin_return_address(0)) ? ENOMEM : next(out, alignment, bytes);
}

void * aligned_alloc(size_t alignment, size_t bytes) {
    NEXT(aligned_alloc)
    return lacks_memory(bytes, __builtin_return_address(0)) ? NULL : next(alignment, bytes);
}

void * mmap(void * at, size_t bytes, int protection, int flags, int file, off_t offset) {
    NEXT(mmap)
    if (file < 0 ? lacks_memory(bytes, __builtin_return_address(0)) : cannot_read(file)) {
        return (void *) -1;
    }
    return next(at, bytes, protection, flags, file, offset);
}

ssize_t read(int file, void * out, size_t bytes) {
    NEXT(read)
    return cannot_read(file) ? -1 : next(file, out, bytes);
}

ssize_t pread(int file, void * out, size_t bytes, off_t offset) {
    NEXT(pread)
    return cannot_read(file) ? -1 : next(file, out, bytes, offset);
}

ssize_t pread64(int file, void * out, size_t bytes, off64_t offset) {
    NEXT(pread64)
    return cannot_read(file) ? -1 : next(file, out, bytes, offset);
}

size_t fread(void * out, size_t size, size_t n, FILE * file) {
    NEXT(fread)
    return cannot_read(fileno(file)) ? 0 : next(out, size, n, file);
}
