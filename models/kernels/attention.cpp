// Causal grouped-query attention with normalised and rotated queries and keys, forward and backward, for training.
//
// qkv is [batch, time, heads + 2 * kv_heads, D] as it leaves the projection: no transposes, no repeated keys.
// One task is one (row of the batch, kv head) with its group of query heads. D is a multiple of 32, time of BLOCK.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tile.h"

namespace {

constexpr long BLOCK = 64;  // rows of the score matrix that are computed at a time

struct Sizes {
    long batch, time, heads, kv_heads, dim;
    float eps;
    long stride() const { return (heads + 2 * kv_heads) * dim; }  // floats from one token to the next in qkv
};

// y = rotate(gain * x / rms(x)): NeoX pairing (d, d + D / 2); returns 1 / rms(x).
float norm_rotate(const Sizes & s, const float * x, const float * gain, const float * cosine, const float * sine,
                  float * y) {
    float square = 0.0f;
    for (long d = 0; d < s.dim; d++) square += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(square / s.dim + s.eps);
    const long half = s.dim / 2;
    for (long d = 0; d < half; d++) {
        const float a = x[d] * scale * gain[d], b = x[d + half] * scale * gain[d + half];
        y[d] = a * cosine[d] - b * sine[d];
        y[d + half] = a * sine[d] + b * cosine[d];
    }
    return scale;
}

// The reverse: g_y -> g_x (written) and g_gain (added to).
void norm_rotate_back(const Sizes & s, const float * x, const float * gain, const float * cosine, const float * sine,
                      const float * g_y, float * g_x, float * g_gain) {
    float square = 0.0f, dot = 0.0f;
    for (long d = 0; d < s.dim; d++) square += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(square / s.dim + s.eps);
    const long half = s.dim / 2;
    for (long d = 0; d < half; d++) {
        const float a = g_y[d] * cosine[d] + g_y[d + half] * sine[d];
        const float b = g_y[d + half] * cosine[d] - g_y[d] * sine[d];
        g_gain[d] += a * x[d] * scale;
        g_gain[d + half] += b * x[d + half] * scale;
        g_x[d] = a * gain[d];
        g_x[d + half] = b * gain[d + half];
        dot += g_x[d] * x[d] + g_x[d + half] * x[d + half];
    }
    const float pull = dot * scale * scale / s.dim;
    for (long d = 0; d < s.dim; d++) g_x[d] = scale * (g_x[d] - pull * x[d]);
}

// One task's keys and values, and room for one query head; all [time, D] unless noted.
struct Task {
    std::vector<float> q, k, v, k_turned, scores;
    Task(const Sizes & s) : q(s.time * s.dim), k(q.size()), v(q.size()), k_turned(q.size()), scores(s.time * s.time) {}
};

void load_head(const Sizes & s, const float * qkv, const float * gain, const float * cosine, const float * sine,
               float * out) {
    for (long t = 0; t < s.time; t++)
        norm_rotate(s, qkv + t * s.stride(), gain, cosine + t * s.dim / 2, sine + t * s.dim / 2, out + t * s.dim);
}

void load_keys(const Sizes & s, const float * row, long kv, const float * k_gain, const float * cosine,
               const float * sine, Task & w) {
    load_head(s, row + (s.heads + kv) * s.dim, k_gain, cosine, sine, w.k.data());
    for (long t = 0; t < s.time; t++)
        std::copy_n(row + t * s.stride() + (s.heads + s.kv_heads + kv) * s.dim, s.dim, w.v.data() + t * s.dim);
    transpose(s.time, s.dim, w.k.data(), w.k_turned.data());
}

// scores[t, 0..t] = softmax of one query head's scores; zero to the right of the diagonal inside its block.
void probabilities(const Sizes & s, Task & w) {
    const float scale = 1.0f / std::sqrt((float) s.dim);
    for (long t0 = 0; t0 < s.time; t0 += BLOCK) {
        const long width = t0 + BLOCK;
        multiply_wide(BLOCK, width, s.dim, w.q.data() + t0 * s.dim, s.dim, 1, w.k_turned.data(), s.time,
                      w.scores.data() + t0 * s.time, s.time);
        for (long t = t0; t < t0 + BLOCK; t++) {
            float * p = w.scores.data() + t * s.time, top = p[0], sum = 0.0f;
            for (long j = 1; j <= t; j++) top = std::max(top, p[j]);
            for (long j = 0; j <= t; j++) sum += p[j] = std::exp((p[j] - top) * scale);
            for (long j = 0; j <= t; j++) p[j] /= sum;
            std::fill(p + t + 1, p + width, 0.0f);
        }
    }
}

}  // namespace

