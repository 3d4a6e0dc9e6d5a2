// Ahead launch: computes the resident experts of a block before the host knows which experts the router selected.
//
// Where llama.cpp computes attention and router on the device that holds the slots, the block's input, ids and weights are in
// its memory already. A graph of fixed shape per layer and number of tokens looks the selected experts' slots up in a map on
// the device, computes all pairs, and sums them by weight; an absent expert is mapped to the pool's zero slot, whose columns
// are zero. The graph is queued on llama.cpp's own backend instance, behind the router and behind the copies of the three
// tensors to the host; so the host waits once, for those copies, and computes the absent experts meanwhile.
//
// The layer's slots are pinned while the graph may run: the map on the device stays true.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "device-worker.h"
#include "expert-cache.h"
#include "expert-chain.h"
#include "subgraph-set.h"

namespace moeedge {

// a value of llama.cpp's graph on a GPU that the scheduler wants in host memory; the copy is queued
struct arriving_tensor {
    ggml_backend_t      from;
    const ggml_tensor * source;
    const ggml_tensor * copy;
};

// what a block reads, in the memory of the GPU that computed it
struct block_sources {
    struct place {
        void *                data   = nullptr;
        ggml_backend_buffer_t buffer = nullptr;
    };
    ggml_backend_t backend = nullptr; // llama.cpp's instance; null: not all of them come from one
    place          input, ids, weights;

    bool is_complete() const { return backend != nullptr; }
};

// the sources of a block among the tensors that arrive
block_sources find_sources(const std::vector<arriving_tensor> & arriving, const expert_chain & chain, const expert_sum & sum);

class ahead_launch : no_copy {
  public:
    // more tokens take the matrix-matrix kernels of the plain path
    static constexpr int64_t n_tokens_max = 16;

    explicit ahead_launch(std::shared_ptr<expert_cache> cache);
    ~ahead_launch();

    // Queues the block's graph. tables: slot pools; slots [n_experts] of the layer's experts, not_resident: absent.
    // False: the device cannot compute it, or has no memory for it; the copies to the host are still under way.
    bool start(const expert_chain & chain, const expert_sum & sum, const table_list & tables, int group,
               const block_sources & sources, const std::vector<int32_t> & slots);
    // waits for the copies of the block's input, ids and weights
    void wait_inputs();
    // waits for the graph; the weighted sum of the resident experts [n_out, n_tokens], valid until the next start
    const float * wait_sum();
    // waits for a graph that was started and not awaited; never throws
    void wait_idle();
    // from queueing the graph to its end, as the host sees it
    int64_t busy_ns() const { return device_ns; }

  private:
    struct block_graph : graph_memory {
        using graph_memory::graph_memory;

        ggml_tensor *        out = nullptr;
        block_sources::place input, ids, weights; // that it was built for
        bool                 is_supported = false;
    };

    bool          allocate_map();
    block_graph * get(const expert_chain & chain, const expert_sum & sum, const table_list & tables, const block_sources & sources);
    std::unique_ptr<block_graph> build(const expert_chain & chain, const expert_sum & sum, const table_list & tables,
                                       const block_sources & sources) const;
    void send_map(int layer, int group, const std::vector<int32_t> & slots, ggml_backend_t backend);

    std::shared_ptr<expert_cache> cache;
    int                           n_experts   = 0;
    ggml_context_ptr              map_ctx;
    ggml_tensor *                 map         = nullptr; // int32, the slots of each layer's experts
    ggml_backend_buffer_ptr       map_buffer;
    bool                          is_refused  = false; // the device has no events or no memory
    host_buffer                   staging;  // of the map, and one value more
    int32_t *                     sent_map = nullptr; // in it; what the device has or is being sent
    ggml_backend_event_ptr        arrived;
    ggml_backend_buffer_ptr       buffer; // of all graphs, since one runs at a time
    std::map<std::pair<int, int64_t>, std::unique_ptr<block_graph>> graphs; // by layer and number of tokens
    host_buffer                   output;
    void *                        output_data = nullptr;
    ggml_backend_t                backend     = nullptr; // of the last start
    bool                          is_running  = false;   // its graph was not awaited
    int64_t                       begin_ns    = 0;
    int64_t                       device_ns   = 0;
};

} // namespace moeedge
