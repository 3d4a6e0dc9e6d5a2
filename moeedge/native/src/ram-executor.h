// RAM executor: computes the experts of MoE blocks from slots in host memory, for a model whose file does not fit it. Absent
// experts are loaded from the file; the resident ones are computed meanwhile, and each of the others as it arrives. The mapped
// file is read only once experts can no longer be loaded, as no thread can be started for it.

#pragma once

#include <memory>
#include <vector>

#include "expert-cache.h"
#include "pair-columns.h"

namespace moeedge {

// what another executor knows of the block whose misses are computed here
struct block_inputs {
    const std::vector<int32_t> & experts; // per pair of the block
    const char *                 input;   // the chain's, of which nothing is overwritten yet
    ggml_backend_t               cpu;     // computes
    int                          phase;
    expert_cache *               device;   // computes other experts of the block
    int                          n_device; // how many
};

class ram_executor : private pair_columns {
  public:
    // cache: of the device "ram"; cpu: computes, of device `dev`
    ram_executor(std::shared_ptr<expert_cache> cache, ggml_backend_t cpu, ggml_backend_dev_t dev);
    ~ram_executor();

    // sets the chain's pools; false if the cache has none for it, so that the graph computes it from the mapped file
    bool          place(placed_chain & placed) const;
    // whether nothing can be loaded any more
    bool          is_lost() const { return cache->is_lost(); }
    // Input, ids and (skips_unweighted) weights of the block are in host memory. Pairs without weight are neither loaded nor
    // computed if skips_unweighted. Returns BLOCK_DONE or BLOCK_ABORTED
    block_outcome compute(const placed_chain & placed, int phase, bool skips_unweighted);
    // The columns of some of a block's pairs, which another device does not compute; valid until the next call. Null: see
    // status. `record` gets the times
    const float * columns(const placed_chain & placed, const index_list & pairs, const block_inputs & inputs,
                          moeedge_block_record & record);
    using pair_columns::status;

    stop_call should_stop; // asked while experts are awaited

  private:
    void forget_pairs();
    void add_pair(int32_t pair);
    void sort_pairs(bool skips_unweighted);
    void find_shares(int64_t n_tokens);
    void read_next(int layer);
    bool compute_pairs(const placed_chain & placed, moeedge_block_record & record);
    void store(const placed_chain & placed, const float * columns);
    bool compute_first(const placed_chain & placed, moeedge_block_record & record, size_t n, bool is_mapped);
    bool compute_resident(const placed_chain & placed, moeedge_block_record & record, bool is_first);

    std::shared_ptr<expert_cache> cache;
    ggml_backend_t                own_cpu;

    // of the current block
    std::vector<index_list> pairs_of; // [n_experts] pairs that are not computed yet
    index_list              waiting;  // distinct experts that are not computed yet
    index_list              all;      // experts of a layer
    index_list              ahead;    // of these, what is read for the next layer
    expert_cache *          device   = nullptr; // computes other experts of the block; null: none does
    int                     n_device = 0;       // how many
    std::vector<float>      shares;   // of the batch's tokens that use each of the waiting experts; empty: few are needed
    index_list              found;    // their slots
    index_list              chunk;    // pairs that are computed together
    index_list              chunk_slots;
    std::vector<float>      kept_columns; // of `columns`, one pair after the other
    index_list              place_of;     // pair: its place there; empty: columns go to the chain's output
};

} // namespace moeedge
