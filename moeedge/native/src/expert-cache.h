// Expert cache of one session: slot pools on a device, the table of which expert is in which slot, and the thread that moves
// them.
//
// Groups   layers whose experts have the same tensors (role, type, shape) form a group, or several where one pool would be
//          larger than the device allows. A slot of a group holds one expert of any of its layers, in one pool tensor per
//          role: [ne0, ne1, n_slots], biases [ne0, n_slots].
// Protocol the computing thread pins the slots of a block with acquire, computes, and releases them. The mover ends an
//          expert's residency before it writes to its slot, starts it only after the bytes have arrived, and never takes a
//          pinned slot; so no expert is ever computed from half-written bytes.
// Lost     a device that fails (a remote worker that dies) makes is_lost() true for good and wakes all waiting threads; its
//          backend objects are leaked on purpose, since freeing them would wait for an answer forever.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "expert-mover.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "moeedge-cache.h"

namespace moeedge {

// set by another thread: what runs should stop
using stop_flag = std::shared_ptr<std::atomic<bool>>;

// counters and the newest block records of the computing side
class block_records {
  public:
    static constexpr int n_kept           = 4096;
    static constexpr int n_tokens_counted = 64; // larger batches use nearly every expert under any policy

    void add(const moeedge_block_record & record);
    void add_unknown();

    int  read(int64_t after, moeedge_block_record * out, int n_max);
    moeedge_cache_stats stats(); // of these, the others are 0

  private:
    std::mutex                        mutex; // the computing thread adds, others read
    std::vector<moeedge_block_record> ring = std::vector<moeedge_block_record>(n_kept);
    int64_t                           serial = 0;
    moeedge_cache_stats               sums   = {};
};

class expert_cache {
  public:
    static constexpr int not_resident = residency_table::no_slot;

    // null with the reason in `error` and `status` (moeedge_status)
    static std::shared_ptr<expert_cache> create(const moeedge_cache_config & config, std::string & error, int & status);
    explicit expert_cache(std::shared_ptr<cache_core> core);
    ~expert_cache();
    // Ends the mover's thread after the uploads under way, or abandons it where it waits for a lost device; also while the cache
    // has other owners. No expert is resident from then on
    void close();

    // computing side

    int n_layers() const { return core->layout.n_layers; }
    int n_experts() const { return core->layout.n_experts; }

    // group of a layer's experts, -1: the layer has none
    int           group_of(int layer) const;
    // pool tensor of a role ("ffn_up_exps.weight") in a group, [ne0, ne1, n_slots]; null if there is none
    ggml_tensor * pool(int group, const char * role) const;

    // a slot of the group's pools that holds zeros for ever
    int zero_slot(int group) const { return core->pools->zero_slot(group); }

    // slots[i] = slot of experts[i] if resident, now pinned, else not_resident; duplicates are pinned as often as they occur.
    // Returns how many are resident. O(n), no allocation.
    int  acquire(int layer, const int32_t * experts, int n, int32_t * slots);
    // unpins the slots of acquire; entries of not_resident are skipped
    void release(int layer, const int32_t * slots, int n);
    // whether any expert of the layer is resident (relaxed: a hint)
    bool has_resident(int layer) const { return group_of(layer) >= 0 && core->table->has_resident(layer); }

    const cache_device & device() const { return *core->device; }

    // staging slots for streaming, in tensors of their own: stage(group, role) [ne0, ne1, n_stage], null without any
    const int     n_stage;
    ggml_tensor * stage(int group, const char * role) const;
    // writes experts of a layer to as many staging slots with the streaming instance, and waits for it; called by one
    // thread at a time, which is not the mover. False: failed, lost, or `stops` was set before the last expert.
    bool stage(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots, const stop_flag & stops);

    bool        is_lost() const { return device().health->is_lost(); }
    bool        is_foreign() const { return device().health->is_foreign(); } // of the process that forked this one
    void        mark_lost(const char * reason) { device().health->mark_lost(reason); } // from any thread
    std::string lost_message() const { return device().lost_message(); }
    // runs work that waits for the device, see device_health::run
    bool        run_on_device(std::function<void()> work, std::chrono::seconds timeout = device_health::answer_limit) {
        return device().health->run(std::move(work), timeout);
    }

    // how prefill batches are computed: moeedge_cache_set_prefill
    std::atomic<int> prefill_path{ MOEEDGE_PREFILL_PATH_CPU };
    std::atomic<int> prefill_tokens_min{ 65 };

    // how the device computes small batches: moeedge_cache_set_device_path
    std::atomic<int> device_path{ MOEEDGE_DEVICE_PATH_PAIRS };

    // whether some blocks are timed alone: moeedge_cache_set_timing
    std::atomic<bool> is_timing{ false };

    block_records records;

    // planning side; see the moeedge_cache_* functions (moeedge-cache.h)

    residency_table & table() { return *core->table; }
    // of the model's files so far, by a cache in RAM
    int64_t           bytes_read() const { return core->loader ? core->loader->reader.bytes_read() : 0; }
    // why a wanted expert could not be loaded
    std::string       load_error() const;
    void              get_info(moeedge_cache_info & out) const;
    void              get_groups(int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) const;
    void              set_batch(int n_experts) { core->batch.store(n_experts); }
    void              set_readers(int n, int64_t piece_bytes);
    // Reads experts from the slots of that cache in host memory, and those that it does not hold past the page cache as it
    // does; null: from the files. moeedge_status
    int               set_ram(const std::shared_ptr<expert_cache> & ram);
    int               set_read_faults(int kind, int every, double delay_s);      // moeedge_status
    int               get_reader(moeedge_reader_info & out);                     // moeedge_status
    void              get_stats(moeedge_cache_stats & out);
    int               limit(int n_slots); // slots now, or a moeedge_status
    int               read(int layer, int expert, const char * role, void * out, int64_t size); // moeedge_status

  private:
    bool          has_experts_of(const expert_cache & other) const;
    source_result copy_part(int layer, int role, int expert, size_t begin, size_t size, bool is_urgent, void * out);

    std::shared_ptr<cache_core> core;
    std::mutex                  closing;
    std::thread                 mover; // not joinable once closed
};

// Unpins the slots of a layer, however the computation from them ends. until_idle: called first where an exception passes: a
// device may still read the slots.
class pin_guard : no_copy {
  public:
    pin_guard(expert_cache & of, int of_layer, const std::vector<int32_t> & pinned, std::function<void()> wait = [] {})
        : cache(&of), layer(of_layer), slots(pinned), until_idle(std::move(wait)) {}
    ~pin_guard() {
        if (cache) {
            until_idle();
            release();
        }
    }

    void release() {
        cache->release(layer, slots.data(), (int) slots.size());
        cache = nullptr;
    }

  private:
    expert_cache *               cache; // null: released
    const int                    layer;
    const std::vector<int32_t> & slots;
    const std::function<void()>  until_idle;
};

} // namespace moeedge
