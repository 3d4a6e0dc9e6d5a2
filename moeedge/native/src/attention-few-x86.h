// Attention of few tokens for x86 (attention-kernels.h), for a struct `simd` of a file's instructions. A row is a head of a token;
// rows that share keys meet each key once it is read, and each is rounded as by ggml, which computes one after the other.

#pragma once

#include <math.h>

#include "attention-kernels.h"
#include "expert-dots-x86.h"

namespace moeedge {

namespace {

// n_rows rows of n values as floats, one after the other
template <typename simd> inline const float * read_rows(const attention_rows & from, int64_t first, int n_rows, int n, bool is_half, float * to) {
    for (int r = 0; r < n_rows; r++) {
        const char * row = from.first + (first + r) * (int64_t) from.row_bytes;
        for (int i = 0; i < n; i += simd::n_lanes) {
            simd::store(to + r * n + i, is_half ? simd::load_halves((const uint16_t *) row + i) : simd::load((const float *) row + i));
        }
    }
    return to;
}

constexpr int      n_few_keys = 32; // at a time
constexpr uint16_t not_seen   = 0xfc00; // minus infinity

struct few_work {
    alignas(64) float q[n_attention_rows][n_attention_max];   // rounded to half precision
    alignas(64) float out[n_attention_rows][n_attention_max]; // rounded after each key
    alignas(64) float rows[n_few_keys * n_attention_max];     // of keys or values
    float max[n_attention_rows], sums[n_attention_rows];
    float scores[n_attention_rows][n_few_keys];
};

// products of q and N keys
template <typename simd, int N> inline void key_scores(const float * q, const float * keys, int n_key, float * to) {
    using vec = typename simd::vec;
    vec sums[N][4];
    UNROLLED
    for (int i = 0; i < 4 * N; i++) {
        sums[i / 4][i % 4] = simd::zero();
    }
    for (int at = 0; at < n_key; at += 4 * simd::n_lanes) {
        UNROLLED
        for (int i = 0; i < 4; i++) {
            const vec x = simd::load(q + at + i * simd::n_lanes);
            UNROLLED
            for (int k = 0; k < N; k++) {
                sums[k][i] = simd::fma(simd::load(keys + k * n_key + at + i * simd::n_lanes), x, sums[k][i]);
            }
        }
    }
    UNROLLED
    for (int k = 0; k < N; k++) {
        sums[k][0] = simd::add(simd::add(sums[k][0], sums[k][2]), simd::add(sums[k][1], sums[k][3]));
    }
    simd::store_sums(to, sums[0][0], sums[N > 1 ? 1 : 0][0], sums[N > 2 ? 2 : 0][0], sums[N > 3 ? 3 : 0][0], N);
}

// keys that a row sees, of a few
struct seen_keys {
    int   n = 0;
    int   places[n_few_keys];
    float weights[n_few_keys];
    float factors[n_few_keys]; // of what was added before; negative: 1
};

inline bool sees_any(const uint16_t * mask, int n) {
    int i = 0;
    while (mask && i < n && mask[i] == not_seen) {
        i++;
    }
    return i < n;
}

// e^x of numbers that are not positive with the bits of expf, which ggml calls: glibc's algorithm (S. Nagy's for ARM), four at a time.
// x = log(2) / 32 * (32 i + j) + rest: 2^i is added to the exponent of 2^(j/32), and the rest's e^rest is a polynomial.
struct exponentials_of_libm {
    static constexpr int n_powers = 32;
    int64_t              powers[n_powers]; // bits of 2^(j/32), less j where i will be added
    bool                 is_equal = true;

    exponentials_of_libm() {
        for (int j = 0; j < n_powers; j++) {
            const double power = (double) exp2l((long double) j / n_powers);
            memcpy(&powers[j], &power, sizeof(power));
            powers[j] -= (int64_t) j << 47;
        }
        alignas(32) float found[8];
        for (float x = 0; x > -120 && is_equal; x -= 0.00387f) { // another libm differs for some of so many
            const float next[8] = { x, x * 0.9f, x * 0.8f, x * 0.1f, x * 1e-3f, x * 1e-6f, x - 0.001f, x * 0.61f };
            compute(next, found, 8);
            for (int i = 0; i < 8; i++) {
                is_equal = is_equal && found[i] == expf(next[i]);
            }
        }
    }

