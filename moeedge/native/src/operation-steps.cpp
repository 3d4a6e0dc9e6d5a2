#include "operation-steps.h"

#include <algorithm>
#include <cstdlib>

#include "ggml-impl.h"

namespace moeedge {

static bool is_computed(const ggml_tensor * node) {
    return !ggml_op_is_empty(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

// as ggml_cpu_init reads it, once
static bool fuses_operations() {
    static const bool fuses = [] {
        const char * value = std::getenv("GGML_CPU_DISABLE_FUSION");
        return value == nullptr || std::atoi(value) != 1;
    }();
    return fuses;
}

// as ggml_cpu_try_fuse_ops decides: a norm and the multiplication by its weights are one operation
static bool is_fused_with_next(const ggml_cgraph * graph, int i) {
    const enum ggml_op ops[] = { GGML_OP_RMS_NORM, GGML_OP_MUL };
    if (graph->nodes[i]->op != ops[0] || !fuses_operations() || !ggml_can_fuse(graph, i, ops, 2)) {
        return false;
    }
    const ggml_tensor * norm    = graph->nodes[i];
    const ggml_tensor * mul     = graph->nodes[i + 1];
    const ggml_tensor * weights = mul->src[0] == norm ? mul->src[1] : mul->src[0];
    return norm->src[0]->type == GGML_TYPE_F32 && mul->type == GGML_TYPE_F32 && weights->type == GGML_TYPE_F32 &&
           weights->ne[0] == norm->ne[0] && weights->nb[0] == sizeof(float);
}

static const ggml_tensor * memory_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src : t;
}

// the call of the last operation before node i_end that writes the tensor; 0: none, it is complete before the graph
static int written_at(const ggml_cgraph * graph, const std::vector<int> & call_of, const ggml_tensor * t, int i_end) {
    if (t == nullptr) {
        return 0;
    }
    const ggml_tensor * memory = memory_of(t);
    for (int i = i_end - 1; i >= 0; i--) {
        if (call_of[i] > 0 && memory_of(graph->nodes[i]) == memory) {
            return call_of[i];
        }
    }
    return 0;
}

operation_steps find_steps(const ggml_cgraph * graph, const std::vector<moe_block> & blocks) {
    operation_steps  found = { {}, 0 };
    std::vector<int> call_of(graph->n_nodes, 0); // 0: the node is skipped
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!is_computed(graph->nodes[i])) {
            continue;
        }
        call_of[i] = ++found.n_calls;
        if (is_fused_with_next(graph, i)) {
            call_of[i + 1] = found.n_calls;
            i++;
        }
    }
    int at = 0; // blocks are read in their order
    for (const moe_block & block : blocks) {
        const int ids     = written_at(graph, call_of, block.ids, block.i_first);
        const int weights = written_at(graph, call_of, block.weights, block.i_first);
        const int written = std::max(ids, weights);
        at                = std::max(at, written > 0 ? written + 1 : 0); // complete when the next operation is under way
        found.read_at.push_back(at);
    }
    return found;
}

} // namespace moeedge
