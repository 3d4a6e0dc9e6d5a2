// Pages of 2 MiB for repacked weights, slots and KV caches; mapped files and pinned memory are not of the CPU's buffer type.
//
// Fewer pages are looked up, which virtual machines do twice. Gigabytes of slots take thousands of page faults instead of millions.

#include "large-pages.h"

#if defined(__linux__)
#    include <sys/mman.h>
#    include <unistd.h>
#endif

#include <cstdint>
#include <mutex>

#include "ggml-backend-impl.h"

namespace moeedge {

#if defined(__linux__)

// surely holds a page of 2 MiB
static constexpr size_t bytes_min = 4 << 20;

static decltype(ggml_backend_buffer_type_i::alloc_buffer) original;

static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = original(type, size);
    if (buffer && size >= bytes_min) {
        const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t begin = (uintptr_t) ggml_backend_buffer_get_base(buffer);
        const uintptr_t first = (begin + page - 1) / page * page;
        madvise((void *) first, begin + size - first, MADV_HUGEPAGE);
    }
    return buffer;
}

// buffers of repacked weights are made of those of this type
void use_large_pages() {
    static std::once_flag once;
    std::call_once(once, [] {
        ggml_backend_buffer_type_i & iface = ggml_backend_cpu_buffer_type()->iface;
        original                           = iface.alloc_buffer;
        iface.alloc_buffer                 = allocate;
    });
}

#else

void use_large_pages() {}

#endif

} // namespace moeedge
