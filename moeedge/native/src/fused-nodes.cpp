#include "fused-nodes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <dlfcn.h>

#include "expert-chain.h"
#include "ggml-impl.h"

namespace moeedge {

// values of a token that a thread sums at once
static constexpr int64_t n_summed_at_once = 256;
// experts per token, at most
static constexpr int64_t n_used_max = 64;

bool is_operation(const ggml_tensor * node) {
    return !ggml_op_is_empty(node->op) && (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0;
}

bool is_apart(const ggml_tensor * written, const ggml_tensor * read, bool by_value) {
    const char * a = (const char *) written->data;
    const char * b = (const char *) read->data;
    return a + ggml_nbytes(written) <= b || b + ggml_nbytes(read) <= a || (by_value && a == b && written->nb[1] == read->nb[1]);
}

// the next operation from node i on, whose index is written to i; null: the graph ends
static const ggml_tensor * next_operation(const ggml_cgraph * graph, int & i) {
    while (i < graph->n_nodes && !is_operation(graph->nodes[i])) {
        i++;
    }
    return i < graph->n_nodes ? graph->nodes[i] : nullptr;
}

// whether so many nodes alone need the value
static bool is_between(const ggml_cgraph * graph, const ggml_tensor * node, int n_uses = 1) {
    return count_uses(graph, node) == n_uses && (node->flags & GGML_TENSOR_FLAG_OUTPUT) == 0;
}

static bool is_rows(const ggml_tensor * t) {
    return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float);
}

// the tensor that a reshaped one has its values of
static const ggml_tensor * before_reshape(const ggml_tensor * t) {
    return t->op == GGML_OP_RESHAPE ? t->src[0] : t;
}

// weighting

bool is_weighting(const ggml_tensor * node) {
    const ggml_tensor * outputs = node->src[0];
    const ggml_tensor * weights = node->src[1];
    return node->op == GGML_OP_MUL && (node->flags & GGML_TENSOR_FLAG_COMPUTE) && is_rows(node) && is_rows(outputs) &&
           weights->type == GGML_TYPE_F32 && weights->ne[0] == 1 && node->ne[0] > 1 && node->ne[3] == 1;
}

void compute_weighting(const ggml_tensor * node, int ith, int nth) {
    const ggml_tensor * outputs = node->src[0];
    const ggml_tensor * weights = node->src[1];
    const int64_t       n_rows  = node->ne[1] * node->ne[2];
    for (int64_t row = n_rows * ith / nth; row < n_rows * (ith + 1) / nth; row++) {
        const int64_t i1     = row % node->ne[1];
        const int64_t i2     = row / node->ne[1];
        const float * from   = (const float *) ((const char *) outputs->data + i1 * outputs->nb[1] + i2 * outputs->nb[2]);
        const char *  at     = (const char *) weights->data + i1 % weights->ne[1] * weights->nb[1] + i2 % weights->ne[2] * weights->nb[2];
        const float   weight = *(const float *) at;
        float *       to     = (float *) ((char *) node->data + i1 * node->nb[1] + i2 * node->nb[2]);
        for (int64_t i = 0; i < node->ne[0]; i++) {
            to[i] = from[i] * weight;
        }
    }
}

// router

router_weights::router_weights(const ggml_cgraph * graph, int i) {
#if defined(__APPLE__)
    return; // ggml may sum with another library there
#endif
    const ggml_tensor * chosen = graph->nodes[i];
    if (chosen->op != GGML_OP_GET_ROWS || !is_operation(chosen) || chosen->src[0]->ne[0] != 1 || !is_rows(chosen->src[0]) ||
        chosen->ne[1] > n_used_max || chosen->ne[3] != 1 || !ggml_is_contiguous(chosen) || (chosen->flags & GGML_TENSOR_FLAG_OUTPUT) != 0) {
        return;
    }
    const auto follows = [&](enum ggml_op op) {
        i++;
        const ggml_tensor * found = next_operation(graph, i);
        return found && found->op == op ? found : nullptr;
    };
    const ggml_tensor * sum     = follows(GGML_OP_SUM_ROWS);
    const ggml_tensor * clamped = sum ? follows(GGML_OP_CLAMP) : nullptr;
    const ggml_tensor * divided = clamped ? follows(GGML_OP_DIV) : nullptr;
    // two nodes use the chosen weights by way of one reshape
    if (divided == nullptr || clamped->src[0] != sum || divided->src[1] != clamped || divided->src[0] != sum->src[0] ||
        before_reshape(sum->src[0]) != chosen || sum->src[0]->ne[0] != chosen->ne[1] || sum->src[0]->ne[1] != chosen->ne[2] ||
        !is_between(graph, sum) || !is_between(graph, clamped) || !ggml_is_contiguous(divided) || clamped->type != GGML_TYPE_F32 ||
        !is_between(graph, sum->src[0], 2) || (sum->src[0] != chosen && !is_between(graph, chosen))) {
        return;
    }
    std::memcpy(&sum_min, clamped->op_params, sizeof(float));
    std::memcpy(&sum_max, (const float *) clamped->op_params + 1, sizeof(float));
    out   = divided;
    i_end = i + 1;
    const ggml_tensor * scaled = follows(GGML_OP_SCALE);
    float               bias   = 0;
    if (scaled) {
        std::memcpy(&bias, (const float *) scaled->op_params + 1, sizeof(float));
    }
    const bool is_reshaped = scaled && scaled->src[0] != divided;
    if (scaled && before_reshape(scaled->src[0]) == divided && bias == 0 && is_between(graph, divided) && ggml_is_contiguous(scaled) &&
        (!is_reshaped || is_between(graph, scaled->src[0]))) {
        std::memcpy(&factor, scaled->op_params, sizeof(float));
        is_scaled = true;
        out       = scaled;
        i_end     = i + 1;
    }
    probs = chosen->src[0];
    ids   = chosen->src[1];
    is_apart_of_probs = is_apart(out, probs);
    // token by token it may overwrite what is read already
    if (!is_apart(out, ids) || (!is_apart_of_probs && (out->data > probs->data || probs->ne[1] < ids->ne[0] || !ggml_is_contiguous(probs)))) {
        i_end = 0;
    }
}

void router_weights::compute(int ith, int nth) const {
    const int64_t n_used   = ids->ne[0];
    const int64_t n_tokens = ids->ne[1];
    if (!is_apart_of_probs && ith > 0) {
        return; // the first thread has all tokens
    }
    nth = is_apart_of_probs ? nth : 1;
    for (int64_t t = n_tokens * ith / nth; t < n_tokens * (ith + 1) / nth; t++) {
        float  weights[n_used_max];
        double sum = 0;
        for (int64_t p = 0; p < n_used; p++) {
            const int32_t expert = *(const int32_t *) ((const char *) ids->data + p * ids->nb[0] + t * ids->nb[1]);
            GGML_ASSERT(expert >= 0 && expert < probs->ne[1]);
            weights[p] = *(const float *) ((const char *) probs->data + expert * probs->nb[1] + t * probs->nb[2]);
            sum += (double) weights[p];
        }
        const float all = (float) sum;
        const float low = all < sum_max ? all : sum_max; // as ggml's MIN and MAX have it for what is no number
        const float by  = low > sum_min ? low : sum_min;
        for (int64_t p = 0; p < n_used; p++) {
            const float found                      = weights[p] / by;
            ((float *) out->data)[t * n_used + p] = is_scaled ? found * factor : found;
        }
    }
}

// sums

// the node that adds something of the same shape to the sum; -1: the next operation does not
static int find_addition(const ggml_cgraph * graph, const expert_sum & sum) {
    int                 i   = sum.i_end;
    const ggml_tensor * add = next_operation(graph, i);
    if (add == nullptr || add->op != GGML_OP_ADD || (add->src[0] == sum.out) == (add->src[1] == sum.out)) {
        return -1;
    }
    const ggml_tensor * other = add->src[add->src[0] == sum.out ? 1 : 0];
    return is_rows(other) && is_rows(add) && ggml_are_same_shape(other, sum.out) && is_between(graph, sum.out) && is_apart(add, other, true) ? i : -1;
}

weighted_sum::weighted_sum(const ggml_cgraph * graph, const ggml_tensor * down, int i) {
    const ggml_tensor * node    = graph->nodes[i];
    const bool          is_bias = node->op == GGML_OP_ADD_ID;
    if (!is_operation(node) || (node->op != GGML_OP_MUL && !is_bias) || node->src[0] != down || !is_rows(node)) {
        return;
    }
    const auto is_apart_of_all = [&](const ggml_tensor * written) {
        return is_apart(written, down) && (!is_bias || is_apart(written, node->src[1]));
    };
    if (is_bias && (!is_rows(node->src[1]) || node->src[2] != down->src[2] || !is_between(graph, down))) {
        return;
    }
    const expert_sum sum = is_bias ? find_sum(graph, node, i + 1) : find_sum(graph, down, i);
    if (!sum.is_complete() || (is_bias && (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0)) {
        return;
    }
    const int           i_add = find_addition(graph, sum);
    const ggml_tensor * add   = i_add >= 0 && is_apart_of_all(graph->nodes[i_add]) ? graph->nodes[i_add] : nullptr;
    out                       = add ? add : sum.out;
    if (!is_apart_of_all(out)) {
        return;
    }
    columns = down;
    biases  = is_bias ? node->src[1] : nullptr;
    weights = sum.weights;
    added   = add ? add->src[add->src[0] == sum.out ? 1 : 0] : nullptr;
    i_end   = add ? i_add + 1 : sum.i_end;
    factors.resize((size_t) (down->ne[1] * down->ne[2]));
    experts.resize(is_bias ? factors.size() : 0);
}

void weighted_sum::copy_routing() {
    const size_t        n_used = (size_t) columns->ne[1];
    const ggml_tensor * ids    = columns->src[2];
    for (size_t p = 0; p < factors.size(); p++) {
        factors[p] = *(const float *) ((const char *) weights->data + p % n_used * weights->nb[1] + p / n_used * weights->nb[2]);
        if (biases) {
            experts[p] = *(const int32_t *) ((const char *) ids->data + p % n_used * ids->nb[0] + p / n_used * ids->nb[1]);
        }
    }
}

void weighted_sum::compute(int ith, int nth) const {
    const int64_t n_used   = columns->ne[1];
    const int64_t n_pieces = (out->ne[0] + n_summed_at_once - 1) / n_summed_at_once; // of a token
    const int64_t n_all    = n_pieces * columns->ne[2];
    for (int64_t piece = n_all * ith / nth; piece < n_all * (ith + 1) / nth; piece++) {
        const int64_t token   = piece / n_pieces;
        const int64_t i_begin = piece % n_pieces * n_summed_at_once;
        const int64_t n       = std::min(out->ne[0] - i_begin, n_summed_at_once);
        float         sum[n_summed_at_once];
        for (int64_t place = 0; place < n_used; place++) {
            const size_t  pair   = (size_t) (token * n_used + place);
            const float   factor = factors[pair];
            const float * from   = (const float *) ((const char *) columns->data + place * columns->nb[1] + token * columns->nb[2]) + i_begin;
            const float * bias   = biases ? (const float *) ((const char *) biases->data + experts[pair] * biases->nb[1]) + i_begin : nullptr;
            for (int64_t i = 0; i < n; i++) {
                const float product = (bias ? from[i] + bias[i] : from[i]) * factor;
                sum[i]              = place == 0 ? product : sum[i] + product;
            }
        }
        const float * other = added ? (const float *) ((const char *) added->data + token * added->nb[1]) + i_begin : nullptr;
        float *       to    = (float *) ((char *) out->data + token * out->nb[1]) + i_begin;
        for (int64_t i = 0; i < n; i++) {
            to[i] = other ? sum[i] + other[i] : sum[i];
        }
    }
}

// activation

using swiglu_function = void (*)(int n, float * out, const float * gate, const float * up);

// ggml's own, in the library of the CPU backend; null: it does not offer it
static swiglu_function find_swiglu() {
    static const auto found = (swiglu_function) dlsym(RTLD_DEFAULT, "ggml_vec_swiglu_f32");
    return found;
}

static bool is_gate_known(const ggml_tensor * node) {
    const enum ggml_glu_op op = ggml_get_glu_op(node);
    return (op == GGML_GLU_OP_SWIGLU && find_swiglu() != nullptr) || op == GGML_GLU_OP_SWIGLU_OAI;
}

gated_unit::gated_unit(const ggml_cgraph * graph, int i) {
    const ggml_tensor * values[2] = {}; // with their biases
    for (int m = 0; m < 2; m++) {
        const ggml_tensor * matmul = next_operation(graph, i);
        if (matmul == nullptr || (m == 1 && (matmul->op != matmuls[0]->op || matmul->src[1] != matmuls[0]->src[1] ||
                                             matmul->src[2] != matmuls[0]->src[2] || !ggml_are_same_shape(matmul, matmuls[0])))) {
            return;
        }
        matmuls[m] = values[m] = matmul;
        i++;
        const ggml_tensor * add = next_operation(graph, i);
        if (add && add->op == GGML_OP_ADD_ID && add->src[0] == matmul && add->src[2] == matmul->src[2] && is_rows(add->src[1]) && is_rows(add)) {
            biases[m] = add->src[1];
            values[m] = add;
            i++;
        }
        if (!is_rows(matmul) || !is_between(graph, matmul) || !is_between(graph, values[m])) {
            return;
        }
    }
    const ggml_tensor * glu = next_operation(graph, i);
    if (glu == nullptr || glu->op != GGML_OP_GLU || !is_rows(glu) || !is_gate_known(glu)) {
        return;
    }
    for (const ggml_tensor * bias : biases) {
        if (bias && (!is_apart(glu, bias) || !is_apart(matmuls[0], bias) || !is_apart(matmuls[1], bias))) {
            return;
        }
    }
    gate = glu->src[0] == values[0] ? 0 : 1;
    if (glu->src[0] != values[gate] || glu->src[1] != values[1 - gate] || !is_apart(matmuls[0], matmuls[1]) || !is_apart(glu, matmuls[0]) || !is_apart(glu, matmuls[1])) {
        return;
    }
    out   = glu;
    i_end = i + 1;
}

static float * column_of(const ggml_tensor * t, int64_t place, int64_t token) {
    const bool is_dense = t->ne[2] == 1; // columns are tokens; with experts a batch of one has places alone
    return (float *) ((char *) t->data + (is_dense ? (place + token) * t->nb[1] : place * t->nb[1] + token * t->nb[2]));
}

void gated_unit::compute(int64_t place, int64_t token, int32_t expert, int64_t begin, int64_t end) const {
    float * values[2];
    for (int m = 0; m < 2; m++) {
        values[m] = column_of(matmuls[m], place, token) + begin;
        if (biases[m]) {
            const float * bias = (const float *) ((const char *) biases[m]->data + expert * biases[m]->nb[1]) + begin;
            for (int64_t i = 0; i < end - begin; i++) {
                values[m][i] += bias[i];
            }
        }
    }
    const float * gated = values[gate];
    const float * up    = values[1 - gate];
    float *       to    = column_of(out, place, token) + begin;
    if (ggml_get_glu_op(out) == GGML_GLU_OP_SWIGLU) {
        find_swiglu()((int) (end - begin), to, gated, up);
        return;
    }
    const float alpha = ggml_get_op_params_f32(out, 2);
    const float limit = ggml_get_op_params_f32(out, 3);
    for (int64_t i = 0; i < end - begin; i++) {
        const float x = std::min(gated[i], limit);
        const float y = std::clamp(up[i], -limit, limit);
        to[i]         = x / (1.0f + std::exp(alpha * -x)) * (y + 1.0f);
    }
}

} // namespace moeedge
