// Pages of 2 MiB for weights, slots and KV caches in host memory.
//
// The processor reads ahead up to the end of a page, and looks each page up: large ones are read faster, the more so in virtual
// machines. Gigabytes of slots take thousands of page faults instead of millions.

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

// surely holds such a page
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
