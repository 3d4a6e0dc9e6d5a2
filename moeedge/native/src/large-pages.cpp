#include "large-pages.h"

#include <cstdint>
#include <mutex>

#include "ggml-backend-impl.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace moeedge {

#if defined(__linux__)

static constexpr size_t large_page = 2 << 20;

static ggml_backend_buffer_t (*original)(ggml_backend_buffer_type_t buft, size_t size);

static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = original(buft, size);
    if (buffer != nullptr && size >= large_page) {
        const uintptr_t begin = (uintptr_t) ggml_backend_buffer_get_base(buffer);
        const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t first = (begin + page - 1) / page * page;
        madvise((void *) first, begin + size - first, MADV_HUGEPAGE); // a system without them goes on with small ones
    }
    return buffer;
}

void use_large_pages() {
    static std::once_flag once;
    std::call_once(once, [] {
        ggml_backend_buffer_type_i & iface = ggml_backend_cpu_buffer_type()->iface;
        original                           = iface.alloc_buffer;
        iface.alloc_buffer                 = alloc_buffer;
    });
}

#else

void use_large_pages() {}

#endif

} // namespace moeedge
