// Router inputs: the input of each layer's router (in a dense layer: of its FFN), which predictors of experts read. Found by
// the names of the weights that read it, which all architectures share. Where a GPU computes the router, the input of the
// experts is taken instead.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "moeedge.h"

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

// copies of these, of the newest small graph of one llama.cpp context
class activation_capture {
  public:
    static constexpr int n_tokens_max = 32; // of a graph; larger ones are prompts, whose activations would cost memory

    // flags: moeedge_capture_flags
    activation_capture(int flags, int n_layers, int n_embd, int n_experts);

    // copies the values of an input, which are in memory
    void take(const router_input & found);
    // the next value of any layer opens a new frame
    void end_frame() { last_layer = -1; }
    // false: activations of that flag are not captured
    bool read(int flag, moeedge_activations & out) const;

  private:
    struct rows_of_layers {
        int                      width = 0;
        std::vector<int32_t>     layer_tokens;
        std::unique_ptr<float[]> rows; // [n_layers, n_tokens_max, width]
    };

    void copy(rows_of_layers & out, int layer, const ggml_tensor * in, int64_t n_tokens, size_t stride);

    const int      n_layers;
    rows_of_layers inputs, probs;
    int64_t        serial     = 0;
    int            last_layer = -1; // of the open frame, -1: none is open
};

} // namespace moeedge
