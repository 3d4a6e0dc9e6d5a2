#include "subgraph-set.h"

#include <cstring>
#include <exception>

#include "ggml-alloc.h"
#include "ggml-impl.h"

namespace moeedge {

// a step and, if it has a scale, the four that pick it
static constexpr size_t tensors_per_step = 5;
// more than decoding with one draft length needs; prefill has a new number of pairs for every batch
static constexpr size_t n_built_max = 512;
// buffers grow in steps, so that a slightly larger batch does not discard all graphs
static constexpr size_t buffer_step_bytes = 1 << 20;

graph_memory::graph_memory(size_t n_tensors)
    : ctx(ggml_init({ n_tensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, /* .no_alloc = */ true })),
      graph(ctx ? ggml_new_graph_custom(ctx.get(), n_tensors, false) : throw std::bad_alloc()) {}

subgraph_set::subgraph_set(ggml_backend_dev_t device, ggml_backend_buffer_type_t type, runner device_run)
    : dev(device), buft(type), run(std::move(device_run)) {}

subgraph * subgraph_set::get(const expert_chain & chain, int64_t n_pairs, pair_layout layout, const table_list & tables) {
    key.assign((const char *) &n_pairs, sizeof(n_pairs));
    key.push_back((char) layout);
    key += chain.shape;
    if (chain.has_scales) { // scales are inside the graph, as views: they cannot be exchanged
        key.append((const char *) tables.data(), tables.size() * sizeof(tables[0]));
    }
    auto found = built.find(key);
    if (found == built.end()) {
        if (built.size() >= n_built_max) {
            built.clear();
        }
        std::unique_ptr<subgraph> sub = build(chain, n_pairs, layout, tables);
        if (!supports_graph(dev, sub->graph)) {
            sub.reset();
        } else if (!place(sub)) {
            return nullptr; // memory may be free at the next call
        }
        found = built.emplace(key, std::move(sub)).first;
    }
    subgraph * sub = found->second.get();
    if (sub == nullptr) {
        return nullptr;
    }
    for (const subgraph::table_use & use : sub->uses) {
        // written only when it changes: a device may reuse its recording of an unchanged graph
        if (use.node->src[use.src] != tables[use.table]) {
            use.node->src[use.src] = tables[use.table];
        }
    }
    return sub;
}

// a view of a table's factors, picked by id: [1, d1, d2]
static ggml_tensor * build_scale(ggml_context * ctx, ggml_tensor * table, ggml_tensor * ids, int64_t d1, int64_t d2) {
    ggml_tensor * factors = ggml_reshape_2d(ctx, table, 1, ggml_nelements(table));
    ggml_tensor * rows    = ggml_get_rows(ctx, factors, ggml_reshape_1d(ctx, ids, ggml_nelements(ids)));
    return ggml_reshape_3d(ctx, rows, 1, d1, d2);
}

static ggml_tensor * build_node(ggml_context * ctx, const ggml_tensor * original, ggml_tensor * const * srcs, int64_t d1, int64_t d2) {
    if (original->op == GGML_OP_VIEW) {
        // ggml's offset is that from the root, of a view of a view, too
        const size_t before = original->src[0]->view_src ? original->src[0]->view_offs : 0;
        return ggml_view_3d(ctx, srcs[0], original->ne[0], d1, d2, srcs[0]->nb[1], srcs[0]->nb[2], original->view_offs - before);
    }
    if (original->op == GGML_OP_RESHAPE) {
        return ggml_reshape_3d(ctx, srcs[0], original->ne[0], d1, d2);
    }
    ggml_tensor * node = ggml_new_tensor_3d(ctx, original->type, original->ne[0], d1, d2);
    node->op           = original->op;
    std::memcpy(node->op_params, original->op_params, sizeof(node->op_params));
    for (int s = 0; s < 3; s++) {
        node->src[s] = srcs[s];
    }
    return node;
}

size_t chain_tensors_max(const expert_chain & chain) {
    return chain.steps.size() * tensors_per_step;
}

ggml_tensor * build_chain(ggml_context * ctx, const expert_chain & chain, const table_list & tables, ggml_tensor * input,
                          ggml_tensor * ids, std::vector<subgraph::table_use> & uses) {
    const int64_t d1 = ids->ne[0];
    const int64_t d2 = ids->ne[1];

    std::vector<ggml_tensor *> done;
    for (const chain_step & step : chain.steps) {
        ggml_tensor * srcs[3] = {};
        for (int s = 0; s < 3; s++) {
            const operand & from = step.src[s];
            switch (from.kind) {
                case OPERAND_NONE:  break;
                case OPERAND_STEP:  srcs[s] = done[from.index]; break;
                case OPERAND_INPUT: srcs[s] = input; break;
                case OPERAND_IDS:   srcs[s] = ids; break;
                case OPERAND_TABLE: srcs[s] = tables[from.index]; break;
                case OPERAND_SCALE: srcs[s] = build_scale(ctx, tables[from.index], ids, d1, d2); break;
            }
        }
        ggml_tensor * node = build_node(ctx, step.node, srcs, d1, d2);
        for (int s = 0; s < 3; s++) {
            if (step.src[s].kind == OPERAND_TABLE) {
                uses.push_back({ node, s, step.src[s].index });
            }
        }
        done.push_back(node);
    }
    return done.back();
}

ggml_tensor * build_weighted_sum(ggml_context * ctx, ggml_cgraph * graph, ggml_tensor * columns, ggml_tensor * weights) {
    const int64_t n_used   = weights->ne[1];
    const int64_t n_tokens = weights->ne[2];
    ggml_tensor * weighted = ggml_mul(ctx, ggml_reshape_3d(ctx, columns, columns->ne[0], n_used, n_tokens), weights);
    ggml_build_forward_expand(graph, weighted);
    std::vector<ggml_tensor *> places;
    for (int64_t p = 0; p < n_used; p++) { // views before the additions, as llama.cpp orders them: devices fuse these
        places.push_back(ggml_view_2d(ctx, weighted, weighted->ne[0], n_tokens, weighted->nb[2], (size_t) p * weighted->nb[1]));
        ggml_build_forward_expand(graph, places.back());
    }
    ggml_tensor * sum = places[0];
    for (int64_t p = 1; p < n_used; p++) {
        sum = ggml_add(ctx, sum, places[(size_t) p]);
    }
    ggml_set_output(sum);
    ggml_build_forward_expand(graph, sum);
    return sum;
}

std::unique_ptr<subgraph> subgraph_set::build(const expert_chain & chain, int64_t n_pairs, pair_layout layout,
                                              const table_list & tables) {
    const size_t  n_tensors = chain_tensors_max(chain) + tensors_per_step;
    const int64_t d1        = layout == LAYOUT_PAIRS ? 1 : n_pairs;
    const int64_t d2        = layout == LAYOUT_PAIRS ? n_pairs : 1;

    auto           sub           = std::make_unique<subgraph>(n_tensors);
    ggml_context * ctx           = sub->ctx.get();
    const bool     shares_column = layout == LAYOUT_TOKEN && chain.input->ne[1] == 1;
    sub->input = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, chain.input->ne[0], shares_column ? 1 : d1, d2);
    sub->ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, d1, d2);
    ggml_set_input(sub->input);
    ggml_set_input(sub->ids);
    sub->out = build_chain(ctx, chain, tables, sub->input, sub->ids, sub->uses);
    ggml_set_output(sub->out);
    ggml_build_forward_expand(sub->graph, sub->out);
    return sub;
}

