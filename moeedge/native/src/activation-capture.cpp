#include "activation-capture.h"

#include <algorithm>

#include "ggml.h"

namespace moeedge {

activation_capture::activation_capture(int flags, int n, int n_embd, int n_experts) : n_layers(n) {
    const auto allocate = [n](rows_of_layers & kept, int width) {
        kept.width = width;
        kept.layer_tokens.assign(n, 0);
        kept.rows.reset(new float[(size_t) n * n_tokens_max * width]);
    };
    if (flags & MOEEDGE_CAPTURE_INPUTS) {
        allocate(inputs, n_embd);
    }
    if (flags & MOEEDGE_CAPTURE_PROBS) {
        allocate(probs, n_experts);
    }
}

void activation_capture::take(const router_input & found) {
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

void activation_capture::copy(rows_of_layers & out, int layer, const ggml_tensor * in, int64_t n_tokens, size_t stride) {
    if (!out.rows || in->ne[0] != out.width || n_tokens > n_tokens_max) {
        return;
    }
    read_rows(in, n_tokens, stride, out.rows.get() + (size_t) layer * n_tokens_max * out.width);
    out.layer_tokens[layer] = (int32_t) n_tokens;
}

bool activation_capture::read(int flag, moeedge_activations & out) const {
    const rows_of_layers & kept = flag == MOEEDGE_CAPTURE_PROBS ? probs : inputs;
    if (!kept.rows) {
        return false;
    }
    out = { serial, n_layers, n_tokens_max, kept.width, kept.layer_tokens.data(), kept.rows.get() };
    return true;
}

} // namespace moeedge
