// Activation capture: copies of the activations that predictors of experts read, of the newest small graph of one llama.cpp
// context.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moeedge.h"
#include "router-inputs.h"

namespace moeedge {

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