bool supports_graph(ggml_backend_dev_t dev, ggml_cgraph * graph) {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        if (!ggml_backend_dev_supports_op(dev, ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

static size_t needed_bytes(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    const size_t alignment = ggml_backend_buft_get_alignment(buft);
    size_t       bytes     = 0;
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src == nullptr && t->buffer == nullptr) {
            bytes += GGML_PAD(ggml_backend_buft_get_alloc_size(buft, t), alignment);
        }
    }
    return bytes + alignment;
}

bool place_tensors(ggml_context * ctx, ggml_backend_buffer_ptr & buffer, ggml_backend_buffer_type_t buft, const std::function<void()> & drop) {
    const size_t bytes = needed_bytes(ctx, buft);
    if (!buffer || bytes > ggml_backend_buffer_get_size(buffer.get())) {
        drop();
        buffer.reset();
        buffer.reset(ggml_backend_buft_alloc_buffer(buft, GGML_PAD(bytes + bytes / 2, buffer_step_bytes)));
        if (!buffer) {
            return false;
        }
    }
    ggml_tallocr alloc = ggml_tallocr_new(buffer.get());
    for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->buffer != nullptr) {
            continue; // it is in another buffer
        }
        const ggml_status status = t->view_src ? ggml_backend_view_init(t) : ggml_tallocr_alloc(&alloc, t);
        if (status != GGML_STATUS_SUCCESS) {
            return false;
        }
    }
    return true;
}

bool subgraph_set::place(std::unique_ptr<subgraph> & sub) {
    auto is_placed = std::make_shared<bool>(false);
    try {
        if (!run([this, at = sub.get(), is_placed] { *is_placed = place_tensors(at->ctx.get(), buffer, buft, [this] { built.clear(); }); })) {
            sub.release(); // the abandoned thread may still read it
            return false;
        }
    } catch (const std::exception &) { // some backends report that memory is short by an exception
        return false;
    }
    return *is_placed;
}

} // namespace moeedge
