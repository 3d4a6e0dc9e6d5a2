#include "expert-uploader.h"

#include <algorithm>

namespace moeedge {

// Large enough that the fixed cost of a transfer is small. A computation may have to wait for one remote chunk.
static constexpr size_t stream_chunk_bytes = 4u << 20;
static constexpr size_t remote_chunk_bytes = 512u << 10;
static constexpr int    n_stream_chunks    = 4;

expert_uploader::expert_uploader(const cache_device & dev, ggml_backend_t be, const expert_source & from,
                                 const expert_layout & of, const slot_pools & to, bool to_staging)
    : device(dev), backend(be), source(from), layout(of), pools(to), is_staging(to_staging) {}

expert_uploader::~expert_uploader() {
    if (device.health->is_lost()) {
        return; // transfers of its memory may still be under way
    }
    for (const chunk & c : chunks) {
        ggml_backend_event_free(c.event);
    }
    ggml_backend_buffer_free(buffer);
}

bool expert_uploader::allocate() {
    if (device.is_host) {
        return true;
    }
    size_t largest = 0;
    for (const expert_group & group : layout.groups) {
        for (const expert_role & role : group.roles) {
            largest = std::max(largest, role.bytes);
        }
    }
    chunk_bytes = std::min(largest, device.is_async ? stream_chunk_bytes : remote_chunk_bytes);
    chunks.resize(device.is_async ? n_stream_chunks : 1);
    buffer = ggml_backend_buft_alloc_buffer(device.staging_buft, chunk_bytes * chunks.size());
    if (buffer == nullptr) {
        return false;
    }
    unpinned = ggml_backend_buffer_get_type(buffer) != device.staging_buft; // ggml falls back where pinned memory is short
    for (size_t i = 0; i < chunks.size(); i++) {
        chunks[i].data = (char *) ggml_backend_buffer_get_base(buffer) + i * chunk_bytes;
        if (device.is_async) {
            chunks[i].event = ggml_backend_event_new(device.dev);
        }
    }
    return true;
}

int expert_uploader::depth() const {
    return device.is_async ? n_stream_chunks : 1;
}

size_t expert_uploader::staging_bytes() const {
    return chunk_bytes * chunks.size();
}

int64_t expert_uploader::send(int layer, int expert, int slot, int n) {
    const size_t n_roles = layout.slices[layer].size();
    for (size_t r = 0; r < n_roles; r++) {
        if (!send_role(layer, (int) r, expert, slot, n)) {
            return -1;
        }
    }
    return n_sent;
}

bool expert_uploader::send_role(int layer, int role, int expert, int slot, int n) {
    const int     group = layout.group_of[layer];
    const size_t  each  = layout.groups[group].roles[role].bytes;
    const size_t  bytes = each * n;
    ggml_tensor * pool  = is_staging ? pools.stage(group, role) : pools.tensor(group, role);
    const size_t  to    = slot * each;
    if (device.is_host) {
        return source.read(layer, role, expert, 0, bytes, (char *) pool->data + to);
    }
    for (size_t begin = 0; begin < bytes; begin += chunk_bytes) {
        const size_t size = std::min(chunk_bytes, bytes - begin);
        if (!send_piece(layer, role, expert, begin, size, pool, to + begin)) {
            return false;
        }
    }
    return true;
}

bool expert_uploader::send_piece(int layer, int role, int expert, size_t begin, size_t size, ggml_tensor * pool, size_t offset) {
    chunk & c = chunks[n_sent % chunks.size()];
    wait(c.sent);
    if (!source.read(layer, role, expert, begin, size, c.data)) {
        return false;
    }
    c.sent = ++n_sent;
    if (!device.is_async) {
        send_and_wait(c, size, pool, offset);
        n_arrived = n_sent;
        return true;
    }
    ggml_backend_tensor_set_async(backend, pool, c.data, offset, size);
    if (c.event) {
        ggml_backend_event_record(c.event, backend);
    }
    return true;
}

// ggml's client reports bytes as sent once the socket has taken them. A socket takes megabytes, and a computation would queue
// after them; reading one byte back shows that they have arrived.
void expert_uploader::send_and_wait(const chunk & c, size_t size, ggml_tensor * pool, size_t offset) {
    yield_to_compute();
    ggml_backend_tensor_set(pool, c.data, offset, size);
    if (device.is_remote()) {
        char last;
        ggml_backend_tensor_get(pool, &last, offset + size - 1, 1);
    }
}

void expert_uploader::wait(int64_t ticket) {
    if (ticket <= n_arrived) {
        return;
    }
    const chunk & c = chunks[(ticket - 1) % chunks.size()];
    if (c.event) {
        ggml_backend_event_synchronize(c.event);
        n_arrived = c.sent; // a later one, if the chunk was used again since
    } else {
        ggml_backend_synchronize(backend);
        n_arrived = n_sent;
    }
}

} // namespace moeedge
