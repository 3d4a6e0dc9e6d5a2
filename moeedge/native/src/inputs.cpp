#include "inputs.h"

#include <cstdio>
#include <cstring>

#include "ggml-impl.h"

namespace moeedge {

enum class reader { none, dense, router };

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
    return std::strcmp(role, "ffn_up.weight") == 0 || std::strcmp(role, "ffn_gate.weight") == 0 ? reader::dense : reader::none;
}

static bool is_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->ne[2] == 1 && t->ne[3] == 1;
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
        const reader kind  = node->op == GGML_OP_MUL_MAT ? reader_of(node->src[0], layer) : reader::none;
        if (kind == reader::none || !is_rows(node->src[1])) {
            continue;
        }
        const bool is_known = !inputs.empty() && inputs.back().layer == layer;
        if (is_known && (is_router || kind == reader::dense)) {
            continue;
        }
        if (is_known) {
            inputs.pop_back();
        }
        inputs.push_back({ layer, i, node->src[1], nullptr });
        is_router = kind == reader::router;
    }
}

} // namespace moeedge
