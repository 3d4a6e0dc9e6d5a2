// How llama.cpp maps model files, and which of their pages leave memory.
//
// Unread    llama.cpp maps a file with MAP_POPULATE, which reads all of it, unless the CPU's registry says that the machine has
//           several NUMA nodes (llama_model_loader::init_mappings). While a thread loads a model lazily, the registry says so
//           to this thread. Kernels ask ggml_is_numa themselves and do not notice.
// Repacked  a mapped file and its repacked weights may not fit the memory together. The kernel evicts the oldest pages first, also
//           those that are still to be repacked and those that are used without repacking, and they are read again. So once
//           repacked weights fill the room next to the file, the pages that they come from leave. The system allows that to the
//           file's owner and to who may write it.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#if defined(__linux__)
#    include <sys/mman.h>
#    include <unistd.h>
#endif

#include "c-calls.h"
#include "cache-device.h"

namespace moeedge {

static constexpr int advice_pageout = 21; // MADV_PAGEOUT, which older headers lack

// unread

using get_proc_address_f = void * (*) (ggml_backend_reg_t reg, const char * name);

static std::mutex         mutex;
static int                n_threads; // that load lazily
static get_proc_address_f original;
static thread_local bool  is_lazy;

static bool several_numa_nodes() {
    return true;
}

static void * get_proc_address(ggml_backend_reg_t reg, const char * name) {
    if (is_lazy && std::strcmp(name, "ggml_backend_cpu_is_numa") == 0) {
        return (void *) several_numa_nodes;
    }
    return original(reg, name);
}

static void set_lazy_mapping(bool on) {
    if (on == is_lazy) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_dev_t          cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_i &        iface = ggml_backend_dev_backend_reg(cpu)->iface;
    if (on && n_threads == 0) {
        original               = iface.get_proc_address;
        iface.get_proc_address = get_proc_address;
    }
    is_lazy = on;
    n_threads += on ? 1 : -1;
    if (n_threads == 0) {
        iface.get_proc_address = original;
    }
}

// repacked

static decltype(ggml_backend_buffer_type_i::alloc_buffer)       original_alloc;
static std::atomic<decltype(ggml_backend_buffer_i::set_tensor)> original_set;
static thread_local int64_t                                     room_bytes = INT64_MAX; // that repacked weights have left

static void release(const void * data, size_t size) {
#if defined(__linux__)
    const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t first = ((uintptr_t) data + page - 1) / page * page, end = ((uintptr_t) data + size) / page * page;
    if (first < end) {
        madvise((void *) first, end - first, advice_pageout); // where it fails, they stay
    }
#else
    (void) data, (void) size;
#endif
}

static void repack(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    original_set.load()(buffer, tensor, data, offset, size);
    if (room_bytes == INT64_MAX) {
        return;
    }
    room_bytes -= (int64_t) size;
    if (room_bytes < 0) {
        release(data, size);
    }
}

static ggml_backend_buffer_t alloc_repacked(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = original_alloc(type, size);
    if (buffer && (int64_t) size > room_bytes) {
        original_set             = buffer->iface.set_tensor;
        buffer->iface.set_tensor = repack;
    }
    return buffer;
}

static void set_repack_room(int64_t n_bytes) {
    static std::once_flag once;
    std::call_once(once, [] { // before the first model is loaded
        if (ggml_backend_buffer_type_t type = extra_buffer_type(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), repacked_name)) {
            original_alloc           = type->iface.alloc_buffer;
            type->iface.alloc_buffer = alloc_repacked;
        }
    });
    room_bytes = n_bytes;
}

} // namespace moeedge

int moeedge_set_lazy_mapping(int on) {
    return moeedge::guarded([on] { moeedge::set_lazy_mapping(on != 0); });
}

int moeedge_set_repack_room(int64_t n_bytes) {
    return moeedge::guarded([n_bytes] { moeedge::set_repack_room(n_bytes); });
}
