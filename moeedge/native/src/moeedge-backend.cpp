// The ggml backend: context struct in backend-instance.h, ops in graph-compute.cpp; backend, device, registry and large pages of
// the CPU's buffers here.
//
// Takes     by offload scope (moeedge_offload_scope): no operation, the MoE blocks, or every operation of the CPU.
// Forwards  the graph's nodes to an inner CPU backend instance, the experts' matmuls with kernels of ours that give the same bits
//           (kernel-choice.h): results are bit-identical to stock's. Expert ids and router weights are
//           read from memory, in these nodes or after the graph. With an expert
//           cache attached the experts of a block run on its device and on the CPU.
// Identical weights, buffers and kernels: the device reports the CPU's buffer type and accepts the same operations and
//           buffers as the CPU, repacked weights included.
// Errors    no exception passes to ggml: each entry point returns a status, null or false instead.

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#if defined(__linux__)
#    include <sys/mman.h>
#    include <unistd.h>
#endif

#include "backend-instance.h"
#include "cache-device.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

namespace moeedge {

// stock's GPU backends offload host weights from this batch size on (GGML_OP_OFFLOAD_MIN_BATCH's default)
static constexpr int64_t offload_min_tokens = 32;

static instance * instance_of(ggml_backend_t backend) {
    return (instance *) backend->context;
}

// backend interface

template <typename T> static const char * get_name(T) {
    return "MOEEDGE";
}

static void backend_free(ggml_backend_t backend) {
    instance * self = instance_of(backend);
    instances_remove(self);
    remove_cache(self, self->cache.get());
    remove_cache(self, self->ram.get());
    ggml_backend_free(self->cpu);
    delete self;
    delete backend;
}

// text of the exception that a driver threw inside our backend, empty: none; a status alone does not tell the caller of
// llama_decode that the context must not be freed
std::string & driver_exception() {
    static thread_local std::string text;
    return text;
}

// the status of `call`, or that of the exception which it throws
template <typename F> static enum ggml_status guarded(F call) {
    try {
        return call();
    } catch (const std::bad_alloc &) {
        return GGML_STATUS_ALLOC_FAILED;
    } catch (const std::exception & error) {
        GGML_LOG_ERROR("moeedge: %s\n", error.what());
        driver_exception() = error.what();
        return GGML_STATUS_FAILED;
    } catch (...) {
        driver_exception() = "unknown exception";
        return GGML_STATUS_FAILED;
    }
}

// Where a GPU computed an input of ours, its copy is only queued here; graph_compute waits once for all of them. The buffers of
// other types than the GPU's own (split ones, say) are left to ggml, which copies at once.
static bool backend_cpy_tensor_async(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    const ggml_backend_buffer_t buffer = src->view_src ? src->view_src->buffer : src->buffer;
    ggml_backend_dev_t          dev    = ggml_backend_get_device(from);
    if (from == to || from->iface.get_tensor_async == nullptr || dev == nullptr || !is_gpu(dev) || is_rpc(dev) || buffer == nullptr ||
        ggml_backend_buffer_get_type(buffer) != ggml_backend_get_default_buffer_type(from) || ggml_backend_buffer_is_host(buffer) ||
        !ggml_are_same_layout(src, dst)) {
        return false;
    }
    try {
        instance_of(to)->arriving.push_back({ from, src, dst });
    } catch (const std::bad_alloc &) {
        return false;
    }
    ggml_backend_tensor_get_async(from, src, dst->data, 0, ggml_nbytes(src));
    return true;
}

// Forgets inputs that nobody waited for: another graph may give their copies to other values.
static void drop_arriving(instance * self) {
    for (const arriving_tensor & each : self->arriving) {
        try {
            ggml_backend_synchronize(each.from);
        } catch (const std::exception &) { // the device is lost: no copy is under way any more
        }
    }
    self->arriving.clear();
}

static enum ggml_status compute_or_fail(instance * self, ggml_cgraph * graph) {
    if (self->optimize_status != GGML_STATUS_SUCCESS) { // the allocator does not keep the tensors that we read
        return std::exchange(self->optimize_status, GGML_STATUS_SUCCESS);
    }
    return guarded([&] { return compute_graph(self, graph); });
}

static enum ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    instance *             self   = instance_of(backend);
    const enum ggml_status status = compute_or_fail(self, graph);
    drop_arriving(self); // it has none after success
    return status;
}

