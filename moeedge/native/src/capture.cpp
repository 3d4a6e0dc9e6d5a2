#include "capture.h"

#include <algorithm>
#include <cstring>

#include "ggml.h"

namespace moeedge {

input_capture::input_capture(int what, int n, int n_embd, int n_experts) : n_layers(n) {
    const auto allocate = [n](values & kept, int width) {
        kept.width = width;
        kept.layer_tokens.assign(n, 0);
        kept.rows.reset(new float[(size_t) n * n_tokens_max * width]);
    };
    if (what & MOEEDGE_CAPTURE_INPUTS) {
        allocate(inputs, n_embd);
    }
    if (what & MOEEDGE_CAPTURE_PROBS) {
        allocate(probs, n_experts);
    }
}

void input_capture::take(const block_input & found) {
    if (found.layer < 0 || found.layer >= n_layers) {
        return;
    }
    // layers come in ascending order within a graph, so an earlier or equal one belongs to the next graph
    if (last_layer < 0 || found.layer <= last_layer) {
        serial++;
        std::fill(inputs.layer_tokens.begin(), inputs.layer_tokens.end(), 0);
        std::fill(probs.layer_tokens.begin(), probs.layer_tokens.end(), 0);
    }
    last_layer = found.layer;
    copy(inputs, found.layer, found.input, found.n_tokens, found.stride);
    if (found.probs) {
        copy(probs, found.layer, found.probs, found.probs->ne[1], found.probs->nb[1]);
    }
}

void input_capture::copy(values & out, int layer, const ggml_tensor * in, int64_t n_tokens, size_t stride) {
    if (!out.rows || in->ne[0] != out.width || n_tokens > n_tokens_max) {
        return;
    }
    float * rows = out.rows.get() + (size_t) layer * n_tokens_max * out.width;
    for (int64_t t = 0; t < n_tokens; t++) {
        std::memcpy(rows + t * out.width, (const char *) in->data + t * stride, out.width * sizeof(float));
    }
    out.layer_tokens[layer] = (int32_t) n_tokens;
}

bool input_capture::read(int what, moeedge_captured & out) const {
    const values & kept = what == MOEEDGE_CAPTURE_PROBS ? probs : inputs;
    if (!kept.rows) {
        return false;
    }
    out = { serial, n_layers, n_tokens_max, kept.width, kept.layer_tokens.data(), kept.rows.get() };
    return true;
}

} // namespace moeedge
