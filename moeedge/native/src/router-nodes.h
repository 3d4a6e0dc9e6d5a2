// The nodes of llama.cpp's routers, which it names "ffn_moe_NAME-LAYER", and what hooks on them share.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "c-calls.h"
#include "ggml.h"
#include "moeedge.h"

namespace moeedge {

inline bool is_router_node(const ggml_tensor * node) {
    return std::strncmp(node->name, "ffn_moe_", 8) == 0;
}

// name: with its hyphen. Whether the node is that of a layer below n_layers, and of which
inline bool is_router_node(const ggml_tensor * node, const char * name, int n_layers, int & layer) {
    const size_t n_name = std::strlen(name);
    if (!is_router_node(node) || std::strncmp(node->name + 8, name, n_name) != 0) {
        return false;
    }
    const char * digits = node->name + 8 + n_name;
    char *       end    = nullptr;
    const long   value  = std::strtol(digits, &end, 10);
    if (end == digits || *end != '\0' || value < 0 || value >= n_layers) {
        return false;
    }
    layer = (int) value;
    return true;
}

// moeedge_router_kind of the node "ffn_moe_probs"
inline int router_kind(const ggml_tensor * probs) {
    if (probs->op == GGML_OP_SOFT_MAX) {
        return MOEEDGE_ROUTER_SOFTMAX;
    }
    const bool is_positive = probs->op == GGML_OP_SQRT || (probs->op == GGML_OP_UNARY && ggml_get_unary_op(probs) == GGML_UNARY_OP_SIGMOID);
    return is_positive ? MOEEDGE_ROUTER_POSITIVE : MOEEDGE_ROUTER_LOGITS;
}

// Makes a hook from n_used [n_layers], experts per token, and further arguments; null: out of memory, or a bad argument
template <typename Hook, typename... Further> Hook * make_hook(int n_layers, int n_experts, const int32_t * n_used, Further... further) {
    const auto is_possible = [n_experts](int32_t n) { return n >= 0 && n <= n_experts; };
    if (n_layers <= 0 || n_experts <= 0 || !n_used || !std::all_of(n_used, n_used + n_layers, is_possible)) {
        return nullptr;
    }
    Hook * made = nullptr;
    guarded([&] { made = new Hook(n_layers, n_experts, n_used, further...); });
    return made;
}

// the eval callback of a hook
template <typename Hook> bool call_hook(ggml_tensor * node, bool ask, void * hook) {
    Hook & self = *(Hook *) hook;
    if (ask) {
        return self.wants(node);
    }
    guarded([&] { self.take(node); });
    return true; // false would end the graph
}

} // namespace moeedge
