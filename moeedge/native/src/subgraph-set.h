// Subgraph set: a chain built again for some of its pairs, on one ggml backend, with its own input, ids and output.
//
// Layouts  token:   the pairs of one token share a column, ids [n, 1] (CUDA keeps its fused kernels for this one);
//          pairs:   a column per pair, ids [1, n]. No column of ids holds an expert twice: the CPU's kernels and CUDA's
//                   matrix-matrix kernels rely on that;
//          columns: a column per pair, ids [n, 1], as if all pairs were of one token. For devices whose matrix-vector kernels
//                   take experts twice; of quantized types CUDA takes those kernels for any n then.
// Memory   all subgraphs of a set share one growing buffer, since only one of them runs at a time.
// Lost     placing a subgraph and freeing the buffer wait for a worker, forever if it is lost (device-health.h). `run` runs
//          such work; the set must not be destroyed once its worker is lost.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "expert-chain.h"
#include "ggml-cpp.h"

namespace moeedge {

enum pair_layout { LAYOUT_TOKEN, LAYOUT_PAIRS, LAYOUT_COLUMNS };

// a graph of tensors that have no memory yet
struct graph_memory {
    ggml_context_ptr ctx;
    ggml_cgraph *    graph;

    explicit graph_memory(size_t n_tensors);
};

struct subgraph : graph_memory {
    using graph_memory::graph_memory;

    ggml_tensor *  input = nullptr; // [n_in, n, 1], [n_in, 1, 1] where the pairs share it, or [n_in, 1, n] (layout pairs)
    ggml_tensor *  ids   = nullptr; // int32, n in all
    ggml_tensor *  out   = nullptr; // [n_out, *, *], a column per pair
    // operands that name a table of the experts, in the order of expert_chain::tables
    struct table_use {
        ggml_tensor * node;
        int           src;
        int           table;
    };
    std::vector<table_use> uses;
};

// the tensors that replace a chain's tables; index as in expert_chain::tables
using table_list = std::vector<ggml_tensor *>;

// Builds the chain's steps for n pairs with `tables`, in `ctx`: ids int32 [n, 1] or [1, n], input float32 [n_in, *, *].
// Returns the last step. uses: see subgraph
ggml_tensor * build_chain(ggml_context * ctx, const expert_chain & chain, const table_list & tables, ggml_tensor * input,
                          ggml_tensor * ids, std::vector<subgraph::table_use> & uses);
// the most tensors that build_chain makes
size_t chain_tensors_max(const expert_chain & chain);
// Adds to the graph the columns [n_out, n_pairs] times the weights float32 [1, n_used, n_tokens], summed over each token's places
// from the first to the last; returns the sum [n_out, n_tokens]. It makes 2 n_used + 1 tensors and a reshape
ggml_tensor * build_weighted_sum(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * columns, ggml_tensor * weights);
// whether a device computes all of the graph's nodes
bool supports_graph(ggml_backend_dev_t dev, ggml_cgraph * graph);
// Gives the tensors of `ctx` that have no memory yet their addresses, in a larger buffer of that type if need be: `drop` forgets
// what is in the old one. False: memory is short
bool place_tensors(ggml_context * ctx, ggml_backend_buffer_ptr & buffer, ggml_backend_buffer_type_t buft, const std::function<void()> & drop);

class subgraph_set {
  public:
    // runs work that waits for the device; false if it is lost
    using runner = std::function<bool(std::function<void()>)>;

    // for `dev`, with a buffer of `buft`
    subgraph_set(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, runner run);

    // for n pairs; kept for later calls. Its table operands are set to `tables`, which may differ from call to call. Null
    // when memory is short or the device cannot compute it.
    subgraph * get(const expert_chain & chain, int64_t n_pairs, pair_layout layout, const table_list & tables);

  private:
    std::unique_ptr<subgraph> build(const expert_chain & chain, int64_t n_pairs, pair_layout layout, const table_list & tables);
    bool                      place(std::unique_ptr<subgraph> & sub);

    ggml_backend_dev_t                                         dev;
    ggml_backend_buffer_type_t                                 buft;
    runner                                                     run;
    ggml_backend_buffer_ptr                                    buffer;
    std::unordered_map<std::string, std::unique_ptr<subgraph>> built; // null: not supported
    std::string                                                key; // scratch
};

} // namespace moeedge
