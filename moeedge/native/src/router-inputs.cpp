#include "router-inputs.h"

#include <cstdio>
#include <cstring>

#include "ggml-impl.h"
#include "moe-blocks.h"

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

// llama.cpp names the router's nodes; the name of a reshape of one has something after the number
static int layer_of_probs(const ggml_tensor * node) {
    int layer = -1, n_read = 0;
    return std::sscanf(node->name, "ffn_moe_probs-%d%n", &layer, &n_read) == 1 && node->name[n_read] == '\0' ? layer : -1;
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
        ggml_tensor * node = graph->nodes[i];
        if (!inputs.empty() && is_router && is_rows(node) && layer_of_probs(node) == inputs.back().layer) {
            inputs.back().probs = node;
        }
        if (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID) {
            continue;
        }
        int               layer = -1;
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

} // namespace moeedge
