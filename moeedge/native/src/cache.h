// The expert cache of one session: slot pools on a device, which expert lies in which slot, and the thread that moves them.
//
// Groups   layers whose experts have the same tensors (role, type, shape) form a group. A slot of a group holds one expert
//          of any of its layers, in one pool tensor per role: [ne0, ne1, n_slots], biases [ne0, n_slots].
// Protocol the computing thread pins the slots of a block with acquire, computes, and releases them. The mover takes an
//          expert's residency away before it writes to its slot and gives it only after the bytes have arrived, and it
//          never takes a pinned one; so no expert is ever computed from half-written bytes.
// Lost     a device that fails (a remote worker that dies) makes lost() true for good and wakes whoever waits for it; its
//          backend objects are leaked on purpose, since freeing them would wait for an answer forever.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ggml-backend.h"
#include "ggml.h"
#include "moeedge.h"

namespace moeedge {

class expert_cache {
  public:
    static constexpr int not_resident = -1;

    // null with the reason in `error` and `status` (moeedge_status)
    static std::shared_ptr<expert_cache> create(const moeedge_cache_config & config, std::string & error, int & status);
    ~expert_cache();
    // ends the mover, whoever else still holds the cache; nothing is resident from then on
    void close();

    // the computing side

    // group of a layer's experts, -1: none of ours
    int  group_of(int layer) const;
    int  n_groups() const;
    // pool tensor of a role ("ffn_up_exps.weight") in a group, [ne0, ne1, n_slots + n_stage]; null if there is none
    ggml_tensor * pool(int group, const char * role) const;

    // slots[i] = slot of experts[i] if resident, now pinned, else not_resident; duplicates are pinned as often as they occur.
    // Returns how many are resident. O(n), no allocation.
    int  acquire(int layer, const int32_t * experts, int n, int32_t * slots);
    // gives back what acquire pinned; entries of not_resident are skipped
    void release(int layer, const int32_t * slots, int n);
    // whether any expert of the layer is resident (relaxed: a hint)
    bool has_resident(int layer) const;

    // the device as the computing thread sees it: its own instance (stream), apart from the mover's
    ggml_backend_t             compute_backend() const;
    ggml_backend_buffer_type_t compute_buft() const; // the device's default buffer type
    ggml_backend_buffer_type_t staging_buft() const; // host memory that transfers fast: pinned where offered, else the CPU's
    bool                       is_host() const;      // the device's buffers are host memory (emulated)
    bool                       is_async() const;     // graph_compute_async returns before it is done (CUDA, not RPC)
    int                        host_threads() const; // threads that the device takes from the host's cores (emulated), else 0

    // staging slots for streaming: n_stage() of them per group, the first is first_stage(group)
    int  n_stage() const;
    int  first_stage(int group) const;
    // writes experts [n] of a layer to staging slots [n] with the streaming instance, and waits for it; called by one
    // thread at a time, which is not the mover. False: failed or lost.
    bool stage(int layer, const int32_t * experts, int n, const int32_t * slots);

    // device loss
    bool lost() const;
    void mark_lost(const char * reason); // from any thread; idempotent; also wakes the mover

    // runs work that waits for the device; false if the device is lost before it is done, which then never ends: it owns
    // what it uses, or that is never freed
    bool run_on_device(std::function<void()> work);

    // how prefill batches are computed: moeedge_cache_set_prefill
    std::atomic<int> prefill_path{ 0 };
    std::atomic<int> prefill_tokens_min{ 65 };

    // counters and records of the computing side (written by it alone, read under a lock by the API)
    void record_block(const moeedge_block_record & record);
    void count_unknown_block();

    // the planning side; see the moeedge_cache_* functions of the same name (moeedge.h)

    void get_info(moeedge_cache_info & out) const;
    void get_groups(int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) const;
    // or a moeedge_status
    int  demand(int layer, const int32_t * experts, int n, const int32_t * victims, const float * utility, int n_victims,
                double timeout_s);
    void set_batch(int n_experts);
    int  plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
              const float * utility, int n_victims);
    void copy_residency(uint8_t * out) const;
    void get_stats(moeedge_cache_stats & out) const;
    int  read_blocks(int64_t after, moeedge_block_record * out, int n_max);
    int  drain(double timeout_s);
    int  clear();
    int  read(int layer, int expert, const char * role, void * out, int64_t size);
    std::string loss_reason() const;

  private:
    struct impl;
    explicit expert_cache(std::unique_ptr<impl> parts);

    std::unique_ptr<impl> self;
};

} // namespace moeedge
