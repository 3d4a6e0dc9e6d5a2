// Uploader: writes experts from the model's files into slots, with a backend instance of its own.
//
// Host memory (emulated): read straight into the slot. Devices with streams: through a ring of staging chunks, pinned where
// offered, so that reading a chunk overlaps with the transfer of the ones before. Remote workers: chunk by chunk, each
// acknowledged before the next, since computation shares the connection, first come first served.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "pool.h"
#include "source.h"

namespace moeedge {

class uploader {
  public:
    // transfers with `backend`; all that is given must outlive the uploader
    uploader(const cache_device & device, ggml_backend_t backend, const expert_source & source, const expert_layout & layout,
             const slot_pools & pools);
    ~uploader();
    uploader(const uploader &)             = delete;
    uploader & operator=(const uploader &) = delete;

    // allocates the staging ring; false if there is no memory
    bool allocate();
    // to be called before each chunk for a remote worker: the place to wait until the connection is free
    void set_courtesy(std::function<void()> call) { courtesy = std::move(call); }

    // starts to write `n` experts that follow each other to slots that do; a ticket for wait, or -1 where its file cannot be read (what was sent before
    // stays valid). Waits where the ring is full.
    int64_t send(int layer, int expert, int slot, int n = 1);
    // until what was sent up to the ticket has arrived
    void wait(int64_t ticket);

    int    depth() const; // experts that are worth sending before one is waited for
    size_t staging_bytes() const;
    bool   is_unpinned() const { return unpinned; } // the device offers pinned memory, and the host had none

  private:
    struct chunk {
        char *               data  = nullptr;
        ggml_backend_event_t event = nullptr; // null: the device has none
        int64_t              sent  = 0;       // ticket of what it carries
    };

    bool send_role(int layer, int role, int expert, int slot, int n);
    void send_and_wait(const chunk & c, size_t size, ggml_tensor * pool, size_t offset);
    bool send_piece(int layer, int role, int expert, size_t begin, size_t size, ggml_tensor * pool, size_t offset);

    const cache_device &  device;
    ggml_backend_t        backend;
    const expert_source & source;
    const expert_layout & layout;
    const slot_pools &    pools;

    std::function<void()> courtesy = [] {};
    ggml_backend_buffer_t buffer   = nullptr;
    bool                  unpinned = false;
    std::vector<chunk>    chunks;
    size_t                chunk_bytes = 0;
    int64_t               n_sent      = 0; // tickets: pieces sent so far
    int64_t               n_arrived   = 0;
};

} // namespace moeedge
