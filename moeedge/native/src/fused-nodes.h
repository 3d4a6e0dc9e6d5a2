// Fused nodes: operations of a MoE block, one after the other in ggml's graph, that one node of ours computes with the same bits:
// each operation is rounded as by a node of its own. They are found by topology, and a fused one is left alone where its output
// would get memory that it reads.

#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace moeedge {

// whether the CPU backend computes something there
bool is_operation(const ggml_tensor * node);

// whether what is written leaves alone what is read; by_value: each value is read just before its place is written
bool is_apart(const ggml_tensor * written, const ggml_tensor * read, bool by_value = false);

// Rows of numbers times a number each, as ggml multiplies the experts' outputs by their weights; ggml looks the weight up anew for
// each element, with a division of the index.
bool is_weighting(const ggml_tensor * node);
void compute_weighting(const ggml_tensor * node, int ith, int nth);

// The router's weights of the chosen experts, divided by their sum and scaled: get_rows, sum_rows, clamp, div, scale.
struct router_weights {
    const ggml_tensor * probs = nullptr; // [1, n_experts, n_tokens]
    const ggml_tensor * ids   = nullptr; // [n_used, n_tokens]
    const ggml_tensor * out   = nullptr;
    float               sum_min = 0, sum_max = 0, factor = 1;
    bool                is_scaled         = false;
    bool                is_apart_of_probs = true; // the output has none of their memory
    int                 i_end             = 0; // index of the graph's next node; 0: node i is not the first of such nodes

    router_weights(const ggml_cgraph * graph, int i);
    void compute(int ith, int nth) const;
};

// The sum of down's columns: add_id of the experts' biases, the multiplication by the router's weights, n_used - 1 additions, and the
// addition of the layer's input. Biases and the last addition may be missing.
struct weighted_sum {
    const ggml_tensor *  columns = nullptr; // down's output, [n_out, n_used, n_tokens]
    const ggml_tensor *  biases  = nullptr; // [n_out, n_experts]
    const ggml_tensor *  weights = nullptr;
    const ggml_tensor *  added   = nullptr; // [n_out, n_tokens]
    const ggml_tensor *  out     = nullptr;
    int                  i_end   = 0; // index of the graph's next node; 0: these are no such nodes
    std::vector<float>   factors; // [n_tokens, n_used]
    std::vector<int32_t> experts;

    // down: the operation before node i
    weighted_sum(const ggml_cgraph * graph, const ggml_tensor * down, int i);
    // of weights and ids; the output may have their memory, so they are copied while down is computed
    void copy_routing();
    void compute(int ith, int nth) const;
};

// The activation of two matmuls of one input: add_id of the biases of each, and GLU.
struct gated_unit {
    const ggml_tensor * matmuls[2] = {}; // in the graph's order
    const ggml_tensor * biases[2]  = {}; // [n_ff, n_experts]; null: there are none
    const ggml_tensor * out        = nullptr;
    int                 gate       = 0; // which of them is the gate
    int                 i_end      = 0; // index of the graph's next node; 0: these are no such nodes

    gated_unit() = default;
    gated_unit(const ggml_cgraph * graph, int i);
    // values [begin, end) of a column, whose matmuls are computed; begin: a multiple of n_values_together
    void compute(int64_t place, int64_t token, int32_t expert, int64_t begin, int64_t end) const;

    static constexpr int64_t n_values_together = 16; // ggml's vectors are no longer
};

} // namespace moeedge
