#include "moe-blocks.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "ggml-impl.h"
#include "router-nodes.h"

namespace moeedge {

// the most nodes from down back to up: activation, bias, scale, clamp and views
static constexpr int chain_depth = 12;
// the most nodes that are looked at for one: values that many paths reach, as x * x * x does, are looked at again for each path
static constexpr int chain_visits = 64;

bool is_column_op(enum ggml_op op) {
    switch (op) {
        case GGML_OP_GLU:
        case GGML_OP_UNARY:
        case GGML_OP_ADD:
        case GGML_OP_MUL:
        case GGML_OP_SCALE:
        case GGML_OP_CLAMP:
        case GGML_OP_SQR:
        case GGML_OP_CONT:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
            return true;
        default:
            return false;
    }
}

// of the nodes from down back to up, as they are followed from a single node: an ADD may be the sum of a token's experts
static bool is_chain_op(enum ggml_op op) {
    return op == GGML_OP_ADD_ID || (op != GGML_OP_ADD && is_column_op(op));
}

static const ggml_tensor * find_expert_matmul(const ggml_tensor * node, int depth, int & n_visits) {
    if (node == nullptr || depth == 0 || n_visits == chain_visits) {
        return nullptr;
    }
    n_visits++;
    if (node->op == GGML_OP_MUL_MAT_ID) {
        return node;
    }
    if (!is_chain_op(node->op)) {
        return nullptr;
    }
    for (int i = 0; i < 2; i++) {
        const ggml_tensor * found = find_expert_matmul(node->src[i], depth - 1, n_visits);
        if (found) {
            return found;
        }
    }
    return nullptr;
}

// the MUL_MAT_ID from which a node's value is computed by element-wise nodes only, or nullptr
static const ggml_tensor * expert_matmul_of(const ggml_tensor * node) {
    int n_visits = 0;
    return find_expert_matmul(node, chain_depth, n_visits);
}

// values per (token, expert) pair keep the shape [*, n_used, n_tokens] of the matmul they come from
static bool is_pair_shaped(const ggml_tensor * node, const ggml_tensor * matmul) {
    const ggml_tensor * ids = matmul->src[2];
    return node->ne[1] == ids->ne[0] && node->ne[2] == ids->ne[1];
}

static bool is_weights_of(const ggml_tensor * t, const ggml_tensor * ids) {
    return t != nullptr && t->type == GGML_TYPE_F32 && t->ne[0] == 1 && t->ne[1] == ids->ne[0] && t->ne[2] == ids->ne[1];
}

int parse_weight_name(const char * name, const char *& role) {
    int layer  = -1;
    int n_read = 0;
    if (std::sscanf(name, "blk.%d.%n", &layer, &n_read) != 1 || n_read == 0) {
        return -1;
    }
    role = name + n_read;
    return layer;
}

// a view of one place of all tokens, of values per pair
static bool is_view_of_place(const ggml_tensor * t) {
    if (t->op != GGML_OP_VIEW) {
        return false;
    }
    const ggml_tensor * matmul = expert_matmul_of(t->src[0]);
    return matmul != nullptr && is_pair_shaped(t->src[0], matmul) && t->ne[1] == t->src[0]->ne[2] && t->ne[2] == 1;
}

// A token's experts are summed place by place. If another backend took these sums, ggml would copy each place on its own,
// including the columns in between: n_used times the entire tensor.
static bool is_sum_node(const ggml_tensor * node) {
    return node->op == GGML_OP_ADD && is_view_of_place(node->src[1]) &&
           (node->src[0]->op == GGML_OP_ADD || is_view_of_place(node->src[0]));
}

bool is_block_node(const ggml_tensor * node) {
    if (node->op == GGML_OP_MUL_MAT_ID || (is_router_node(node) && std::strncmp(node->name, "ffn_moe_out", 11) != 0) || is_sum_node(node)) {
        return true;
    }
    if (!is_chain_op(node->op)) {
        return false;
    }
    const ggml_tensor * matmul = expert_matmul_of(node);
    return matmul != nullptr && is_pair_shaped(node, matmul);
}

int64_t block_node_tokens(const ggml_tensor * node) {
    const ggml_tensor * matmul = expert_matmul_of(node);
    return matmul ? matmul->src[2]->ne[1] : node->ne[2] > 1 ? node->ne[2] : node->ne[1];
}

// whether `t` is computed by one of the nodes [i_begin, i_end)
static bool is_computed_within(const ggml_cgraph * graph, const ggml_tensor * t, int i_begin, int i_end) {
    for (int i = i_begin; i < i_end; i++) {
        if (graph->nodes[i] == t || graph->nodes[i] == t->view_src) {
            return true;
        }
    }
    return false;
}

static const ggml_tensor * memory_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// index of the node after the last one before i_end that writes the tensor; 0: none, it is complete before the graph
static int written_before(const ggml_cgraph * graph, const ggml_tensor * t, int i_end) {
    for (int i = i_end - 1; t != nullptr && i >= 0; i--) {
        if (!ggml_op_is_empty(graph->nodes[i]->op) && memory_of(graph->nodes[i]) == memory_of(t)) {
            return i + 1;
        }
    }
    return 0;
}

void read_ids(const ggml_tensor * ids, std::vector<int32_t> & out) {
    const int64_t n_used   = ids->ne[0];
    const int64_t n_tokens = ids->ne[1];
    out.resize(n_used * n_tokens);
    for (int64_t t = 0; t < n_tokens; t++) {
        const char * row = (const char *) ids->data + t * ids->nb[1];
        for (int64_t i = 0; i < n_used; i++) {
            out[t * n_used + i] = *(const int32_t *) (row + i * ids->nb[0]);
        }
    }
}

// GroveMoE has a second block per layer, with an expert for each group of the first's. It names groups instead of experts, and no
// cache holds them: it is computed as the dense parts are.
static bool is_of_groups(const ggml_tensor * weights) {
    return std::strstr(weights->name, "_chexps.") != nullptr;
}

void find_blocks(const ggml_cgraph * graph, std::vector<moe_block> & blocks) {
    blocks.clear();
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        if (node->op == GGML_OP_MUL_MAT_ID) {
            if (is_of_groups(node->src[0])) {
                continue;
            }
            if (blocks.empty() || blocks.back().ids != node->src[2]) {
                const char * role = nullptr;
                blocks.push_back({ parse_weight_name(node->src[0]->name, role), i, node->src[2], nullptr });
                // weights applied before the experts (llama4) are the node before the first matmul
                const ggml_tensor * before = node->src[1];
                if (before->op == GGML_OP_MUL && is_weights_of(before->src[1], node->src[2])) {
                    blocks.back().weights      = before->src[1];
                    blocks.back().weighs_input = true;
                }
            }
        } else if (node->op == GGML_OP_MUL && !blocks.empty() && blocks.back().weights == nullptr) {
            moe_block &         block  = blocks.back();
            const ggml_tensor * matmul = expert_matmul_of(node->src[0]);
            if (is_weights_of(node->src[1], block.ids) && matmul != nullptr && matmul->src[2] == block.ids &&
                !is_computed_within(graph, node->src[1], block.i_first, i)) {
                block.weights = node->src[1];
            }
        }
    }
    int i_least = 0;
    for (moe_block & block : blocks) {
        block.i_routed = std::max({ i_least, written_before(graph, block.ids, block.i_first), written_before(graph, block.weights, block.i_first) });
        i_least        = block.i_first + 1;
    }
}

} // namespace moeedge
