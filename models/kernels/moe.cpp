// The mixture of experts on the CPU, forward and backward, for training.
//
// Pairs (token, expert) are sorted by expert; each expert then is a handful of small matrix products over its own rows,
// without padding and with its weights in the first-level cache. Threads share out experts, then tokens.
// All matrices are row-major float32; D and 2 * F must be multiples of 32, F a multiple of 16.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tile.h"

namespace {

void gather(const float * table, const int64_t * pairs, long n, long k, long dim, float * out) {
    for (long i = 0; i < n; i++) std::copy_n(table + pairs[i] / k * dim, dim, out + i * dim);
}

// out[token] = sum of the rows of its k pairs; where[pair] says in which row a pair lies.
void sum_pairs(const float * rows, const int64_t * where, long n_token, long k, long dim, float * out) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < n_token; t++) {
        float * o = out + t * dim;
        std::fill_n(o, dim, 0.0f);
        for (long s = 0; s < k; s++) {
            const float * r = rows + where[t * k + s] * dim;
            for (long d = 0; d < dim; d++) o[d] += r[d];
        }
    }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace

extern "C" {

// ids[token, 0..k) = the k most probable experts, the most probable first; n_expert is at most 1024.
void moe_top(const float * prob, long n_token, long n_expert, long k, int64_t * ids) {
#pragma omp parallel for schedule(static)
    for (long t = 0; t < n_token; t++) {
        float left[1024];
        std::copy_n(prob + t * n_expert, n_expert, left);
        for (long i = 0; i < k; i++) {
            float top = left[0];
            for (long e = 1; e < n_expert; e++) top = std::max(top, left[e]);
            long e = 0;
            while (e + 1 < n_expert && left[e] != top) e++;
            ids[t * k + i] = e;
            left[e] = -1.0f;
        }
    }
}

// Counting sort: order[row] = pair, where[pair] = row, start[expert] = first row (n_expert + 1 entries).
void moe_sort(const int64_t * ids, long n_pair, long n_expert, int64_t * order, int64_t * where, int64_t * start) {
    std::fill_n(start, n_expert + 1, 0);
    for (long p = 0; p < n_pair; p++) start[ids[p] + 1]++;
    for (long e = 0; e < n_expert; e++) start[e + 1] += start[e];
    std::vector<int64_t> next(start, start + n_expert);
    for (long p = 0; p < n_pair; p++) {
        where[p] = next[ids[p]]++;
        order[where[p]] = p;
    }
}

// hidden[row, 2F] (gate and up before the activation) is kept for the backward pass; rows is scratch [n_pair, D].
void moe_forward(const float * x, const float * gate_up, const float * down, const float * weight,
                 const int64_t * order, const int64_t * where, const int64_t * start, long n_token, long k,
                 long n_expert, long dim, long width, float * hidden, float * rows, float * out) {
#pragma omp parallel for schedule(dynamic, 1)
    for (long e = 0; e < n_expert; e++) {
        const long first = start[e], n = start[e + 1] - first;
        if (n == 0) continue;
        std::vector<float> in(n * dim), act(n * width);
        gather(x, order + first, n, k, dim, in.data());
        float * h = hidden + first * 2 * width;
        multiply(n, 2 * width, dim, in.data(), dim, 1, gate_up + e * dim * 2 * width, h);
        for (long i = 0; i < n; i++) {
            const float w = weight[order[first + i]];
            const float * g = h + i * 2 * width, * u = g + width;
            for (long f = 0; f < width; f++) act[i * width + f] = w * g[f] * sigmoid(g[f]) * u[f];
        }
        multiply(n, dim, width, act.data(), width, 1, down + e * width * dim, rows + first * dim);
    }
    sum_pairs(rows, where, n_token, k, dim, out);
}

// Gradients of everything; g_out is [n_token, D], rows scratch as above. g_gate_up and g_down come in zeroed.
void moe_backward(const float * g_out, const float * x, const float * gate_up, const float * down,
                  const float * weight, const float * hidden, const int64_t * order, const int64_t * where,
                  const int64_t * start, long n_token, long k, long n_expert, long dim, long width, float * rows,
                  float * g_x, float * g_gate_up, float * g_down, float * g_weight) {
#pragma omp parallel for schedule(dynamic, 1)
    for (long e = 0; e < n_expert; e++) {
        const long first = start[e], n = start[e + 1] - first;
        if (n == 0) continue;
        std::vector<float> in(n * dim), go(n * dim), act(n * width), g_act(n * width), g_hidden(n * 2 * width);
        std::vector<float> turned(2 * width * dim);
        gather(x, order + first, n, k, dim, in.data());
        gather(g_out, order + first, n, k, dim, go.data());
        transpose(width, dim, down + e * width * dim, turned.data());
        multiply(n, width, dim, go.data(), dim, 1, turned.data(), g_act.data());
        for (long i = 0; i < n; i++) {
            const long pair = order[first + i];
            const float w = weight[pair];
            const float * g = hidden + (first + i) * 2 * width, * u = g + width;
            float * gh = g_hidden.data() + i * 2 * width, dot = 0.0f;
            for (long f = 0; f < width; f++) {
                const float s = sigmoid(g[f]), silu = g[f] * s, ga = g_act[i * width + f];
                dot += silu * u[f] * ga;
                act[i * width + f] = w * silu * u[f];
                gh[f] = w * ga * u[f] * (s + silu * (1.0f - s));
                gh[width + f] = w * ga * silu;
            }
            g_weight[pair] = dot;
        }
        multiply(width, dim, n, act.data(), 1, width, go.data(), g_down + e * width * dim);
        multiply(dim, 2 * width, n, in.data(), 1, dim, g_hidden.data(), g_gate_up + e * dim * 2 * width);
        transpose(dim, 2 * width, gate_up + e * dim * 2 * width, turned.data());
        multiply(n, dim, 2 * width, g_hidden.data(), 2 * width, 1, turned.data(), rows + first * dim);
    }
    sum_pairs(rows, where, n_token, k, dim, g_x);
}

}  // extern "C"
