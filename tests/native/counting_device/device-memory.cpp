#include "device-memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "device.h"
#include "ggml-backend.h"
#include "ggml-impl.h"
#include "transfers.h"

namespace counting {

static constexpr size_t  alignment      = 128; // these two as in ggml's CUDA backend
static constexpr int64_t row_padding    = 512;
static constexpr uint8_t unwritten_byte = 0xFF; // NaN

struct device_memory {
    char * address; // reserved: what tensors get
    char * storage; // mapped: where the bytes are
    size_t size;

    void * real(const void * at) const { return storage + ((const char *) at - address); }
};

static device_memory * memory_of(ggml_backend_buffer_t buffer) {
    return (device_memory *) buffer->context;
}

static void * map(size_t size, int protection) {
    void * at = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return at == MAP_FAILED ? nullptr : at;
}

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src ? tensor->view_src->buffer : tensor->buffer;
}

bool is_on_device(const ggml_tensor * tensor) {
    const ggml_backend_buffer_t buffer = buffer_of(tensor);
    return buffer && buffer->buft == device_buffer_type();
}

void * real_address(const ggml_tensor * tensor, const void * address) {
    return is_on_device(tensor) ? memory_of(buffer_of(tensor))->real(address) : nullptr;
}

// device buffers

static void buffer_free(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> lock(device_lock());
    device_memory *             memory = memory_of(buffer);
    operation                   op;
    op.name = "free of a buffer";
    op.writes.add(memory->address, memory->size);
    device_queue::check_host(op);
    device_queue::finish_all();
    munmap(memory->address, memory->size);
    munmap(memory->storage, memory->size);
    allocated_bytes() -= (int64_t) memory->size;
    add_record(COUNTING_FREE, 0, "", memory->size, 0);
    delete memory;
}

static void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return memory_of(buffer)->address;
}

static void transfer_now(enum counting_kind kind, const transfer & t) {
    std::lock_guard<std::mutex> lock(device_lock());
    add_record(kind, 0, t.tensor->name, t.bytes(), COUNTING_WAITS | (is_pinned(t.data) ? COUNTING_PINNED : 0));
    run_blocking(kind == COUNTING_SET ? make_set(t) : make_get(t));
}

static void buffer_set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    transfer_now(COUNTING_SET, { tensor, const_cast<void *>(data), offset, size });
}

static void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    transfer_now(COUNTING_GET, { tensor, data, offset, size });
}

static void buffer_set_tensor_2d(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size,
                                 size_t n_copies, size_t stride_tensor, size_t stride_data) {
    transfer_now(COUNTING_SET, { tensor, const_cast<void *>(data), offset, size, n_copies, stride_tensor, stride_data });
}

static void buffer_get_tensor_2d(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size,
                                 size_t n_copies, size_t stride_tensor, size_t stride_data) {
    transfer_now(COUNTING_GET, { tensor, data, offset, size, n_copies, stride_tensor, stride_data });
}

static void clear_now(const char * name, char * address, void * real, uint8_t value, size_t size) {
    std::lock_guard<std::mutex> lock(device_lock());
    add_record(COUNTING_CLEAR, 0, name, size, COUNTING_WAITS);
    run_blocking(make_fill(name, address, real, value, size));
}

static void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    char * at = (char *) tensor->data + offset;
    clear_now(tensor->name, at, real_address(tensor, at), value, size);
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    device_memory * memory = memory_of(buffer);
    clear_now("buffer", memory->address, memory->storage, value, memory->size);
}

static bool buffer_cpy_tensor(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    if (!is_on_device(src)) {
        return false;
    }
    std::lock_guard<std::mutex> lock(device_lock());
    add_record(COUNTING_COPY, 0, src->name, ggml_nbytes(src), COUNTING_WAITS);
    run_blocking(make_copy(src, dst));
    return true;
}

static const ggml_backend_buffer_i buffer_i = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ buffer_set_tensor_2d,
    /* .get_tensor_2d = */ buffer_get_tensor_2d,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

static const char * buft_get_name(ggml_backend_buffer_type_t) {
    return device_name;
}

static ggml_backend_buffer_t buft_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    std::lock_guard<std::mutex> lock(device_lock());
    const bool fits   = (int64_t) size <= memory_bytes - current_settings().other_bytes - allocated_bytes();
    auto *     memory = new device_memory{ nullptr, nullptr, std::max<size_t>(size, 1) };
    if (fits) {
        memory->address = (char *) map(memory->size, PROT_NONE);
        memory->storage = (char *) map(memory->size, PROT_READ | PROT_WRITE);
    }
    const bool is_there = memory->address && memory->storage;
    add_record(COUNTING_ALLOC, 0, "", size, is_there ? 0 : COUNTING_FAILED);
    if (!is_there) {
        GGML_LOG_ERROR("%s: no memory for %zu bytes\n", device_name, size);
        delete memory;
        return nullptr;
    }
    std::memset(memory->storage, unwritten_byte, memory->size);
    allocated_bytes() += (int64_t) memory->size;
    return ggml_backend_buffer_init(buft, buffer_i, memory, size);
}

static size_t buft_get_alignment(ggml_backend_buffer_type_t) {
    return alignment;
}

static size_t buft_get_max_size(ggml_backend_buffer_type_t) {
    std::lock_guard<std::mutex> lock(device_lock());
    return (size_t) current_settings().max_buffer_bytes;
}

static size_t buft_get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    const int64_t excess = tensor->ne[0] % row_padding;
    const bool    padded = ggml_is_quantized(tensor->type) && excess != 0;
    return ggml_nbytes(tensor) + (padded ? ggml_row_size(tensor->type, row_padding - excess) : 0);
}

ggml_backend_buffer_type_t device_buffer_type() {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ { buft_get_name, buft_alloc_buffer, buft_get_alignment, buft_get_max_size, buft_get_alloc_size, nullptr },
        /* .device  = */ the_device(),
        /* .context = */ nullptr,
    };
    return &type;
}

// pinned host memory: buffers of the CPU that are known to be pinned

static const char * pinned_get_name(ggml_backend_buffer_type_t) {
    return "COUNTING_Host";
}

static void pinned_free(ggml_backend_buffer_t buffer) {
    std::lock_guard<std::mutex> lock(device_lock());
    operation                   op;
    op.name = "free of pinned memory";
    op.writes.add(buffer->context, buffer->size);
    device_queue::check_host(op);
    device_queue::finish_all();
    remove_pinned(buffer->context);
    std::free(buffer->context);
}

static ggml_backend_buffer_t pinned_alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    void * memory = std::aligned_alloc(alignment, GGML_PAD(std::max<size_t>(size, 1), alignment));
    if (memory == nullptr) {
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, size);
    buffer->buft                 = buft;
    buffer->iface.free_buffer    = pinned_free;
    std::lock_guard<std::mutex> lock(device_lock());
    add_pinned(memory, size);
    return buffer;
}

static size_t pinned_get_alignment(ggml_backend_buffer_type_t) {
    return ggml_backend_buft_get_alignment(ggml_backend_cpu_buffer_type());
}

static bool pinned_is_host(ggml_backend_buffer_type_t) {
    return true;
}

ggml_backend_buffer_type_t pinned_buffer_type() {
    static ggml_backend_buffer_type type = {
        /* .iface   = */ { pinned_get_name, pinned_alloc_buffer, pinned_get_alignment, nullptr, nullptr, pinned_is_host },
        /* .device  = */ the_device(),
        /* .context = */ nullptr,
    };
    return &type;
}

} // namespace counting
