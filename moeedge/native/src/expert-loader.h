// Expert loader: reads experts from the model's files into slots in the host's own memory, several at once.

#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "direct-reader.h"
#include "expert-layout.h"
#include "expert-source.h"
#include "slot-pools.h"

namespace moeedge {

class expert_loader {
  public:
    using end_call = std::function<void(bool has_arrived)>;

    // layout and pools must outlive the loader
    expert_loader(const expert_layout & layout, const slot_pools & pools, double bytes_per_s);

    // false with the reason in `error`
    bool open(const moeedge_cache_config & config, std::string & error);

    // Starts to read an expert into a slot; `ended` is called once, by another thread, and must not throw. Called by one
    // thread at a time, as hasten is
    void load(int layer, int expert, int slot, int priority, end_call ended);
    // lets an expert that is being loaded overtake those of lower priority
    void hasten(int layer, int expert, int priority);
    // reads a part of one role of an expert into the caller's memory, and waits for it; from any thread
    source_result read_part(int layer, int role, int expert, size_t begin, size_t size, int priority, char * out);
    // drops the loads that have not begun and waits for the others
    void end();

    // how many loads keep all threads of the reader busy; those beyond them can wait where they are easier to reorder
    int         loads_ahead() const;
    // what went wrong with the newest load that failed, one sentence; empty: none has
    std::string error() const;

    direct_reader reader;

  private:
    void note_failure(int layer, int expert, const read_end & end);

    const expert_layout & layout;
    const slot_pools &    pools;
    std::vector<int64_t>  requests; // [layer * n_experts + expert] the last one
    mutable std::mutex    mutex;    // guards `failure`
    std::string           failure;
};

} // namespace moeedge