extern "C" {

// out is [batch, time, heads, D]; cosine and sine are [time, D / 2].
void attention_forward(const float * qkv, const float * q_gain, const float * k_gain, const float * cosine,
                       const float * sine, long batch, long time, long heads, long kv_heads, long dim, float eps,
                       float * out) {
    const Sizes s = {batch, time, heads, kv_heads, dim, eps};
    const long group = heads / kv_heads;
#pragma omp parallel
    {
        Task w(s);
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < batch * kv_heads; task++) {
            const long b = task / kv_heads, kv = task % kv_heads;
            const float * row = qkv + b * time * s.stride();
            load_keys(s, row, kv, k_gain, cosine, sine, w);
            for (long h = kv * group; h < (kv + 1) * group; h++) {
                load_head(s, row + h * dim, q_gain, cosine, sine, w.q.data());
                probabilities(s, w);
                for (long t0 = 0; t0 < time; t0 += BLOCK)
                    multiply_wide(BLOCK, dim, t0 + BLOCK, w.scores.data() + t0 * time, time, 1, w.v.data(), dim,
                                  out + ((b * time + t0) * heads + h) * dim, heads * dim);
            }
        }
    }
}

// Gradients of qkv, q_gain and k_gain (the last two come in zeroed). Probabilities are computed again, not kept.
void attention_backward(const float * g_out, const float * qkv, const float * q_gain, const float * k_gain,
                        const float * cosine, const float * sine, long batch, long time, long heads, long kv_heads,
                        long dim, float eps, float * g_qkv, float * g_q_gain, float * g_k_gain) {
    const Sizes s = {batch, time, heads, kv_heads, dim, eps};
    const long group = heads / kv_heads;
    const float scale = 1.0f / std::sqrt((float) dim);
#pragma omp parallel
    {
        Task w(s);
        const long n = time * dim;
        std::vector<float> go(n), v_turned(n), g_scores(time * time), part(n), g_k(n), g_v(n), q_sum(dim), k_sum(dim);
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < batch * kv_heads; task++) {
            const long b = task / kv_heads, kv = task % kv_heads;
            const float * row = qkv + b * time * s.stride();
            float * g_row = g_qkv + b * time * s.stride();
            load_keys(s, row, kv, k_gain, cosine, sine, w);
            transpose(time, dim, w.v.data(), v_turned.data());
            std::fill(g_k.begin(), g_k.end(), 0.0f);
            std::fill(g_v.begin(), g_v.end(), 0.0f);
            for (long h = kv * group; h < (kv + 1) * group; h++) {
                load_head(s, row + h * dim, q_gain, cosine, sine, w.q.data());
                probabilities(s, w);
                for (long t = 0; t < time; t++)
                    std::copy_n(g_out + ((b * time + t) * heads + h) * dim, dim, go.data() + t * dim);
                for (long t0 = 0; t0 < time; t0 += BLOCK) {  // through the softmax, block of rows by block of rows
                    const long width = t0 + BLOCK;
                    multiply_wide(BLOCK, width, dim, go.data() + t0 * dim, dim, 1, v_turned.data(), time,
                                  g_scores.data() + t0 * time, time);
                    for (long t = t0; t < t0 + BLOCK; t++) {
                        const float * p = w.scores.data() + t * time;
                        float * g = g_scores.data() + t * time, dot = 0.0f;
                        for (long j = 0; j < width; j++) dot += p[j] * g[j];
                        for (long j = 0; j < width; j++) g[j] = scale * p[j] * (g[j] - dot);
                    }
                    multiply_wide(BLOCK, dim, width, g_scores.data() + t0 * time, time, 1, w.k.data(), dim,
                                  part.data() + t0 * dim, dim);
                }
                for (long t = 0; t < time; t++)
                    norm_rotate_back(s, row + t * s.stride() + h * dim, q_gain, cosine + t * dim / 2,
                                     sine + t * dim / 2, part.data() + t * dim, g_row + t * s.stride() + h * dim,
                                     q_sum.data());
                for (long t0 = 0; t0 < time; t0 += BLOCK)  // only later queries reach a block of keys
                    multiply_wide(BLOCK, dim, time - t0, g_scores.data() + t0 * time + t0, 1, time,
                                  w.q.data() + t0 * dim, dim, part.data() + t0 * dim, dim);
                for (long i = 0; i < n; i++) g_k[i] += part[i];
                for (long t0 = 0; t0 < time; t0 += BLOCK)
                    multiply_wide(BLOCK, dim, time - t0, w.scores.data() + t0 * time + t0, 1, time,
                                  go.data() + t0 * dim, dim, part.data() + t0 * dim, dim);
                for (long i = 0; i < n; i++) g_v[i] += part[i];
            }
            for (long t = 0; t < time; t++) {
                const long k_at = t * s.stride() + (heads + kv) * dim;
                norm_rotate_back(s, row + k_at, k_gain, cosine + t * dim / 2, sine + t * dim / 2, g_k.data() + t * dim,
                                 g_row + k_at, k_sum.data());
                std::copy_n(g_v.data() + t * dim, dim, g_row + k_at + kv_heads * dim);
            }
        }
#pragma omp critical
        for (long d = 0; d < dim; d++) {
            g_q_gain[d] += q_sum[d];
            g_k_gain[d] += k_sum[d];
        }
    }
}

}  // extern "C"
