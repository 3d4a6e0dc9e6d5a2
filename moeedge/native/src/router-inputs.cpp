#include "router-inputs.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "ggml-impl.h"
#include "moe-blocks.h"
#include "router-nodes.h"

namespace moeedge {

enum reader_kind { READER_NONE, READER_DENSE, READER_EXPERTS, READER_ROUTER };

// the kind of a weight that reads the input, and its layer
static reader_kind reader_of(const ggml_tensor * weight, int & layer) {
    const char * role = nullptr;
    layer             = parse_weight_name(weight->name, role);
    if (layer < 0) {
        return READER_NONE;
    }
    if (std::strcmp(role, "ffn_gate_inp.weight") == 0) {
        return READER_ROUTER;
    }
    if (std::strncmp(role, "ffn_", 4) == 0 && std::strstr(role, "_exps.weight") != nullptr) {
        return READER_EXPERTS;
    }
    return std::strcmp(role, "ffn_up.weight") == 0 || std::strcmp(role, "ffn_gate.weight") == 0 ? READER_DENSE : READER_NONE;
}

static bool is_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[3] == 1;
}

// input of the experts, one column for all of a token's; not if the router's weights are applied to it already
static bool is_for_experts(const ggml_tensor * t) {
    return is_rows(t) && t->ne[1] == 1 && t->op != GGML_OP_MUL;
}

void read_rows(const ggml_tensor * t, int64_t n_tokens, size_t stride, float * out) {
    for (int64_t i = 0; i < n_tokens; i++) {
        std::memcpy(out + i * t->ne[0], (const char *) t->data + i * stride, t->ne[0] * sizeof(float));
    }
}

void find_router_inputs(const ggml_cgraph * graph, std::vector<router_input> & inputs) {
    inputs.clear();
    bool is_router = false; // the last one
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node  = graph->nodes[i];
        int           layer = -1;
        if (!inputs.empty() && is_router && is_rows(node) && is_router_node(node, "probs-", INT_MAX, layer) && layer == inputs.back().layer) {
            inputs.back().probs = node;
        }
        if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        const reader_kind kind  = reader_of(node->src[0], layer);
        ggml_tensor *     x     = node->src[1];
        const bool fits     = kind == READER_EXPERTS ? is_for_experts(x) : kind != READER_NONE && is_rows(x) && x->ne[2] == 1;
        const bool is_known = !inputs.empty() && inputs.back().layer == layer;
        if (!fits || (is_known && (is_router || kind == READER_DENSE))) {
            continue;
        }
        if (is_known) {
            inputs.pop_back();
        }
        const int i_tokens = kind == READER_EXPERTS ? 2 : 1;
        inputs.push_back({ layer, i, x, x->ne[i_tokens], x->nb[i_tokens], nullptr });
        is_router = kind == READER_ROUTER || kind == READER_EXPERTS;
    }
}

// capture

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
