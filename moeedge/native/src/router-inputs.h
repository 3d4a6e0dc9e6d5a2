// Router inputs: the input of each layer's router (in a dense layer: of its FFN), which predictors of experts read. Found by
// the names of the weights that read it, which all architectures share. Where a GPU computes the router, the input of the
// experts is taken instead.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_tensor;

namespace moeedge {

struct router_input {
    int           layer;
    int           i_node; // index of the graph's node that reads it first
    ggml_tensor * input;  // float32 [n_embd, n_tokens], or [n_embd, 1, n_tokens]
    int64_t       n_tokens;
    size_t        stride; // bytes from one token to the next
    ggml_tensor * probs;  // float32 [n_experts, n_tokens], the router's output; null: there is none, or it is fused away
};

// in graph order, at most one per layer: the router's where there is one
void find_router_inputs(const ggml_cgraph * graph, std::vector<router_input> & inputs);

// copies n_tokens rows that are `stride` bytes apart to out [n_tokens, width]
void read_rows(const ggml_tensor * t, int64_t n_tokens, size_t stride, float * out);

} // namespace moeedge