static void backend_graph_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    instance *             self   = instance_of(backend);
    const enum ggml_status status = guarded([&] {
        optimize_graph(self, graph, params);
        return GGML_STATUS_SUCCESS;
    });
    if (status != GGML_STATUS_SUCCESS) {
        self->optimize_status = status;
    }
}

// no synchronize: graph_compute ends when all is done; Vulkan copies from such backends at once
static const ggml_backend_i backend_i = [] { // members by name: their number differs between versions of ggml
    ggml_backend_i iface{};
    iface.get_name         = get_name;
    iface.free             = backend_free;
    iface.cpy_tensor_async = backend_cpy_tensor_async;
    iface.graph_compute    = backend_graph_compute;
    iface.graph_optimize   = backend_graph_optimize;
    return iface;
}();

static ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x6f, 0x65, 0x65, 0x64, 0x67, 0x65, 0x01, 0x9b, 0x52, 0x4e, 0xc7, 0x11, 0x8a, 0xd0, 0x33 };
    return &guid;
}

// llama.cpp calls these two for every backend whose registry offers them
static void backend_set_n_threads(ggml_backend_t backend, int n_threads) {
    instance * self = instance_of(backend);
    self->n_threads = n_threads;
    set_n_threads(self->cpu, n_threads);
    self->matmuls.set_n_threads(n_threads);
    if (self->hybrid) {
        self->hybrid->set_n_threads(n_threads);
    }
}

static void backend_set_abort_callback(ggml_backend_t backend, ggml_abort_callback callback, void * data) {
    instance * self = instance_of(backend);
    if (self->set_cpu_abort) {
        self->set_cpu_abort(self->cpu, callback, data);
    }
    self->abort      = callback;
    self->abort_data = data;
}

// device interface

static const char * device_get_description(ggml_backend_dev_t) {
    return "Mixture-of-Experts blocks, placed by moeedge";
}

static void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    // the device has no memory of its own: weights stay where llama.cpp put them
    *free  = 0;
    *total = 0;
}

static enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

static void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps = {};
    // as the CPU's: llama.cpp maps the file into our buffers only if the device allows it
    props->caps.buffer_from_host_ptr = true;
    props->caps.mmap_support         = true;
}

static ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) try {
    auto self     = std::make_unique<instance>();
    auto backend  = std::make_unique<ggml_backend>();
    self->creator = std::this_thread::get_id();
    self->cpu_dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    self->cpu     = self->cpu_dev ? ggml_backend_dev_init(self->cpu_dev, nullptr) : nullptr;
    if (self->cpu == nullptr) {
        GGML_LOG_ERROR("moeedge: this process has no ggml CPU backend\n");
        return nullptr;
    }
    self->set_cpu_abort = (ggml_backend_set_abort_callback_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(self->cpu_dev), "ggml_backend_set_abort_callback");
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t found = ggml_backend_dev_get(i);
        self->has_gpu |= is_gpu(found) && !is_rpc(found); // llama.cpp never computes on a remote worker of ours
    }
    self->device         = *dev;
    self->device.context = self.get();
    *backend             = {
        /* .guid    = */ backend_guid(),
        /* .iface   = */ backend_i,
        /* .device  = */ &self->device,
        /* .context = */ self.get(),
    };
    instances_add(self.get());
    self.release(); // backend_free deletes both
    return backend.release();
} catch (const std::exception & error) {
    GGML_LOG_ERROR("moeedge: %s\n", error.what());
    return nullptr;
}

// of an instance: its activations' type. llama.cpp asks the registered device for the type of weights
static ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    const instance * self = (const instance *) dev->context;
    return self ? self->buft : ggml_backend_cpu_buffer_type();
}

static ggml_backend_buffer_t device_buffer_from_host_ptr(ggml_backend_dev_t, void * ptr, size_t size, size_t) {
    return ggml_backend_cpu_buffer_from_ptr(ptr, size);
}

// from this number of tokens on, a GPU of llama.cpp may take a block
static int64_t big_batch_tokens(const instance * self) {
    const expert_cache * cache = self->cache.get();
    if (self->ram && !self->ram->is_lost()) {
        return INT64_MAX; // others would read the mapped file
    }
    if (cache == nullptr || cache->is_lost()) {
        return offload_min_tokens;
    }
    if (cache->prefill_path.load() != MOEEDGE_PREFILL_PATH_CPU) {
        return INT64_MAX;
    }
    return self->phase == MOEEDGE_PHASE_PREFILL ? offload_min_tokens : cache->prefill_tokens_min.load();
}

static bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    const instance * self = (const instance *) dev->context;
    if (self == nullptr) {
        return false; // the registered device does not compute: its instances do
    }
    switch (self->offload_scope.load(std::memory_order_relaxed)) {
        case MOEEDGE_OFFLOAD_SCOPE_ALL:
            break;
        case MOEEDGE_OFFLOAD_SCOPE_MOE:
            if (!is_block_node(op)) {
                return false;
            }
            // a GPU computes large batches from host weights, but only if no device above the CPU takes them; ggml fails
            // where a backend has nothing but the empty last block of a batch without outputs
            if (self->has_gpu && (ggml_is_empty(op) || block_node_tokens(op) >= big_batch_tokens(self))) {
                return false;
            }
            break;
        default:
            return false;
    }
    return ggml_backend_dev_supports_op(self->cpu_dev, op);
}

static bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
    const instance * self = (const instance *) dev->context;
    return self ? ggml_backend_dev_supports_buft(self->cpu_dev, buft) : ggml_backend_buft_is_host(buft);
}

static const ggml_backend_device_i device_i = [] { // members by name: their number differs between versions of ggml
    ggml_backend_device_i iface{};
    iface.get_name             = get_name;
    iface.get_description      = device_get_description;
    iface.get_memory           = device_get_memory;
    iface.get_type             = device_get_type;
    iface.get_props            = device_get_props;
    iface.init_backend         = device_init_backend;
    iface.get_buffer_type      = device_get_buffer_type;
    iface.buffer_from_host_ptr = device_buffer_from_host_ptr;
    iface.supports_op          = device_supports_op;
    iface.supports_buft        = device_supports_buft;
    return iface;
}();

// registry interface

static size_t reg_get_device_count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t reg_get_device(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device device = {
        /* .iface   = */ device_i,
        /* .reg     = */ reg,
        /* .context = */ nullptr,
    };
    return &device;
}

static void * reg_get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
        return (void *) backend_set_n_threads;
    }
    if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
        return (void *) backend_set_abort_callback;
    }
    return nullptr;
}

static const ggml_backend_reg_i reg_i = {
    /* .get_name         = */ get_name,
    /* .get_device_count = */ reg_get_device_count,
    /* .get_device       = */ reg_get_device,
    /* .get_proc_address = */ reg_get_proc_address,
};

// large pages

#if defined(__linux__)

// surely holds a page of 2 MiB
static constexpr size_t large_bytes_min = 4 << 20;

static decltype(ggml_backend_buffer_type_i::alloc_buffer) cpu_alloc_buffer;

static ggml_backend_buffer_t alloc_in_large_pages(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = cpu_alloc_buffer(type, size);
    if (buffer && size >= large_bytes_min) {
        const uintptr_t page  = (uintptr_t) sysconf(_SC_PAGESIZE);
        const uintptr_t begin = (uintptr_t) ggml_backend_buffer_get_base(buffer);
        const uintptr_t first = (begin + page - 1) / page * page;
        madvise((void *) first, begin + size - first, MADV_HUGEPAGE);
    }
    return buffer;
}

#endif

// Pages of 2 MiB for every later buffer of the CPU of 4 MiB and more, where the system has them: repacked weights, slots and KV
// caches; mapped files and pinned memory are not of the CPU's buffer type. Fewer pages are looked up, which virtual machines do
// twice. Gigabytes of slots take thousands of page faults instead of millions.
static void use_large_pages() {
#if defined(__linux__)
    static std::once_flag once;
    std::call_once(once, [] { // buffers of repacked weights are made of those of this type
        ggml_backend_buffer_type_i & iface = ggml_backend_cpu_buffer_type()->iface;
        cpu_alloc_buffer                   = iface.alloc_buffer;
        iface.alloc_buffer                 = alloc_in_large_pages;
    });
#endif
}

ggml_backend_reg_t backend_reg() {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ reg_i,
        /* .context     = */ nullptr,
    };
    use_large_pages();
    return &reg;
}

} // namespace moeedge
