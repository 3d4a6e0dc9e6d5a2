// Capture: copies of what predictors of experts read, of the newest small graph of one llama.cpp context.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "inputs.h"
#include "moeedge.h"

namespace moeedge {

class input_capture {
  public:
    static constexpr int n_tokens_max = 32; // of a graph; larger ones are prompts, and keeping theirs would cost memory

    // what: of moeedge_capture
    input_capture(int what, int n_layers, int n_embd, int n_experts);

    // the values are in memory
    void take(const block_input & found);
    // the next value opens a new frame, whatever its layer
    void end_frame() { last_layer = -1; }
    // false: `what` is not one that is kept
    bool read(int what, moeedge_captured & out) const;

  private:
    struct values {
        int                      width = 0;
        std::vector<int32_t>     layer_tokens;
        std::unique_ptr<float[]> rows; // [n_layers, n_tokens_max, width]
    };

    void copy(values & out, int layer, const ggml_tensor * in, int64_t n_tokens, size_t stride);

    const int n_layers;
    values    inputs, probs;
    int64_t   serial     = 0;
    int       last_layer = -1; // of the open frame, -1: none is open
};

} // namespace moeedge
