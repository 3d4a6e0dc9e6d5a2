#include "expert-chain.h"

#include <cstring>

#include "fused-nodes.h"
#include "ggml-impl.h"
#include "moe-blocks.h"

namespace moeedge {

// limit of the nodes between the first matmul of a block and its last, views included; gpt-oss has the most, 9
static constexpr int chain_nodes_max = 32;

int count_uses(const ggml_cgraph * graph, const ggml_tensor * t) {
    const size_t pos      = ggml_hash_find(&graph->visited_hash_set, t);
    const bool   is_known = pos != GGML_HASHSET_FULL && ggml_bitset_get(graph->visited_hash_set.used, pos);
    return is_known ? graph->use_counts[pos] : -1;
}

class chain_reader {
  public:
    chain_reader(const ggml_cgraph * cgraph, int first, expert_chain & out_chain)
        : graph(cgraph), i_first(first), chain(out_chain), ids(cgraph->nodes[first]->src[2]) {}

    bool read() {
        const int i_down = find_down();
        chain.ids        = ids;
        for (int i = i_first; i <= i_down; i++) {
            if (!read_node(i)) {
                return false;
            }
        }
        if (chain.steps.empty() || chain.steps.back().node != graph->nodes[i_down] || !is_closed() || !has_plain_ends()) {
            return false;
        }
        chain.i_end = i_down + 1;
        write_shape();
        chain.out = graph->nodes[i_down];
        return true;
    }

  private:
    int find_down() const {
        int i_down = i_first;
        for (int i = i_first; i < graph->n_nodes && i < i_first + chain_nodes_max; i++) {
            const ggml_tensor * node = graph->nodes[i];
            // `down`, or its bias
            if ((node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_ADD_ID) && node->src[2] == ids) {
                i_down = i;
            }
        }
        return i_down;
    }

    // adds the node to the chain, or skips one that only prepares a scale; false: it does not fit
    bool read_node(int i) {
        ggml_tensor * node = graph->nodes[i];
        if (is_scale_part(node)) {
            return true;
        }
        const bool is_view = node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE;
        if ((node->view_src != nullptr && !is_view) || (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 || !is_pair_shaped(node)) {
            return false;
        }
        chain_step step = { node, {} };
        switch (node->op) {
            case GGML_OP_MUL_MAT_ID:
                if (!as_table(node->src[0], step.src[0]) || !as_column(node->src[1], step.src[1]) || node->src[2] != ids) {
                    return false;
                }
                step.src[2] = { OPERAND_IDS, 0 };
                break;
            case GGML_OP_ADD_ID:
                if (!as_step(node->src[0], step.src[0]) || !as_table(node->src[1], step.src[1]) || node->src[2] != ids) {
                    return false;
                }
                step.src[2] = { OPERAND_IDS, 0 };
                break;
            default:
                if (!is_column_op(node->op) || !read_column_op(node, step)) {
                    return false;
                }
        }
        chain.steps.push_back(step);
        return true;
    }

    bool read_column_op(const ggml_tensor * node, chain_step & step) {
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            if (node->src[s] == nullptr) {
                continue;
            }
            if (s >= 2 || (!as_step(node->src[s], step.src[s]) && !(s == 1 && as_scale(node->src[s], step.src[s])))) {
                return false;
            }
        }
        // a reshape of [n, n_used, n_tokens] keeps its columns only if it keeps its shape
        return node->op != GGML_OP_RESHAPE || ggml_are_same_shape(node, node->src[0]);
    }

    // values per pair: [*, n_used, n_tokens]
    bool is_pair_shaped(const ggml_tensor * t) const {
        return t->ne[1] == ids->ne[0] && t->ne[2] == ids->ne[1] && t->ne[3] == 1;
    }

    bool as_step(const ggml_tensor * t, operand & found) const {
        for (size_t i = chain.steps.size(); i-- > 0;) {
            if (chain.steps[i].node == t) {
                found = { OPERAND_STEP, (int) i };
                return true;
            }
        }
        return false;
    }

