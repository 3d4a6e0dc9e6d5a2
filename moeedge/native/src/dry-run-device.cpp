// Dry-run device: a GPU for planning, on which llama.cpp lays out a model that is loaded without weights.
//
// Takes     every operation, and large batches from host weights, as ggml's CUDA backend does.
// Holds     no memory: its buffers have sizes only. It must never compute.
// Identical to CUDA's: alignment, padding of quantised rows, its own host buffer type, the batch size from which it takes
//           operations; so that weights, KV cache and compute buffers get the sizes that they have there.

#include <new>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "moeedge.h"

namespace moeedge {

static constexpr size_t  alignment          = 128;
static constexpr int64_t row_padding        = 512; // weights; of quantised rows
static constexpr int64_t offload_min_tokens = 32;

// an address that is never read or written
static void * const no_memory = (void *) 0x1000;

static ggml_backend_dev_t dry_run_gpu();

// buffers

static void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return no_memory;

    GGML_UNUSED(buffer);
}

static void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor *, const void *, size_t, size_t) {
}

static void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor *, uint8_t, size_t, size_t) {
}

static void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor *, void *, size_t, size_t) {
}

static void buffer_clear(ggml_backend_buffer_t, uint8_t) {
}

static const ggml_backend_buffer_i buffer_i = [] { // members by name: their number differs between versions of ggml
    ggml_backend_buffer_i iface{};
    iface.get_base      = buffer_get_base;
    iface.memset_tensor = buffer_memset_tensor;
    iface.set_tensor    = buffer_set_tensor;
    iface.get_tensor    = buffer_get_tensor;
    iface.clear         = buffer_clear;
    return iface;
}();

// buffer types

template <typename T> static const char * get_name(T) {
    return "DRY_RUN";
}

static const char * host_buft_get_name(ggml_backend_buffer_type_t) {
    return "DRY_RUN_Host";
}

static ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    return ggml_backend_buffer_init(buft, buffer_i, nullptr, size);
}

static size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    return alignment;
}

static size_t host_buft_get_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

static size_t buft_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    const int64_t excess = tensor->ne[0] % row_padding;
    const bool    padded = ggml_is_quantized(tensor->type) && excess != 0;
    return ggml_nbytes(tensor) + (padded ? ggml_row_size(tensor->type, row_padding - excess) : 0);
}

static bool host_buft_is_host(ggml_backend_buffer_type_t) {
    return true;
}

static ggml_backend_buffer_type make_buffer_type(const char * (*get_name)(ggml_backend_buffer_type_t), size_t (*get_alignment)(ggml_backend_buffer_type_t)) {
    ggml_backend_buffer_type type{};
    type.iface.get_name      = get_name;
    type.iface.alloc_buffer  = buft_alloc_buffer;
    type.iface.get_alignment = get_alignment;
    type.device              = dry_run_gpu();
    return type;
}

static ggml_backend_buffer_type * buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made = make_buffer_type(get_name, buft_get_alignment);
        made.iface.get_alloc_size     = buft_get_alloc_size;
        return made;
    }();
    return &type;
}

static ggml_backend_buffer_type * host_buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made = make_buffer_type(host_buft_get_name, host_buft_get_alignment);
        made.iface.is_host            = host_buft_is_host;
        return made;
    }();
    return &type;
}

// backend

static void backend_free(ggml_backend_t backend) {
    delete backend;
}

static enum ggml_status backend_graph_compute(ggml_backend_t, ggml_cgraph *) {
    return GGML_STATUS_FAILED;
}

static ggml_guid_t backend_guid() {
    static ggml_guid guid = { 0x6d, 0x6f, 0x65, 0x65, 0x64, 0x67, 0x65, 0x02, 0x1f, 0x0b, 0x93, 0x5a, 0x70, 0xd4, 0x28, 0xe6 };
    return &guid;
}

// device

static const char * device_get_name(ggml_backend_dev_t) {
    return "dry-run";
}

static const char * device_get_description(ggml_backend_dev_t) {
    return "GPU for planning";
}

static void device_get_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free  = SIZE_MAX / 2; // the plan decides what fits
    *total = SIZE_MAX / 2;
}

static enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name        = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type        = device_get_type(dev);
    props->device_id   = nullptr;
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    props->caps             = {};
    props->caps.host_buffer = true;
}

static ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    ggml_backend * backend = new (std::nothrow) ggml_backend{};
    if (backend == nullptr) {
        return nullptr;
    }
    backend->guid                = backend_guid();
    backend->iface.get_name      = get_name;
    backend->iface.free          = backend_free;
    backend->iface.graph_compute = backend_graph_compute;
    backend->device              = dev;
    return backend;
}

static ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t) {
    return buffer_type();
}

static ggml_backend_buffer_type_t device_get_host_buffer_type(ggml_backend_dev_t) {
    return host_buffer_type();
}

static bool device_supports_op(ggml_backend_dev_t, const ggml_tensor *) {
    return true;
}

static bool device_supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
    return buft == buffer_type();
}

static bool device_offload_op(ggml_backend_dev_t, const ggml_tensor * op) {
    switch (op->op) {
        case GGML_OP_GET_ROWS:
            return false;
        case GGML_OP_MUL_MAT:
            return op->ne[1] >= offload_min_tokens;
        case GGML_OP_MUL_MAT_ID:
        case GGML_OP_ROPE:
        case GGML_OP_ROPE_BACK:
            return op->ne[2] >= offload_min_tokens;
        default:
            return ggml_nrows(op) >= offload_min_tokens;
    }
}

static const ggml_backend_device_i device_i = [] {
    ggml_backend_device_i iface{};
    iface.get_name             = device_get_name;
    iface.get_description      = device_get_description;
    iface.get_memory           = device_get_memory;
    iface.get_type             = device_get_type;
    iface.get_props            = device_get_props;
    iface.init_backend         = device_init_backend;
    iface.get_buffer_type      = device_get_buffer_type;
    iface.get_host_buffer_type = device_get_host_buffer_type;
    iface.supports_op          = device_supports_op;
    iface.supports_buft        = device_supports_buft;
    iface.offload_op           = device_offload_op;
    return iface;
}();

// registry: llama.cpp asks a device for its registry; this one is never registered

static size_t reg_get_device_count(ggml_backend_reg_t) {
    return 1;
}

static ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t) {
    return dry_run_gpu();
}

// it is not registered, so that llama.cpp never chooses it
static ggml_backend_dev_t dry_run_gpu() {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ { get_name, reg_get_device_count, reg_get_device, nullptr },
        /* .context     = */ nullptr,
    };
    static ggml_backend_device device = {
        /* .iface   = */ device_i,
        /* .reg     = */ &reg,
        /* .context = */ nullptr,
    };
    return &device;
}

} // namespace moeedge

void * moeedge_dry_run_gpu(void) {
    return moeedge::dry_run_gpu();
}
