#include "expert-matmuls.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "timing.h"

namespace moeedge {

// bytes of rows that a thread takes at once, at most: each new piece costs as much as 15 KB read from memory (Zen 5), and
// where columns meet a piece several times it is read from the cache that holds it
static constexpr int64_t piece_bytes = 2048 * 1024;
// less costs more to hand out than to compute
static constexpr int64_t piece_bytes_min = 16 * 1024;
// pieces per thread, about, so that all end at the same time
static constexpr int64_t n_pieces_per_thread = 8;
// a block of Q8_0 or Q8_K is at most so large, and one call quantizes at most so many
static constexpr size_t  quantized_block_bytes_max = 292;
static constexpr int64_t n_blocks_at_once          = 64;
// bytes that a register and a line of the cache take
static constexpr size_t column_alignment = 64;
// turns of a wait for the other threads before the processor is given away
static constexpr int n_turns_max = 10000;

static int64_t n_columns(const ggml_tensor * matmul) {
    return matmul->src[1]->ne[1] * matmul->src[1]->ne[2];
}

// columns of a dense matrix that ggml quantizes four at a time
static int64_t n_fours(const dot_kernel & kernel, const ggml_tensor * matmul) {
    const bool is_dense = matmul->src[2] == nullptr;
    return is_dense && kernel.quantize_fours && has_many_dense(kernel, matmul) ? n_columns(matmul) / 4 * 4 : 0;
}

// inputs

expert_matmuls::prepared_input::prepared_input(const dot_kernel & k, const ggml_tensor * node, std::vector<char> & all_columns)
    : kernel(k), matmul(node), columns(all_columns), begin((size_t) node->src[0]->ne[2] + 1),
      pairs((size_t) (node->src[2] ? ggml_nelements(node->src[2]) : n_columns(node))) {
    used.reserve(std::min(begin.size(), pairs.size()));
}

bool expert_matmuls::prepared_input::serves(const dot_kernel & other, const ggml_tensor * node) const {
    return matmul->src[1] == node->src[1] && matmul->src[2] == node->src[2] && matmul->src[0]->ne[2] == node->src[0]->ne[2] &&
           kernel.column_type == other.column_type && kernel.pack == other.pack && n_fours(kernel, matmul) == n_fours(other, node);
}

size_t expert_matmuls::prepared_input::column_bytes() const {
    return (size_t) (matmul->src[1]->ne[0] / kernel.column_block) * kernel.block_bytes;
}

char * expert_matmuls::prepared_input::column_data() const {
    const size_t past = (uintptr_t) columns.data() % column_alignment;
    return columns.data() + (past == 0 ? 0 : column_alignment - past);
}

// called by all threads; returns when all have written their part
void expert_matmuls::prepared_input::prepare(int ith, int nth) {
    if (ith == 0) {
        sort_pairs();
    }
    quantize(ith, nth);
    n_done.fetch_add(1, std::memory_order_acq_rel);
    for (int turn = 0; n_done.load(std::memory_order_acquire) < nth; turn++) {
        if (turn < n_turns_max) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

// the thread's share of the blocks of all columns
void expert_matmuls::prepared_input::quantize(int ith, int nth) {
    const ggml_tensor *     x            = matmul->src[1];
    const ggml_from_float_t of_one       = quantizer(kernel.column_type);
    const int64_t           n_of_fours   = n_fours(kernel, matmul);
    const int64_t           n_per_column = x->ne[0] / kernel.column_block;
    const int64_t           n_blocks     = n_per_column * n_columns(matmul);
    const int64_t           end          = n_blocks * (ith + 1) / nth;
    for (int64_t b = n_blocks * ith / nth; b < end;) {
        const int64_t column   = b / n_per_column;
        const int64_t in_it    = b % n_per_column;
        const int64_t n        = std::min({ end - b, n_per_column - in_it, n_blocks_at_once });
        const char *  values   = (const char *) x->data + column % x->ne[1] * x->nb[1] + column / x->ne[1] * x->nb[2];
        const float * from     = (const float *) values + in_it * kernel.column_block;
        char *        to       = column_data() + (size_t) b * kernel.block_bytes;
        const int64_t n_values = n * kernel.column_block;
        const auto    from_float = column < n_of_fours ? kernel.quantize_fours : of_one;
        if (kernel.pack == nullptr) {
            from_float(from, to, n_values);
        } else {
            alignas(8) char quantized[quantized_block_bytes_max * n_blocks_at_once];
            from_float(from, quantized, n_values);
            kernel.pack(quantized, n, to);
        }
        b += n;
    }
}

void expert_matmuls::prepared_input::sort_pairs() {
    const ggml_tensor * ids       = matmul->src[2];
    const int64_t       n_used    = ids ? ids->ne[0] : 1;
    const size_t        n_experts = begin.size() - 1;
    const auto          expert_of = [&](int64_t pair) {
        if (ids == nullptr) { // a dense matrix
            return (size_t) 0;
        }
        const char *  row    = (const char *) ids->data + pair / n_used * ids->nb[1];
        const int32_t expert = *(const int32_t *) (row + pair % n_used * ids->nb[0]);
        GGML_ASSERT(expert >= 0 && (size_t) expert < n_experts);
        return (size_t) expert;
    };
    std::fill(begin.begin(), begin.end(), 0);
    for (size_t p = 0; p < pairs.size(); p++) {
        begin[expert_of((int64_t) p) + 1]++;
    }
    used.clear();
    for (size_t e = 0; e < n_experts; e++) {
        if (begin[e + 1] > 0) {
            used.push_back((int32_t) e);
        }
        begin[e + 1] += begin[e];
    }
    for (size_t p = 0; p < pairs.size(); p++) { // moves the begin of each expert to its end
        pairs[(size_t) begin[expert_of((int64_t) p)]++] = (int32_t) p;
    }
    std::copy_backward(begin.begin(), begin.end() - 1, begin.end());
    begin[0] = 0;
}

// matmuls

void expert_matmuls::matmul_group::compute_rows(const matmul & of, int32_t expert, int64_t r_begin, int64_t r_end) const {
    const ggml_tensor * node   = of.node;
    const ggml_tensor * rows   = node->src[0];
    const ggml_tensor * x      = node->src[1];
    const bool          dense  = node->src[2] == nullptr;
    const int64_t       n_used = dense ? 1 : node->src[2]->ne[0];
    const size_t        bytes  = input.column_bytes();
    const char *        at     = (const char *) rows->data + expert * rows->nb[2] + r_begin * rows->nb[1];
    const int32_t       p_end   = input.begin[(size_t) expert + 1];
    const int32_t       p_first = input.begin[(size_t) expert];
    const bool          is_many = dense ? has_many_dense(*of.dots.kernel, node) : p_end - p_first >= n_many_columns;
    const int32_t       n_rest  = dense && is_many && of.dots.kernel->quantize_fours ? p_end % 4 : 0; // rounded as few
    for (int32_t p_begin = p_first, n = 0; p_begin < p_end; p_begin += n) {
        const void *        column[n_columns_at_once];
        float *             out[n_columns_at_once];
        const bool          is_rest = p_begin == p_end - n_rest;
        const dots_function run     = is_many && !is_rest ? of.dots.many : of.dots.few;
        n = std::min((is_rest ? p_end : p_end - n_rest) - p_begin, n_columns_at_once);
        for (int32_t i = 0; i < n; i++) {
            const int64_t token = input.pairs[(size_t) (p_begin + i)] / n_used;
            const int64_t place = input.pairs[(size_t) (p_begin + i)] % n_used;
            const int64_t at_x  = dense ? token : token * x->ne[1] + place % x->ne[1];
            column[i] = input.column_data() + (size_t) at_x * bytes;
            out[i]    = (float *) ((char *) node->data + place * node->nb[1] + token * node->nb[dense ? 1 : 2]) + r_begin;
        }
        run(rows->ne[0], at, rows->nb[1], r_end - r_begin, column, n, out);
    }
}

// of an expert's columns
void expert_matmuls::matmul_group::compute_unit(int32_t expert, int64_t r_begin, int64_t r_end) const {
    const ggml_tensor * ids    = matmuls.front().node->src[2];
    const int64_t       n_used = ids ? ids->ne[0] : 1;
    for (int32_t p = input.begin[(size_t) expert]; p < input.begin[(size_t) expert + 1]; p++) {
        const int64_t pair = input.pairs[(size_t) p];
        unit.compute(pair % n_used, pair / n_used, expert, r_begin, r_end);
    }
}

// called by all threads; each takes pieces until none is left
void expert_matmuls::matmul_group::compute_pieces(int nth) {
    const bool    has_unit = unit.i_end > 0; // a piece is one of both matmuls, and of the activation
    const int64_t n_used   = (int64_t) input.used.size();
    int64_t       piece    = next.fetch_add(1);
    int64_t       n_begin  = 0; // pieces of the matmuls before
    for (size_t m = 0; m < (has_unit ? 1 : matmuls.size()); m++) {
        const ggml_tensor * rows       = matmuls[m].node->src[0];
        const int64_t       n_rows     = rows->ne[1];
        const int64_t       n_together = has_unit ? gated_unit::n_values_together : matmuls[m].dots.kernel->n_rows_together;
        const int64_t       row_bytes  = (int64_t) rows->nb[1];
        const int64_t       n_even     = n_rows * n_used / (n_pieces_per_thread * nth);
        const int64_t       n_wanted   = std::min(std::max(n_even, piece_bytes_min / row_bytes), piece_bytes / row_bytes);
        const int64_t       n_taken    = std::max(std::min(n_wanted, n_rows) / n_together, (int64_t) 1) * n_together;
        const int64_t       n_pieces   = (n_rows + n_taken - 1) / n_taken; // of an expert
        for (; piece - n_begin < n_pieces * n_used; piece = next.fetch_add(1)) {
            const int32_t expert  = input.used[(size_t) ((piece - n_begin) / n_pieces)];
            const int64_t r_begin = (piece - n_begin) % n_pieces * n_taken;
            const int64_t r_end   = std::min(r_begin + n_taken, n_rows);
            compute_rows(matmuls[m], expert, r_begin, r_end);
            if (has_unit) {
                compute_rows(matmuls[1], expert, r_begin, r_end);
                compute_unit(expert, r_begin, r_end);
            }
        }
        n_begin += n_pieces * n_used;
    }
}

void expert_matmuls::matmul_group::compute(int ith, int nth) {
    if (ith == 0 && read.block) {
        read.compute(ith, nth);
    }
    if (ith == 0 && copied) {
        copied->copy_routing();
    }
    if (input.matmul == matmuls.front().node) {
        input.prepare(ith, nth);
    }
    compute_pieces(nth);
}

void expert_matmuls::routing_read::compute(int ith, int) const {
    if (ith == 0) {
        reads->read(*block);
    }
}

// nodes

// What a node computes was written by the calling thread before; sanitizers do not see the barrier between nodes, so n_runs orders
// the threads for them, before anything else is read.
static std::atomic<int> n_runs{ 0 };

template <typename T> static void run(ggml_tensor *, int ith, int nth, void * data) {
    n_runs.load(std::memory_order_acquire);
    ((T *) data)->compute(ith, nth);
    n_runs.fetch_add(1, std::memory_order_release);
}

static void run_weighting(ggml_tensor * dst, int ith, int nth, void *) {
    n_runs.load(std::memory_order_acquire);
    compute_weighting(dst, ith, nth);
    n_runs.fetch_add(1, std::memory_order_release);
}

// a node of our own that writes to the same memory
void expert_matmuls::add_node(const ggml_tensor * like, ggml_custom_op_t run_node, void * data) {
    const ggml_custom_op_params params = { run_node, GGML_N_TASKS_MAX, data };
    ggml_tensor &               ours   = tensors.emplace_back(*like);
    static_assert(sizeof(params) <= sizeof(ours.op_params), "ggml keeps them there");
    ours.op = GGML_OP_CUSTOM;
    ours.flags |= GGML_TENSOR_FLAG_COMPUTE;
    std::memcpy(ours.op_params, &params, sizeof(params));
    nodes.push_back(&ours);
    newest = nullptr;
}

// only: null: the kernels that are chosen
static chosen_dots dots_of(const ggml_tensor * node, const chosen_dots * only) {
    const bool is_matmul = (node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_MUL_MAT) && is_operation(node);
    return !is_matmul ? chosen_dots() : only ? *only : choose_dots(node);
}

// Adds the matmul that is node i and those with it; returns the next node, or i: it is no matmul of ours
int expert_matmuls::add_matmul(const ggml_cgraph * graph, int i, const chosen_dots * only, const moe_block * read) {
    const ggml_tensor * node = graph->nodes[i];
    const chosen_dots   dots = dots_of(node, only);
    if (dots.kernel == nullptr) {
        return i;
    }
    const bool is_served = !inputs.empty() && inputs.back().serves(*dots.kernel, node);
    if (!is_served) {
        prepared_input & input = inputs.emplace_back(*dots.kernel, node, columns);
        columns.resize(std::max(columns.size(), input.column_bytes() * (size_t) n_columns(node) + column_alignment));
    }
    const bool is_apart_of_others = newest && std::all_of(newest->matmuls.begin(), newest->matmuls.end(), [node](const matmul & each) {
        return is_apart(node, each.node);
    });
    if (is_served && is_apart_of_others && !read) {
        newest->matmuls.push_back({ dots, node });
        return i + 1;
    }
    matmul_group & group = groups.emplace_back(inputs.back());
    group.read           = { reads, read };
    group.matmuls.push_back({ dots, node });
    const gated_unit  unit   = gated_unit(graph, i);
    const chosen_dots second = unit.i_end > 0 ? dots_of(unit.matmuls[1], only) : chosen_dots();
    if (second.kernel && inputs.back().serves(*second.kernel, unit.matmuls[1])) {
        group.matmuls.push_back({ second, unit.matmuls[1] });
        group.unit = unit;
        add_node(unit.out, run<matmul_group>, &group);
        return unit.i_end;
    }
    add_node(node, run<matmul_group>, &group);
    newest = &group;
    return i + 1;
}

// adds node i, which is no matmul of ours, or a node of ours for it and those after it; returns the next node
int expert_matmuls::add_other(const ggml_cgraph * graph, int i) {
    ggml_tensor * node = graph->nodes[i];
    if (newest && newest->matmuls.back().node->op == GGML_OP_MUL_MAT_ID) {
        weighted_sum sum(graph, newest->matmuls.back().node, i);
        if (sum.i_end > 0) {
            newest->copied = &sums.emplace_back(std::move(sum));
            add_node(sums.back().out, run<weighted_sum>, &sums.back());
            return sums.back().i_end;
        }
    }
    const router_weights router(graph, i);
    if (router.i_end > 0 && may_replace()) {
        add_node(router.out, run<router_weights>, &routers.emplace_back(router));
        return router.i_end;
    }
    if (const attention_kernels kernels = choose_attention(node, n_threads); kernels.few) {
        add_node(node, run<attention_node>, &attentions.emplace_back(node, kernels, head_parts, n_threads));
        return i + 1;
    }
    if (!groups.empty() && is_weighting(node)) {
        add_node(node, run_weighting, nullptr);
        return i + 1;
    }
    nodes.push_back(node);
    newest = is_operation(node) ? nullptr : newest;
    return i + 1;
}

void expert_matmuls::replace_nodes(const ggml_cgraph * graph, const chosen_dots * only) {
    size_t            b           = 0; // the block after the next one that is read
    const moe_block * block       = nullptr;
    bool              reads_apart = false; // in a node of its own
    const auto        next_block  = [&] {
        block       = reads && b < reads->blocks.size() ? &reads->blocks[b++] : nullptr;
        reads_apart = block && (block->weighs_input || !dots_of(graph->nodes[block->i_first], only).kernel);
    };
    const auto        add_read    = [&] {
        add_node(block->ids, run<routing_read>, &own_reads.emplace_back(routing_read{ reads, block }));
        std::fill_n(tensors.back().ne, GGML_MAX_DIMS, 1); // ggml leaves out what is empty, and a block without tokens is read, too
        next_block();
    };
    next_block();
    for (int i = 0; i < graph->n_nodes;) {
        while (block && reads_apart && block->i_routed <= i) {
            add_read();
        }
        const bool is_first = block && block->i_first == i;
        const int  i_after  = add_matmul(graph, i, only, is_first ? block : nullptr);
        if (is_first && i_after > i) {
            next_block();
        } else if (is_first) { // another thread has just changed the choice of kernels
            add_read();
        }
        i = i_after > i ? i_after : add_other(graph, i);
    }
}

enum ggml_status expert_matmuls::compute(ggml_backend_t cpu, ggml_cgraph * graph, const routing_reads * of, const chosen_dots * only) {
    reads = of;
    inputs.clear();
    groups.clear();
    sums.clear();
    routers.clear();
    attentions.clear();
    own_reads.clear();
    tensors.clear();
    nodes.clear();
    newest = nullptr;
    replace_nodes(graph, only);
    if (tensors.empty()) {
        return ggml_backend_graph_compute(cpu, graph);
    }
    ggml_cgraph replaced = *graph; // uses and hashes stay the original's, so that the CPU backend fuses what it fuses in stock
    replaced.nodes       = nodes.data();
    replaced.n_nodes     = (int) nodes.size();
    replaced.uid         = 0;
    n_runs.fetch_add(1, std::memory_order_release);
    const enum ggml_status status = ggml_backend_graph_compute(cpu, &replaced);
    n_runs.load(std::memory_order_acquire);
    return status;
}

} // namespace moeedge
