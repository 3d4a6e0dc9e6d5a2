// Inputs: what each layer's router reads (in a dense layer: its FFN), by which experts can be foretold. Found by the names of
// the weights that read it, which all architectures share.

#pragma once

#include <vector>

struct ggml_cgraph;
struct ggml_tensor;

namespace moeedge {

struct block_input {
    int           layer;
    int           i_node; // index of the graph's node that reads it first
    ggml_tensor * input;  // float32 [n_embd, n_tokens], rows may be strided
    ggml_tensor * probs;  // float32 [n_experts, n_tokens], what the router makes of it; null: none, or it is fused away
};

// in graph order, at most one per layer: the router's where there is one
void find_inputs(const ggml_cgraph * graph, std::vector<block_input> & inputs);

} // namespace moeedge
