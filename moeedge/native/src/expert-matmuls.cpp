#include "expert-matmuls.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "timing.h"

namespace moeedge {

// bytes of rows that a thread takes at once: they stay in its second cache while they meet many columns
static constexpr int64_t piece_bytes = 128 * 1024;
// less costs more to hand out than to compute
static constexpr int64_t piece_bytes_min = 16 * 1024;
// pieces per thread, about, so that all end at the same time
static constexpr int64_t n_pieces_per_thread = 8;
// a block of Q8_0 or Q8_K is at most so large, and one call quantizes at most so many
static constexpr size_t  quantized_block_bytes_max = 292;
static constexpr int64_t n_blocks_at_once          = 64;
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
        char *        to       = columns.data() + (size_t) b * kernel.block_bytes;
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

void expert_matmuls::expert_matmul::compute_rows(int32_t expert, int64_t r_begin, int64_t r_end) const {
    const ggml_tensor * rows   = node->src[0];
    const ggml_tensor * x      = node->src[1];
    const bool          dense  = node->src[2] == nullptr;
    const int64_t       n_used = dense ? 1 : node->src[2]->ne[0];
    const size_t        bytes  = input.column_bytes();
    const char *        at     = (const char *) rows->data + expert * rows->nb[2] + r_begin * rows->nb[1];
    const int32_t       p_end   = input.begin[(size_t) expert + 1];
    const int32_t       p_first = input.begin[(size_t) expert];
    const bool          is_many = dense ? has_many_dense(*dots.kernel, node) : p_end - p_first >= n_many_columns;
    const int32_t       n_rest  = dense && is_many && dots.kernel->quantize_fours ? p_end % 4 : 0; // rounded as few
    for (int32_t p_begin = p_first, n = 0; p_begin < p_end; p_begin += n) {
        const void *        column[n_columns_at_once];
        float *             out[n_columns_at_once];
        const bool          is_rest = p_begin == p_end - n_rest;
        const dots_function run     = is_many && !is_rest ? dots.many : dots.few;
        n = std::min((is_rest ? p_end : p_end - n_rest) - p_begin, n_columns_at_once);
        for (int32_t i = 0; i < n; i++) {
            const int64_t token = input.pairs[(size_t) (p_begin + i)] / n_used;
            const int64_t place = input.pairs[(size_t) (p_begin + i)] % n_used;
            const int64_t at_x  = dense ? token : token * x->ne[1] + place % x->ne[1];
            column[i] = input.columns.data() + (size_t) at_x * bytes;
            out[i]    = (float *) ((char *) node->data + place * node->nb[1] + token * node->nb[dense ? 1 : 2]) + r_begin;
        }
        run(rows->ne[0], at, rows->nb[1], r_end - r_begin, column, n, out);
    }
}

// called by all threads; each takes pieces until none is left
void expert_matmuls::expert_matmul::compute(int nth) {
    const ggml_tensor * rows       = node->src[0];
    const int64_t       n_rows     = rows->ne[1];
    const int64_t       n_together = dots.kernel->n_rows_together;
    const int64_t       n_used     = (int64_t) input.used.size();
    const int64_t       row_bytes  = (int64_t) rows->nb[1];
    const int64_t       n_even     = n_rows * n_used / (n_pieces_per_thread * nth);
    const int64_t       n_wanted   = std::min(std::max(n_even, piece_bytes_min / row_bytes), piece_bytes / row_bytes);
    const int64_t       n_taken    = std::max(std::min(n_wanted, n_rows) / n_together, (int64_t) 1) * n_together;
    const int64_t       n_pieces   = (n_rows + n_taken - 1) / n_taken; // of an expert
    for (int64_t piece = next.fetch_add(1); piece < n_pieces * n_used; piece = next.fetch_add(1)) {
        const int64_t r_begin = piece % n_pieces * n_taken;
        compute_rows(input.used[(size_t) (piece / n_pieces)], r_begin, std::min(r_begin + n_taken, n_rows));
    }
}

// nodes

void expert_matmuls::run(ggml_tensor * dst, int ith, int nth, void * data) {
    expert_matmul & matmul = *(expert_matmul *) data;
    matmul.owner.n_runs.load(std::memory_order_acquire);
    if (matmul.input.matmul == matmul.node) {
        matmul.input.prepare(ith, nth);
    }
    matmul.compute(nth);
    matmul.owner.n_runs.fetch_add(1, std::memory_order_release);
    GGML_UNUSED(dst);
}

// rows of one number each, multiplied to rows of many
static bool is_weighting(const ggml_tensor * node) {
    const ggml_tensor * outputs = node->src[0];
    const ggml_tensor * weights = node->src[1];
    return node->op == GGML_OP_MUL && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && node->type == GGML_TYPE_F32 &&
           outputs->type == GGML_TYPE_F32 && weights->type == GGML_TYPE_F32 && weights->ne[0] == 1 && node->ne[0] > 1 &&
           node->ne[3] == 1 && outputs->nb[0] == sizeof(float) && node->nb[0] == sizeof(float);
}

void expert_matmuls::run_weighting(ggml_tensor * dst, int ith, int nth, void * data) {
    expert_matmuls &    owner   = *(expert_matmuls *) data;
    const ggml_tensor * outputs = dst->src[0];
    const ggml_tensor * weights = dst->src[1];
    const int64_t       n_rows  = dst->ne[1] * dst->ne[2];
    owner.n_runs.load(std::memory_order_acquire);
    for (int64_t row = n_rows * ith / nth; row < n_rows * (ith + 1) / nth; row++) {
        const int64_t i1     = row % dst->ne[1];
        const int64_t i2     = row / dst->ne[1];
        const float * from   = (const float *) ((const char *) outputs->data + i1 * outputs->nb[1] + i2 * outputs->nb[2]);
        const char *  at     = (const char *) weights->data + i1 % weights->ne[1] * weights->nb[1] + i2 % weights->ne[2] * weights->nb[2];
        const float   weight = *(const float *) at;
        float *       to     = (float *) ((char *) dst->data + i1 * dst->nb[1] + i2 * dst->nb[2]);
        for (int64_t i = 0; i < dst->ne[0]; i++) {
            to[i] = from[i] * weight;
        }
    }
    owner.n_runs.fetch_add(1, std::memory_order_release);
}

ggml_tensor * expert_matmuls::replace_weighting(const ggml_tensor * node) {
    return replace_with(node, run_weighting, this);
}

// a node of our own that writes to the same memory
ggml_tensor * expert_matmuls::replace_with(const ggml_tensor * node, ggml_custom_op_t run_node, void * data) {
    const ggml_custom_op_params params = { run_node, GGML_N_TASKS_MAX, data };
    ggml_tensor &               ours   = tensors.emplace_back(*node);
    static_assert(sizeof(params) <= sizeof(ours.op_params), "ggml keeps them there");
    ours.op = GGML_OP_CUSTOM;
    std::memcpy(ours.op_params, &params, sizeof(params));
    return &ours;
}

ggml_tensor * expert_matmuls::replace(const chosen_dots & dots, const ggml_tensor * node) {
    if (inputs.empty() || !inputs.back().serves(*dots.kernel, node)) {
        prepared_input & input = inputs.emplace_back(*dots.kernel, node, columns);
        columns.resize(std::max(columns.size(), input.column_bytes() * (size_t) n_columns(node)));
    }
    return replace_with(node, run, &matmuls.emplace_back(*this, inputs.back(), dots, node));
}

// only: null: the kernels that are chosen
enum ggml_status expert_matmuls::compute_replaced(ggml_backend_t cpu, ggml_cgraph * graph, const chosen_dots * only) {
    inputs.clear();
    matmuls.clear();
    tensors.clear();
    tensors.reserve((size_t) graph->n_nodes); // nodes point to them
    for (int i = 0; i < graph->n_nodes; i++) {
        const ggml_tensor * node      = graph->nodes[i];
        const bool          is_matmul = (node->op == GGML_OP_MUL_MAT_ID || node->op == GGML_OP_MUL_MAT) && (node->flags & GGML_TENSOR_FLAG_COMPUTE);
        const chosen_dots   dots      = !is_matmul ? chosen_dots() : only ? *only : choose_dots(node);
        const bool          weighs    = !dots.kernel && !matmuls.empty() && is_weighting(node);
        if (!dots.kernel && !weighs) {
            continue;
        }
        if (matmuls.empty()) {
            nodes.assign(graph->nodes, graph->nodes + graph->n_nodes);
        }
        nodes[(size_t) i] = dots.kernel ? replace(dots, node) : replace_weighting(node);
    }
    if (matmuls.empty()) {
        return ggml_backend_graph_compute(cpu, graph);
    }
    ggml_cgraph replaced = *graph; // uses and hashes stay the original's, so that the CPU backend fuses what it fuses in stock
    replaced.nodes       = nodes.data();
    replaced.uid         = 0;
    n_runs.fetch_add(1, std::memory_order_release);
    const enum ggml_status status = ggml_backend_graph_compute(cpu, &replaced);
    n_runs.load(std::memory_order_acquire);
    return status;
}

enum ggml_status expert_matmuls::compute(ggml_backend_t cpu, ggml_cgraph * graph) {
    return compute_replaced(cpu, graph, nullptr);
}

enum ggml_status expert_matmuls::compute_with(ggml_backend_t cpu, ggml_cgraph * graph, const chosen_dots & dots) {
    return compute_replaced(cpu, graph, &dots);
}

} // namespace moeedge
