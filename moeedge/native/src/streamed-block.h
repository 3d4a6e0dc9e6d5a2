// Streamed block: the experts of a large batch, all computed on the device, in pieces of pairs.
//
// The block's input goes to the device once, and each piece picks its tokens' columns there; the pieces' columns meet in the
// device's memory, and the host gets their weighted sum. So a token's input and output cross the link once, and not once per
// expert that it uses.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device-worker.h"
#include "expert-cache.h"
#include "pair-columns.h"

namespace moeedge {

class streamed_block : no_copy {
  public:
    // The most pairs that a device gets at once. CUDA's kernels for experts keep an integer per column in a block's shared
    // memory, which has 48 KiB on older cards, and abort when it is short; and a device's buffer for columns stays small.
    static constexpr size_t n_pairs_max = 2048;

    explicit streamed_block(std::shared_ptr<expert_cache> cache);
    ~streamed_block();

    // whether a block's sum is known, and its input is one column per token
    static bool takes(const placed_chain & placed);

    // pairs that are computed at once
    using pieces = std::vector<std::vector<int32_t>>;

    // Sends what the block reads; slots, weights: per pair. False: the device cannot compute it, or has no memory for it
    bool start(const placed_chain & placed, const char * input, const pieces & all, const std::vector<int32_t> & slots,
               const std::vector<float> & weights);
    // queues the next piece, whose slots are in `tables`; false: the device failed
    bool compute(const placed_chain & placed, const table_list & tables);
    // waits for what is queued; false: the device failed
    bool wait();
    void wait_idle() {
        if (!queued.empty()) {
            wait();
        }
    }
    // Writes the weighted sum of all pairs to the sum's output, if they are all queued (`is_complete`), else only waits
    bool finish(const placed_chain & placed, bool is_complete);

  private:
    using graph_ptr = std::unique_ptr<graph_memory>;

    bool          allocate(const placed_chain & placed, size_t n_piece);
    ggml_tensor * pick(ggml_context * of, int part, size_t begin, size_t n) const;
    graph_ptr     build_piece(const placed_chain & placed, const table_list & tables, size_t begin, size_t n) const;
    graph_ptr     build_sum(ggml_tensor *& sum) const;
    bool          queue(graph_ptr built);
    bool          guarded(const std::function<bool()> & work);
    bool          reserve(const placed_chain & placed, size_t n_piece);
    bool          send_all(const placed_chain & placed, const char * input, const pieces & all, const std::vector<int32_t> & slots,
                           const std::vector<float> & weights);
    bool          write_sum(const placed_chain & placed);
    void          send(ggml_tensor * to, const void * data);

    std::shared_ptr<expert_cache> cache;
    ggml_backend_t                backend;
    ggml_gallocr_ptr              allocator;
    std::vector<int64_t>          sizes_of; // of the block that memory is allocated for; empty: none
    std::map<std::string, bool>   known;    // shapes of chains: whether the device computes them, in this memory
    ggml_context_ptr              ctx;
    ggml_backend_buffer_ptr       buffer;
    // on the device: input [n_in, n_tokens], columns [n_out, n_pairs], weights [1, n_used, n_tokens]; thrice int32, in the order of
    // computation, each piece aligned: the pairs' tokens, slots and places in the columns
    ggml_tensor *                 input   = nullptr;
    ggml_tensor *                 columns = nullptr;
    ggml_tensor *                 weights = nullptr;
    ggml_tensor *                 indices = nullptr;
    std::vector<int32_t>          sent_indices;
    std::vector<size_t>           begins, sizes; // of the pieces, in the indices
    size_t                        n_computed = 0;
    std::vector<char>             sent_input;
    std::vector<graph_ptr>        queued; // a device may read them until it is awaited
    std::unique_ptr<host_buffer>  output;
};

} // namespace moeedge
