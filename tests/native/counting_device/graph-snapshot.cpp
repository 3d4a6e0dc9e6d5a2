#include "graph-snapshot.h"

#include <unordered_map>

#include "device-memory.h"

namespace counting {

static bool computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return !ggml_is_empty(node);
    }
}

// operations that read the parts of a table that ids name
struct table_op {
    int table, ids; // operands
    int dim;        // of the table, that the ids count
};

static const table_op * find_table_op(const ggml_tensor * node) {
    static constexpr table_op experts = { 0, 2, 2 }, biases = { 1, 2, 1 }, rows = { 0, 1, 1 };
    switch (node->op) {
        case GGML_OP_MUL_MAT_ID:
            return &experts;
        case GGML_OP_ADD_ID:
            return &biases;
        case GGML_OP_GET_ROWS:
            return node->src[0]->ne[2] == 1 ? &rows : nullptr;
        default:
            return nullptr;
    }
}

graph_snapshot::graph_snapshot(const ggml_cgraph * graph) {
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies;
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node = graph->nodes[i];
        nodes.push_back(copies[node] = copy_tensor(node));
        if (computes(node)) {
            n_computing++;
            last_name = node->name;
            add_ranges(node);
        }
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        for (ggml_tensor *& src : nodes[i]->src) {
            if (src) {
                ggml_tensor *& copied = copies[src];
                copied                = copied ? copied : copy_tensor(src);
                src                   = copied;
            }
        }
        if (const table_op * op = find_table_op(graph->nodes[i])) {
            const ggml_tensor * table = graph->nodes[i]->src[op->table];
            const size_t        bytes = op->dim == 2 ? table->nb[2] : ggml_row_size(table->type, table->ne[0]);
            lookups.push_back({ nodes[i]->src[op->ids], (const char *) table->data, table->nb[op->dim], bytes, table->ne[op->dim] });
        }
    }

    copy                  = *graph;
    copy.nodes            = nodes.data();
    copy.size             = graph->n_nodes;
    copy.leafs            = nullptr;
    copy.n_leafs          = 0;
    copy.uid              = 0;
    copy.visited_hash_set = ggml_hash_set_new((size_t) graph->n_nodes * 2);
    use_counts.assign(copy.visited_hash_set.size, 0);
    copy.use_counts = use_counts.data();
    for (int i = 0; i < graph->n_nodes; i++) { // the CPU backend fuses what it fuses in the caller's graph
        const bool has_counts = graph->visited_hash_set.size > 0 && graph->use_counts;
        use_counts[ggml_hash_insert(&copy.visited_hash_set, nodes[i])] = has_counts ? ggml_node_get_use_count(graph, i) : 0;
    }
}

graph_snapshot::~graph_snapshot() {
    ggml_hash_set_free(&copy.visited_hash_set);
}

ggml_tensor * graph_snapshot::copy_tensor(const ggml_tensor * tensor) {
    ggml_tensor & copied = tensors.emplace_back(*tensor);
    if (tensor->data) {
        copied.data = real_address(tensor, tensor->data);
        if (copied.data == nullptr && !ggml_is_empty(tensor)) {
            foreign = tensor->name;
        }
    }
    return &copied;
}

void graph_snapshot::add_ranges(const ggml_tensor * node) {
    const table_op * op = find_table_op(node);
    writes.add(node->data, ggml_nbytes(node));
    for (int s = 0; s < GGML_MAX_SRC; s++) {
        if (node->src[s]) {
            (op && op->table == s ? tables : reads).add(node->src[s]->data, ggml_nbytes(node->src[s]));
        }
    }
}

byte_ranges graph_snapshot::picked() const {
    byte_ranges found;
    for (const lookup & pick : lookups) {
        for (int64_t i1 = 0; i1 < pick.ids->ne[1]; i1++) {
            for (int64_t i0 = 0; i0 < pick.ids->ne[0]; i0++) {
                const int32_t id = *(const int32_t *) ((const char *) pick.ids->data + i1 * pick.ids->nb[1] + i0 * pick.ids->nb[0]);
                if (id >= 0 && id < pick.n) { // else the memory of the ids was used again in the same graph
                    found.add(pick.table + (size_t) id * pick.stride, pick.bytes);
                }
            }
        }
    }
    return found;
}

} // namespace counting
