// Hybrid executor: computes the experts of one MoE block on two devices at once. Pairs whose expert is in a slot go to the
// device, the others to the CPU; both run the block's chain, and the columns meet in the chain's output.

#pragma once

#include <cstdint>
#include <future>
#include <memory>
#include <vector>

#include "ahead-launch.h"
#include "device-worker.h"
#include "expert-cache.h"
#include "pair-columns.h"
#include "ram-executor.h"
#include "streamed-block.h"

namespace moeedge {

// the chain's group in the cache, and its pools there; -1: the cache has none for it
int find_pools(const expert_cache & cache, const expert_chain & chain, table_list & pools);

class hybrid_executor : private pair_columns {
  public:
    static constexpr size_t n_pairs_max = streamed_block::n_pairs_max;

    hybrid_executor(std::shared_ptr<expert_cache> cache, ggml_backend_t cpu, ggml_backend_dev_t cpu_dev);
    ~hybrid_executor();

    // sets the chain's pools; false if the cache has none for it
    bool place(placed_chain & placed) const;
    // computes the experts that are not on the device from slots in host memory; null: from the graph's own weights
    void set_ram(ram_executor * executor) { from_ram = executor; }
    // threads of the CPU backend, of which the emulated device takes its share
    void set_n_threads(int n_threads);
    using pair_columns::compute_weighted;
    using pair_columns::status;
    // Input and ids of the chain, and its weights if pairs without weight are to be left out, are computed and in host memory
    block_outcome compute(const placed_chain & placed, int phase, bool skips_unweighted);
    // Whether the device half can be launched before input and ids are in host memory
    bool          can_launch_ahead(const placed_chain & placed, const block_sources & sources) const;
    // input, ids and weights are on their way to host memory; they are there when it returns. BLOCK_NOT_COMPUTED: not
    // computed and not counted
    block_outcome compute_ahead(const placed_chain & placed, const block_sources & sources, int phase);
    // a batch whose experts are all computed on the device, those without a slot by way of the staging slots
    block_outcome compute_streamed(const placed_chain & placed, int phase, bool skips_unweighted);
    // counts a block that ran on the CPU as it is
    void record_cpu_block(const expert_chain & chain, int phase);

  private:
    // experts without a slot that are staged together, and their pairs
    struct stream_chunk {
        index_list experts, slots, pairs;
        int        half = 0; // of the staging slots
    };
    // the first experts of a layer, which are staged while the layer before it ends
    struct next_stage {
        int               layer = -1; // none
        stream_chunk      chunk;
        stop_flag         stops;
        std::future<bool> staged;
    };
    void              cut_chunks(std::vector<stream_chunk> & chunks);
    void              add_expert(stream_chunk & chunk, int32_t expert) const;
    std::future<bool> stage(int layer, const stream_chunk & chunk, const stop_flag & stops);
    void              stage_next(int layer, int half);
    bool              wait_staged(std::future<bool> & staged, const stop_flag & stops);
    void              drop_next();
    size_t            cut_pieces(const index_list & pairs, streamed_block::pieces & all) const;
    bool              stream_pieces(const placed_chain & placed, const table_list & tables, size_t n);
    bool              stream_chunks(const placed_chain & placed, const std::vector<stream_chunk> & chunks, const std::vector<size_t> & n_pieces,
                                    moeedge_block_record & record);

    int           count_unique(const index_list & pairs);
    void          split_pairs(moeedge_block_record & record, bool skips_unweighted);
    bool          has_ram(const placed_chain & placed) const {
        return from_ram && !from_ram->is_lost() && !placed.ram_tables.empty();
    }
    const float * columns_of_host(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record,
                                  const float * gathered = nullptr);
    bool          compute_on_cpu(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record,
                                 const float * gathered = nullptr);
    bool          submit(const placed_chain & placed, const index_list & pairs, const table_list & tables);
    const float * columns_of_device(moeedge_block_record & record);
    bool          finish(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record);
    bool          is_timed_alone();
    void          sort_by_expert(index_list & pairs) const;
    void          sort_for_pieces(index_list & pairs) const;
    size_t        piece_end(const index_list & pairs, size_t begin) const;
    bool          compute_on_device(const placed_chain & placed, const index_list & pairs, const table_list & tables,
                                    moeedge_block_record & record);

    std::shared_ptr<expert_cache>  cache;
    ggml_backend_ptr               cpu_part; // with the threads that an emulated device leaves; null: all are its
    std::shared_ptr<device_worker> worker;
    std::unique_ptr<subgraph_set>  device_graphs;
    std::unique_ptr<ahead_launch>  ahead;
    std::unique_ptr<streamed_block> streamed;
    std::function<void()>          until_idle; // waits for all of them
    ram_executor *                 from_ram = nullptr;

    // scratch of the current block
    index_list            slots; // per pair
    index_list            on_device, on_cpu;
    int64_t               n_computed = 0; // blocks
    int64_t               load_ns    = 0; // of the current block: waiting for experts from the file
    index_list            all_experts, all_slots; // of the layer
    std::vector<uint32_t> seen; // per expert: the round in which it was counted
    uint32_t              round         = 0;
    const float *         staged_input  = nullptr; // columns that the device was given last
    next_stage            next; // last: it ends before all that it uses
};

} // namespace moeedge