    // n: a multiple of 4
    void compute(const float * x, float * to, int n) const {
        const __m256d per_step = _mm256_set1_pd(0x1.71547652b82fep+0 * n_powers), to_integer = _mm256_set1_pd(0x1.8p52);
        for (int i = 0; i < n; i += 4) {
            const __m128  at      = _mm_loadu_ps(x + i);
            const __m256d wide    = _mm256_cvtps_pd(at);
            const __m256d shifted = _mm256_fmadd_pd(wide, per_step, to_integer);
            const __m256d rest    = _mm256_fmsub_pd(wide, per_step, _mm256_sub_pd(shifted, to_integer));
            const __m256i step    = _mm256_castpd_si256(shifted);
            const __m256i place   = _mm256_and_si256(step, _mm256_set1_epi64x(n_powers - 1));
            const __m256i power   = _mm256_add_epi64(_mm256_i64gather_epi64((const long long *) powers, place, 8), _mm256_slli_epi64(step, 47));
            const __m256d high    = _mm256_fmadd_pd(_mm256_set1_pd(0x1.c6af84b912394p-20), rest, _mm256_set1_pd(0x1.ebfce50fac4f3p-13));
            const __m256d low     = _mm256_fmadd_pd(_mm256_set1_pd(0x1.62e42ff0c52d6p-6), rest, _mm256_set1_pd(1));
            const __m256d sum     = _mm256_fmadd_pd(high, _mm256_mul_pd(rest, rest), low);
            const __m128  found   = _mm256_cvtpd_ps(_mm256_mul_pd(sum, _mm256_castsi256_pd(power)));
            _mm_storeu_ps(to + i, _mm_andnot_ps(_mm_cmplt_ps(at, _mm_set1_ps(-104)), found)); // too small for a float
        }
    }
};

inline void exponentials_of(const float * x, float * to, int n) {
    static const exponentials_of_libm like_libm;
    if (like_libm.is_equal) {
        like_libm.compute(x, to, (n + 3) / 4 * 4);
        return;
    }
    for (int i = 0; i < n; i++) {
        to[i] = expf(x[i]);
    }
}

inline void weigh(const float * scores, const uint16_t * mask, int n, float scale, float & max, float & sum, seen_keys & seen) {
    bool  is_new[n_few_keys];
    float changes[n_few_keys] = {};
    for (int i = 0; i < n; i++) {
        if (mask && mask[i] == not_seen) {
            continue;
        }
        const float score    = scores[i] * scale + (mask ? to_float(mask[i]) : 0.0f);
        is_new[seen.n]       = score > max;
        changes[seen.n]      = is_new[seen.n] ? max - score : score - max;
        max                  = is_new[seen.n] ? score : max;
        seen.places[seen.n++] = i;
    }
    exponentials_of(changes, changes, seen.n);
    for (int i = 0; i < seen.n; i++) {
        seen.weights[i] = is_new[i] ? 1 : changes[i];
        seen.factors[i] = is_new[i] ? changes[i] : -1;
        sum             = is_new[i] ? fmaf(sum, changes[i], 1) : sum + changes[i];
    }
}

// n vectors at once, from a value's number `begin` on
template <typename simd, int n> inline void add_values(const seen_keys & seen, const float * values, int begin, int n_value, float * out) {
    using vec = typename simd::vec;
    for (int first = begin; first < n_value; first += n * simd::n_lanes) {
        vec sums[n];
        UNROLLED
        for (int i = 0; i < n; i++) {
            sums[i] = simd::load(out + first + i * simd::n_lanes);
        }
        for (int k = 0; k < seen.n; k++) {
            if (seen.factors[k] >= 0) {
                UNROLLED
                for (int i = 0; i < n; i++) {
                    sums[i] = simd::to_half(simd::mul(sums[i], simd::set(seen.factors[k])));
                }
            }
            const float * row    = values + seen.places[k] * n_value + first;
            const vec     weight = simd::set(seen.weights[k]);
            UNROLLED
            for (int i = 0; i < n; i++) {
                sums[i] = simd::to_half(simd::fma(simd::load(row + i * simd::n_lanes), weight, sums[i]));
            }
        }
        UNROLLED
        for (int i = 0; i < n; i++) {
            simd::store(out + first + i * simd::n_lanes, sums[i]);
        }
    }
}

// for a ggml that adds values in single precision and rounds them
struct no_halves {
    static constexpr int n_halves_at_once = 1 << 30; // never as many
    static void          add_halves(const seen_keys &, const attention_rows &, int64_t, int, float *) {}
};

inline void finish_row(const few_attention & task, int r, const float * values, float max, float sum) {
    float factor = 1;
    if (task.sink[r]) {
        const float sink   = *task.sink[r];
        const float change = expf(sink > max ? max - sink : sink - max);
        factor             = sink > max ? change : 1;
        sum                = sink > max ? sum * change + 1 : sum + change;
        max                = sink > max ? sink : max;
    }
    float * to      = task.out[r] + (task.is_part ? 2 : 0);
    const float inverse = task.is_part ? 1 : sum == 0 ? 0 : 1 / sum;
    for (int i = 0; i < task.n_value; i++) {
        to[i] = values[i] * factor * inverse;
    }
    if (task.is_part) {
        task.out[r][0] = max;
        task.out[r][1] = sum;
    }
}

template <typename simd> void attention_of_few(const few_attention & task) {
    few_work w;
    for (int r = 0; r < task.n_rows; r++) {
        for (int i = 0; i < task.n_key; i += simd::n_lanes) {
            simd::store(w.q[r] + i, simd::to_half(simd::load(task.q[r] + i)));
        }
        memset(w.out[r], 0, sizeof(float) * (size_t) task.n_value);
        w.max[r]  = -INFINITY;
        w.sums[r] = 0;
    }
    for (int64_t first = task.begin; first < task.end; first += n_few_keys) {
        const int  n       = task.end - first < n_few_keys ? (int) (task.end - first) : n_few_keys;
        const auto mask_of = [&](int r) { return task.mask[r] ? task.mask[r] + first : nullptr; };
        bool       sees[n_attention_rows], is_seen = false;
        for (int r = 0; r < task.n_rows; r++) {
            sees[r] = r > 0 && task.mask[r] == task.mask[r - 1] ? sees[r - 1] : sees_any(mask_of(r), n);
            is_seen = is_seen || sees[r];
        }
        if (!is_seen) {
            continue;
        }
        const float * keys = read_rows<simd>(task.k, first, n, task.n_key, true, w.rows);
        for (int r = 0; r < task.n_rows; r++) {
            int i = 0;
            for (; sees[r] && i + simd::n_keys_at_once <= n; i += simd::n_keys_at_once) {
                key_scores<simd, simd::n_keys_at_once>(w.q[r], keys + i * task.n_key, task.n_key, w.scores[r] + i);
            }
            for (; sees[r] && i < n; i++) {
                key_scores<simd, 1>(w.q[r], keys + i * task.n_key, task.n_key, w.scores[r] + i);
            }
        }
        const int     n_halves = task.n_value - task.n_value % simd::n_halves_at_once;
        const float * values   = n_halves == task.n_value ? nullptr : read_rows<simd>(task.v, first, n, task.n_value, true, w.rows);
        for (int r = 0; r < task.n_rows; r++) {
            if (sees[r]) {
                seen_keys seen;
                weigh(w.scores[r], mask_of(r), n, task.scale, w.max[r], w.sums[r], seen);
                simd::add_halves(seen, task.v, first, n_halves, w.out[r]);
                const auto add = (task.n_value - n_halves) % (8 * simd::n_lanes) == 0 ? add_values<simd, 8> : add_values<simd, 4>;
                add(seen, values, n_halves, task.n_value, w.out[r]);
            }
        }
    }
    for (int r = 0; r < task.n_rows; r++) {
        finish_row(task, r, w.out[r], w.max[r], w.sums[r]);
    }
}

inline void merge_attention(const attention_parts & of) {
    float max = -INFINITY, sum = 0;
    for (int i = 0; i < of.n_value; i++) {
        of.out[i] = 0;
    }
    for (int p = 0; p < of.n_parts; p++) {
        const float * part = of.first + p * (2 + of.n_value);
        if (part[1] == 0) {
            continue;
        }
        const float larger = fmaxf(max, part[0]), old_factor = expf(max - larger), new_factor = expf(part[0] - larger);
        for (int i = 0; i < of.n_value; i++) { // as compilers make it of ggml's code
            of.out[i] = fmaf(of.out[i], old_factor, part[2 + i] * new_factor);
        }
        sum = fmaf(sum, old_factor, part[1] * new_factor);
        max = larger;
    }
    const float inverse = sum == 0 ? 1 : 1 / sum;
    for (int i = 0; i < of.n_value; i++) {
        of.out[i] *= inverse;
    }
}

} // namespace

} // namespace moeedge
