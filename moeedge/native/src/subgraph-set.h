// Subgraph set: a chain built again for some of its pairs, on one ggml backend, with its own input, ids and output.
//
// Layouts  one token: its pairs share a column, ids [n, 1] (CUDA keeps its fused kernels for this one);
//          several tokens: a column per pair, ids [1, n]. No column holds an expert twice: kernels rely on that.
// Memory   all subgraphs of a set share one growing buffer, since only one of them runs at a time.
// Lost     placing a subgraph and freeing the buffer wait for the device, forever if it is lost (device-health.h). `run` runs
//          such work; the set must not be destroyed once its device is lost.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "expert-chain.h"
#include "ggml-backend.h"

namespace moeedge {

struct subgraph {
    ggml_context * ctx   = nullptr;
    ggml_cgraph *  graph = nullptr;
    ggml_tensor *  input = nullptr; // [n_in, n, 1], [n_in, 1, 1] where the pairs share it, or [n_in, 1, n]
    ggml_tensor *  ids   = nullptr; // int32, n in all
    ggml_tensor *  out   = nullptr; // [n_out, *, *], a column per pair
    // operands that name a table of the experts, in the order of expert_chain::tables
    struct table_use {
        ggml_tensor * node;
        int           src;
        int           table;
    };
    std::vector<table_use> uses;

    subgraph() = default;
    ~subgraph();
    subgraph(const subgraph &)             = delete;
    subgraph & operator=(const subgraph &) = delete;
};

// the tensors that replace a chain's tables; index as in expert_chain::tables
using table_list = std::vector<ggml_tensor *>;

class subgraph_set {
  public:
    // runs work that waits for the device; false if it is lost
    using runner = std::function<bool(std::function<void()>)>;

    // for `dev`, with a buffer of `buft`
    subgraph_set(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, runner run);
    ~subgraph_set();

    // for n pairs, in the layout of one token or of several; kept for later calls. Its table operands are set to `tables`,
    // which may differ from call to call. Null when memory is short or the device cannot compute it.
    subgraph * get(const expert_chain & chain, int64_t n_pairs, bool one_token, const table_list & tables);

    size_t buffer_bytes() const;

  private:
    std::unique_ptr<subgraph> build(const expert_chain & chain, int64_t n_pairs, bool one_token, const table_list & tables);
    bool                      place(std::unique_ptr<subgraph> & sub);
    bool                      try_place(subgraph & sub);
    size_t                    needed_bytes(const subgraph & sub) const;

    bool                      is_supported(const subgraph & sub) const;

    ggml_backend_dev_t                                         dev;
    ggml_backend_buffer_type_t                                 buft;
    runner                                                     run;
    ggml_backend_buffer_t                                      buffer = nullptr;
    std::unordered_map<std::string, std::unique_ptr<subgraph>> built; // null: not supported
    std::string                                                key; // scratch
};

} // namespace moeedge
