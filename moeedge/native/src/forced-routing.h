// Forced routing: replaces the experts that a model's routers select by given ones, in stock llama.cpp's graph as in ours, for
// measurements under recorded routing. llama.cpp computes a layer's router, then calls the hook, which rewrites the selected
// experts in place; llama.cpp's own nodes go on from there, so that the weights are those of the model's gate for these ids.

#pragma once

#include <cstdint>
#include <vector>

#include "moeedge.h"

struct ggml_tensor;

namespace moeedge {

class forced_routing {
  public:
    forced_routing(int n_layers, int n_experts, const int32_t * n_used, int n_ubatch); // n_used: of each layer

    int  set(const moeedge_routing_batch & batch); // moeedge_status
    void set_capture(bool on) { is_capturing = on; }
    const std::vector<int32_t> * captured(int layer) const;

    // the eval callback's two questions: whether the node is to be stopped at, and what to do there
    bool wants(const ggml_tensor * node);
    void take(ggml_tensor * node);

  private:
    void force(int layer, ggml_tensor * sorted);
    void keep_weights(const ggml_tensor * probs, const int32_t * ids, int n_used, int n_rows);

    const int                            n_layers, n_experts, n_ubatch;
    const std::vector<int32_t>           n_used;
    int                                  n_used_max = 0, n_expert_layers = 0;
    moeedge_routing_batch                now        = {};
    int                                  last_layer = -1; // of the batch that is being computed
    int                                  n_before = 0, n_ubatch_now = 0; // tokens of earlier micro-batches, and of this one
    bool                                 is_capturing = false, is_wrong = false;
    std::vector<const ggml_tensor *>     probs;   // of the graph that is being computed
    std::vector<std::vector<int32_t>>    ids_of;  // [n_layers] what the newest batch used, in the order of its tokens
    std::vector<int32_t>                 sorted_ids;
    std::vector<float>                   values;
};

} // namespace moeedge
