// Expert uploader: writes experts from the model's files into slots, with a backend instance of its own.
//
// Host memory (emulated): read straight into the slot. Devices with streams: through a ring of staging chunks, pinned where
// offered, so that reading a chunk overlaps with the transfer of the earlier ones; a chunk is copied in small pieces, between
// which the device's copy engine takes the copies of a computation; pinned pages of the file are sent without a chunk. Remote workers: chunk by chunk, each acknowledged before
// the next, since computation shares the connection in the order of arrival.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "expert-source.h"
#include "file-readers.h"
#include "slot-pools.h"

namespace moeedge {

class expert_uploader : no_copy {
  public:
    // transfers with `backend`, to slots or (`is_staging`) to staging slots; all that is given must outlive the uploader
    expert_uploader(const cache_device & device, ggml_backend_t backend, const expert_source & source,
                    const expert_layout & layout, const slot_pools & pools, bool is_staging);
    ~expert_uploader();

    // allocates the staging ring; false if there is no memory
    bool allocate();
    // called before each chunk for a remote worker; waits until no computation uses the connection
    void set_yield_to_compute(std::function<void()> call) { yield_to_compute = std::move(call); }
    // threads that read the file; from any thread
    void set_readers(int n) { n_readers.store(n); }

    // starts to write `n` consecutive experts to consecutive slots; returns a ticket for wait, or -1 if the file cannot be
    // read (earlier tickets stay valid). Waits while the ring is full.
    int64_t send(int layer, int expert, int slot, int n = 1);
    // waits until everything up to the ticket has arrived
    void wait(int64_t ticket);

    int    depth() const; // uploads that are started before the oldest is awaited
    size_t staging_bytes() const;
    bool   is_unpinned() const { return unpinned; } // the device offers pinned memory, and the host has none left

  private:
    // bytes of one role, from a file to a pool by way of a chunk
    struct piece {
        int           layer, role, expert;
        size_t        begin; // in the role's bytes of the expert and those that follow it
        size_t        size;
        const char *  from; // where the device reads it: in a chunk, or in pinned pages of the file
        char *        into; // the chunk's memory, null for pinned pages
        ggml_tensor * pool;
        size_t        offset; // in the pool
    };
    struct chunk {
        char *               data    = nullptr;
        ggml_backend_event_t event   = nullptr; // null: the device has none
        int64_t              sent    = 0;       // ticket of the bytes that it carries
        int64_t              sent_ns = 0;
        size_t               size    = 0;
    };

    bool send_role(int layer, int role, int expert, int slot, int n);
    bool flush();
    void send_and_wait(const piece & p);
    void sleep_through(const chunk & c);
    void note_arrival(const chunk & c, int64_t waited_ns);

    const cache_device &  device;
    ggml_backend_t        backend;
    const expert_source & source;
    const expert_layout & layout;
    const slot_pools &    pools;
    const bool            is_staging;

    std::function<void()> yield_to_compute = [] {};
    ggml_backend_buffer_t buffer   = nullptr;
    bool                  unpinned = false;
    std::vector<chunk>    chunks;
    std::vector<piece>    filling;         // pieces of the next chunk
    size_t                n_filled    = 0; // their bytes
    size_t                chunk_bytes = 0;
    size_t                piece_bytes = 0;
    int64_t               n_sent      = 0; // tickets: chunks sent so far
    int64_t               n_arrived   = 0;
    int64_t               arrival_ns  = 0; // when the last chunk was seen to have arrived
    double                ns_per_byte = 0; // of a transfer, about; 0: not known
    std::atomic<int>      n_readers{ 1 };
    file_readers          readers;
};

} // namespace moeedge