    bool as_column(ggml_tensor * t, operand & found) {
        if (as_step(t, found)) {
            return true;
        }
        if (chain.input == nullptr) {
            chain.input = t;
        }
        found = { OPERAND_INPUT, 0 };
        return chain.input == t;
    }

    bool as_table(ggml_tensor * t, operand & found) {
        const char * role  = "";
        const int    layer = parse_weight_name(t->name, role);
        if (t->op != GGML_OP_NONE || t->view_src != nullptr || layer < 0 || *role == '\0' ||
            (chain.layer >= 0 && chain.layer != layer)) {
            return false;
        }
        chain.layer = layer;
        for (size_t i = 0; i < chain.tables.size(); i++) {
            if (chain.tables[i].tensor == t) {
                found = { OPERAND_TABLE, (int) i };
                return true;
            }
        }
        found = { OPERAND_TABLE, (int) chain.tables.size() };
        chain.tables.push_back({ t, role });
        return true;
    }

    // get_rows(repeat(reshape(scales)), ids): a factor per pair
    bool as_scale(const ggml_tensor * t, operand & found) {
        if (t->op != GGML_OP_GET_ROWS || t->src[1] != ids) {
            return false;
        }
        ggml_tensor * scales = t->src[0];
        while (scales->op == GGML_OP_REPEAT || scales->op == GGML_OP_RESHAPE) {
            scales = scales->src[0];
        }
        if (scales->type != GGML_TYPE_F32 || ggml_nrows(scales) != 1 || !as_table(scales, found)) {
            return false;
        }
        found.kind       = OPERAND_SCALE;
        chain.has_scales = true;
        return true;
    }

    // one of the nodes that as_scale looks through; each is used once, by the next
    static bool is_scale_part(const ggml_tensor * node) {
        if (node->op == GGML_OP_GET_ROWS) {
            node = node->src[0];
        }
        if (node->op == GGML_OP_REPEAT) {
            node = node->src[0];
        }
        if (node->op != GGML_OP_RESHAPE) {
            return false;
        }
        return node->src[0]->op == GGML_OP_NONE && std::strstr(node->src[0]->name, "_exps.scale") != nullptr;
    }

    // no node outside the chain uses a value inside it: those are no longer computed for the entire batch
    bool is_closed() const {
        for (size_t i = 0; i + 1 < chain.steps.size(); i++) {
            int n_uses = 0;
            for (const chain_step & step : chain.steps) {
                for (const operand & src : step.src) {
                    n_uses += src.kind == OPERAND_STEP && src.index == (int) i;
                }
            }
            if (count_uses(graph, chain.steps[i].node) != n_uses) {
                return false;
            }
        }
        return true;
    }

    bool has_plain_ends() const {
        const ggml_tensor * in  = chain.input;
        const ggml_tensor * out = chain.steps.back().node;
        return in != nullptr && in->type == GGML_TYPE_F32 && in->nb[0] == sizeof(float) && in->ne[2] == ids->ne[1] &&
               (in->ne[1] == 1 || in->ne[1] == ids->ne[0]) && in->ne[3] == 1 && ids->type == GGML_TYPE_I32 &&
               out->type == GGML_TYPE_F32 && out->nb[0] == sizeof(float);
    }

