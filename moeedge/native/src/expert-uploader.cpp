#include "expert-uploader.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "timing.h"

namespace moeedge {

// A chunk takes long enough that its fixed cost, reading in several threads included, is small; a piece of it so short that a
// computation's copy, which waits for one piece, hardly notices: 10 us at 25 GB/s. A computation may have to wait for one
// remote chunk.
static constexpr size_t stream_chunk_bytes = 2u << 20;
static constexpr size_t stream_piece_bytes = 256u << 10;
static constexpr size_t remote_chunk_bytes = 512u << 10;
static constexpr size_t pinned_chunk_bytes = 4u << 20;
static constexpr int    n_stream_chunks    = 4;
// what a sleeping thread oversleeps, about
static constexpr int64_t wake_up_ns = 60 * 1000;
// a shorter wait for a transfer found it done
static constexpr int64_t least_wait_ns = 10 * 1000;
// share of a transfer's expected time that is slept through
static constexpr double slept_share = 0.75;

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
        largest = std::max(largest, group.expert_bytes);
    }
    chunk_bytes = std::min(largest, device.is_async ? stream_chunk_bytes : remote_chunk_bytes);
    piece_bytes = device.is_async ? stream_piece_bytes : chunk_bytes;
    if (source.pinned_bytes() > 0 && is_staging) {
        chunk_bytes = piece_bytes = std::min(largest, pinned_chunk_bytes); // no copy to wait for, nothing that computes meanwhile
    }
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
    filling.clear();
    n_filled             = 0;
    const size_t n_roles = layout.slices[layer].size();
    for (size_t r = 0; r < n_roles; r++) {
        if (!send_role(layer, (int) r, expert, slot, n)) {
            return -1;
        }
    }
    return flush() ? n_sent : -1;
}

// cuts the role's bytes into pieces, and sends each chunk that they fill
bool expert_uploader::send_role(int layer, int role, int expert, int slot, int n) {
    const int     group = layout.group_of[layer];
    const size_t  each  = layout.slices[layer][role].bytes;
    const size_t  bytes = each * n;
    ggml_tensor * pool  = is_staging ? pools.stage(group, role) : pools.tensor(group, role);
    const size_t  to    = slot * each;
    if (device.is_host) {
        return source.read(layer, role, expert, 0, bytes, is_staging, (char *) pool->data + to);
    }
    for (size_t begin = 0, size = 0; begin < bytes; begin += size) {
        if (n_filled == chunk_bytes && !flush()) {
            return false;
        }
        size                  = std::min({ piece_bytes, bytes - begin, chunk_bytes - n_filled });
        const char * in_file  = device.is_async ? source.pinned(layer, role, expert, begin) : nullptr;
        char *       in_chunk = chunks[n_sent % chunks.size()].data + n_filled;
        filling.push_back({ layer, role, expert, begin, size, in_file ? in_file : in_chunk, in_file ? nullptr : in_chunk, pool, to + begin });
        n_filled += size;
    }
    return true;
}

// reads the pieces into the next chunk and starts their transfer; false if the file cannot be read
bool expert_uploader::flush() {
    if (filling.empty()) {
        return true;
    }
    chunk & c = chunks[n_sent % chunks.size()];
    wait(c.sent);
    const bool is_pinned = std::all_of(filling.begin(), filling.end(), [](const piece & p) { return p.into == nullptr; });
    const bool is_read   = is_pinned || readers.run(filling.size(), n_readers.load(), [this](size_t i) {
        const piece & p = filling[i];
        return p.into == nullptr || source.read(p.layer, p.role, p.expert, p.begin, p.size, is_staging, p.into);
    });
    if (is_read) {
        c.sent    = ++n_sent;
        c.sent_ns = now_ns();
        c.size    = n_filled;
        for (const piece & p : filling) {
            if (device.is_async) {
                ggml_backend_tensor_set_async(backend, p.pool, p.from, p.offset, p.size);
            } else {
                send_and_wait(p);
            }
        }
        if (!device.is_async) {
            n_arrived = n_sent;
        } else if (c.event) {
            ggml_backend_event_record(c.event, backend);
        }
    }
    filling.clear();
    n_filled = 0;
    return is_read;
}

// ggml's client reports bytes as sent once the socket has taken them. A socket takes megabytes, and a computation would queue
// after them; reading one byte back shows that they have arrived.
void expert_uploader::send_and_wait(const piece & p) {
    yield_to_compute();
    ggml_backend_tensor_set(p.pool, p.from, p.offset, p.size);
    if (device.is_remote()) {
        char last;
        ggml_backend_tensor_get(p.pool, &last, p.offset + p.size - 1, 1);
    }
}

void expert_uploader::wait(int64_t ticket) {
    if (ticket <= n_arrived) {
        return;
    }
    const chunk & c = chunks[(ticket - 1) % chunks.size()];
    if (c.event) {
        sleep_through(c);
        const int64_t begin_ns = now_ns();
        ggml_backend_event_synchronize(c.event);
        note_arrival(c, now_ns() - begin_ns);
        n_arrived = c.sent; // a later one, if the chunk was used again since
    } else {
        ggml_backend_synchronize(backend);
        n_arrived = n_sent;
    }
}

// CUDA waits for an event in a loop that keeps a core, which the CPU's part needs. So we sleep for as long as the transfer is
// sure to take.
void expert_uploader::sleep_through(const chunk & c) {
    const int64_t begin_ns = std::max(c.sent_ns, arrival_ns);
    const int64_t left_ns  = begin_ns + (int64_t) (slept_share * ns_per_byte * (double) c.size) - now_ns() - wake_up_ns;
    if (left_ns > 0) {
        std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
    }
}

// A transfer takes at most the time until it is seen to have arrived. Where it had not arrived yet, that is its time. An estimate
// that was too long shrinks with each transfer, since only a part of it is slept through.
void expert_uploader::note_arrival(const chunk & c, int64_t waited_ns) {
    const int64_t now      = now_ns();
    const double  measured = (double) (now - std::max(c.sent_ns, arrival_ns)) / (double) c.size;
    if (measured < ns_per_byte) {
        ns_per_byte = measured;
    } else if (waited_ns > least_wait_ns) {
        ns_per_byte = ns_per_byte == 0 ? measured : ns_per_byte + (measured - ns_per_byte) / 8;
    }
    arrival_ns = now;
}

} // namespace moeedge
