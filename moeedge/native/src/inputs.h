// Inputs: what each layer's router reads (in a dense layer: its FFN), by which experts can be foretold. Found by the names of
// the weights that read it, which all architectures share. Where a GPU computes the router, what the experts read stands in.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_tensor;

namespace moeedge {

struct block_input {
    int           layer;
    int           i_node; // index of the graph's node that reads it first
    ggml_tensor * input;  // float32 [n_embd, n_tokens], or [n_embd, 1, n_tokens]
    int64_t       n_tokens;
    size_t        stride; // bytes from one token to the next
    ggml_tensor * probs;  // float32 [n_experts, n_tokens], what the router makes of it; null: none, or it is fused away
};

// in graph order, at most one per layer: the router's where there is one
void find_inputs(const ggml_cgraph * graph, std::vector<block_input> & inputs);

} // namespace moeedge