    void write_shape() {
        auto add = [this](const void * data, size_t size) { chain.shape.append((const char *) data, size); };
        for (const chain_step & step : chain.steps) {
            add(&step.node->op, sizeof(step.node->op));
            add(&step.node->type, sizeof(step.node->type));
            add(&step.node->ne[0], sizeof(step.node->ne[0]));
            add(step.node->op_params, sizeof(step.node->op_params));
            if (step.node->op == GGML_OP_VIEW) {
                add(&step.node->view_offs, sizeof(step.node->view_offs));
            }
            for (const operand & src : step.src) {
                add(&src.kind, sizeof(src.kind));
                add(&src.index, sizeof(src.index));
            }
        }
        for (const expert_table & table : chain.tables) {
            add(&table.tensor->type, sizeof(table.tensor->type));
            add(table.tensor->ne, sizeof(table.tensor->ne));
            chain.shape += table.role + '\n';
        }
        const bool has_column_per_expert = chain.input->ne[1] > 1;
        add(&chain.input->ne[0], sizeof(chain.input->ne[0]));
        add(&has_column_per_expert, sizeof(has_column_per_expert));
    }

    const ggml_cgraph * graph;
    const int           i_first;
    expert_chain &      chain;
    ggml_tensor *       ids;
};

expert_chain find_chain(const ggml_cgraph * graph, int i_first) {
    expert_chain chain;
    return chain_reader(graph, i_first, chain).read() ? chain : expert_chain();
}

class sum_reader {
  public:
    sum_reader(const ggml_cgraph * cgraph, const ggml_tensor * of, int i_begin) : graph(cgraph), columns(of), i(i_begin) {}

    bool read(expert_sum & sum) {
        const int64_t       n_used   = columns->ne[1];
        const ggml_tensor * weighted = next();
        if (weighted == nullptr || weighted->op != GGML_OP_MUL || weighted->src[0] != columns || n_used < 2 ||
            is_output(weighted) || !is_weights(weighted->src[1]) || count_uses(graph, columns) != 1 || count_uses(graph, weighted) != n_used) {
            return false;
        }
        std::vector<const ggml_tensor *> places;
        for (int64_t p = 0; p < n_used; p++) {
            const ggml_tensor * view = next();
            if (view == nullptr || !is_place(view, weighted, p)) {
                return false;
            }
            places.push_back(view);
        }
        ggml_tensor * total = nullptr;
        for (int64_t p = 1; p < n_used; p++) {
            ggml_tensor * add = next();
            if (add == nullptr || add->op != GGML_OP_ADD || !is_operation(add) || add->src[0] != (total ? total : places[0]) || add->src[1] != places[p] ||
                (total && (count_uses(graph, total) != 1 || is_output(total)))) {
                return false;
            }
            total = add;
        }
        sum.weights = weighted->src[1];
        sum.out     = total;
        sum.i_end   = i;
        return ggml_is_contiguous(total);
    }

  private:
    ggml_tensor * next() { return i < graph->n_nodes ? graph->nodes[i++] : nullptr; }

    static bool is_output(const ggml_tensor * t) { return (t->flags & GGML_TENSOR_FLAG_OUTPUT) != 0; }

    bool is_weights(const ggml_tensor * t) const {
        return t->type == GGML_TYPE_F32 && t->ne[0] == 1 && t->ne[1] == columns->ne[1] && t->ne[2] == columns->ne[2] && t->ne[3] == 1;
    }

    // the view of one place of all tokens, used once
    bool is_place(const ggml_tensor * t, const ggml_tensor * weighted, int64_t place) const {
        return t->op == GGML_OP_VIEW && t->src[0] == weighted && t->view_offs == place * weighted->nb[1] &&
               t->ne[0] == weighted->ne[0] && t->ne[1] == columns->ne[2] && t->ne[2] == 1 && t->nb[1] == weighted->nb[2] &&
               count_uses(graph, t) == 1 && !is_output(t);
    }

    const ggml_cgraph * graph;
    const ggml_tensor * columns;
    int                 i;
};

expert_sum find_sum(const ggml_cgraph * graph, const ggml_tensor * columns, int i) {
    expert_sum sum;
    return sum_reader(graph, columns, i).read(sum) ? sum : expert_sum();
}

expert_sum find_sum(const ggml_cgraph * graph, const expert_chain & chain) {
    return chain.is_complete() ? find_sum(graph, chain.out, chain.i_end) : expert_sum();
}

} // namespace moeedge
