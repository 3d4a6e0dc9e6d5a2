// RAM executor: computes the experts of MoE blocks from slots in host memory, for a model whose file does not fit it. Absent
// experts are loaded from the file; the resident ones are computed meanwhile, and each of the others as it arrives. The mapped
// file is never read.

#pragma once

#include <memory>
#include <vector>

#include "expert-cache.h"
#include "pair-columns.h"

namespace moeedge {

class ram_executor : private pair_columns {
  public:
    // cache: of the device "ram"; cpu: computes, of device `dev`
    ram_executor(std::shared_ptr<expert_cache> cache, ggml_backend_t cpu, ggml_backend_dev_t dev);
    ~ram_executor();
    ram_executor(const ram_executor &)             = delete;
    ram_executor & operator=(const ram_executor &) = delete;

    // sets the chain's pools; false if the cache has none for it, so that the graph computes it from the mapped file
    bool          place(placed_chain & placed) const;
    // Input, ids and (skips_unweighted) weights of the block are in host memory. Pairs without weight are neither loaded nor
    // computed if skips_unweighted. Returns BLOCK_DONE or BLOCK_ABORTED
    block_outcome compute(const placed_chain & placed, int phase, bool skips_unweighted);
    using pair_columns::status;

    stop_call should_stop; // asked while experts are awaited

  private:
    void sort_pairs(bool skips_unweighted);
    bool compute_resident(const placed_chain & placed, moeedge_block_record & record, bool is_first);

    std::shared_ptr<expert_cache> cache;

    // of the current block
    std::vector<index_list> pairs_of; // [n_experts] pairs that are not computed yet
    index_list              waiting;  // distinct experts that are not computed yet
    index_list              found;    // their slots
    index_list              chunk;    // pairs that are computed together
    index_list              chunk_slots;
};

} // namespace moeedge
