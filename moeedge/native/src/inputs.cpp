#include "inputs.h"

#include <cstdio>
#include <cstring>

#include "ggml-impl.h"

namespace moeedge {

enum class reader { none, dense, experts, router };

// what a weight is, and of which layer
static reader reader_of(const ggml_tensor * weight, int & layer) {
    int n = 0;
    if (std::sscanf(weight->name, "blk.%d.%n", &layer, &n) != 1 || n == 0) {
        return reader::none;
    }
    const char * role = weight->name + n;
    if (std::strcmp(role, "ffn_gate_inp.weight") == 0) {
        return reader::router;
    }
    if (std::strncmp(role, "ffn_", 4) == 0 && std::strstr(role, "_exps.weight") != nullptr) {
        return reader::experts;
    }
    return std::strcmp(role, "ffn_up.weight") == 0 || std::strcmp(role, "ffn_gate.weight") == 0 ? reader::dense : reader::none;
}

static bool is_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[3] == 1;
}

// what the experts read, one column for all of a token's; not where the router's weights are in it already
static bool is_for_experts(const ggml_tensor * t) {
    return is_rows(t) && t->ne[1] == 1 && t->op != GGML_OP_MUL;
}

// llama.cpp names the router's nodes
static int layer_of_probs(const ggml_tensor * node) {
    int layer = -1;
    return std::sscanf(node->name, "ffn_moe_probs-%d", &layer) == 1 ? layer : -1;
}

void find_inputs(const ggml_cgraph * graph, std::vector<block_input> & inputs) {
    inputs.clear();
    bool is_router = false; // the last one
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * node = graph->nodes[i];
        if (!inputs.empty() && is_router && is_rows(node) && layer_of_probs(node) == inputs.back().layer) {
            inputs.back().probs = node;
        }
        int          layer = -1;
        const bool   is_matmul = node->op == GGML_OP_MUL_MAT || node->op == GGML_OP_MUL_MAT_ID;
        const reader kind      = is_matmul ? reader_of(node->src[0], layer) : reader::none;
        ggml_tensor * x        = node->src[1];
        const bool    fits     = kind == reader::experts ? is_for_experts(x) : kind != reader::none && is_rows(x) && x->ne[2] == 1;
        const bool    is_known = !inputs.empty() && inputs.back().layer == layer;
        if (!fits || (is_known && (is_router || kind == reader::dense))) {
            continue;
        }
        if (is_known) {
            inputs.pop_back();
        }
        const int i_tokens = kind == reader::experts ? 2 : 1;
        inputs.push_back({ layer, i, x, x->ne[i_tokens], x->nb[i_tokens], nullptr });
        is_router = kind == reader::router || kind == reader::experts;
    }
}

} // namespace moeedge
