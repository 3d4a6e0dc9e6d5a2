// Attention for x86 (attention-kernels.h), for a struct `simd` of a file's instructions: of prompts, those of few tokens are in
// attention-few-x86.h.
//
// The tokens of a tile lie side by side in the registers: queries are transposed once, while keys and values, of which all tokens
// need the same one at a time, stay in their order. Each score and each output is one chain of FMAs, in ggml's order.

#pragma once

#include <math.h>

#include "attention-few-x86.h"

namespace moeedge {

namespace {

constexpr int n_tile = n_attention_tokens;

// e^x = 2^n * (1 + a polynomial of the rest), whose last two terms differ between instructions

constexpr float exp_first = 0x1.ffffecp-1f; // of the rest itself

template <typename simd> struct exp_parts {
    using vec = typename simd::vec;
    vec n, rest, square, high; // high: the terms from the rest's square on, over the square

    explicit exp_parts(vec x) {
        const vec to_integer = simd::set(0x1.8p23f); // what is added to it is rounded to integers
        n      = simd::sub(simd::fma(x, simd::set(0x1.715476p+0f), to_integer), to_integer);
        rest   = simd::fma(n, simd::set(-0x1.7f7d1cp-20f), simd::fma(n, simd::set(-0x1.62e4p-1f), x)); // log(2) in two parts
        square = simd::mul(rest, rest);
        high   = simd::fma(simd::fma(simd::set(0x1.0e4020p-7f), rest, simd::set(0x1.573e2ep-5f)), square,
                           simd::fma(simd::set(0x1.555e66p-3f), rest, simd::set(0x1.fffdb6p-2f)));
    }
};

struct attention_work {
    alignas(64) float q[n_attention_max][n_tile];   // transposed
    alignas(64) float out[n_attention_max][n_tile]; // before the division by the sum
    alignas(64) float scores[n_tile][n_tile];       // [key][token], then their exponentials
    alignas(64) float rows[n_tile * n_attention_max]; // of keys or values
    alignas(64) float max[n_tile], tile_max[n_tile], factors[n_tile], sums[n_tile];
};

// to[n][token] = factor * (to[n][token] + sum over i of x[i][token] * y[n * y_n + i * y_i]) for n_rows values n
template <typename simd, bool from_zero>
inline void multiply_rows(int n_rows, int n, const float (*x)[n_tile], const float * y, int64_t y_n, int64_t y_i, float factor, float (*to)[n_tile]) {
    using vec = typename simd::vec;
    constexpr int n_at_once = simd::n_rows_at_once, n_across = simd::n_vectors_at_once, n_lanes = simd::n_lanes;
    for (int row = 0; row < n_rows; row += n_at_once) {
        for (int first = 0; first < n_tile; first += n_across * n_lanes) {
            vec sums[n_at_once][n_across];
            UNROLLED
            for (int j = 0; j < n_at_once * n_across; j++) {
                const int r = j / n_across, c = j % n_across;
                sums[r][c]  = from_zero ? simd::zero() : simd::load(&to[row + r][first + c * n_lanes]);
            }
            for (int i = 0; i < n; i++) {
                vec at[n_across];
                UNROLLED
                for (int c = 0; c < n_across; c++) {
                    at[c] = simd::load(&x[i][first + c * n_lanes]);
                }
                UNROLLED
                for (int r = 0; r < n_at_once; r++) {
                    const vec value = simd::set(y[(row + r) * y_n + i * y_i]);
                    UNROLLED
                    for (int c = 0; c < n_across; c++) {
                        sums[r][c] = simd::fma(at[c], value, sums[r][c]);
                    }
                }
            }
            UNROLLED
            for (int j = 0; j < n_at_once * n_across; j++) {
                const int r = j / n_across, c = j % n_across;
                simd::store(&to[row + r][first + c * n_lanes], from_zero ? simd::mul(sums[r][c], simd::set(factor)) : sums[r][c]);
            }
        }
    }
}

enum mask_kind { ALL_SEEN, NONE_SEEN, SOME_SEEN };

// of a token's 64 keys: whether all are zero, or all minus infinity
inline mask_kind kind_of_mask(const uint16_t * mask) {
    __m256i any = _mm256_setzero_si256(), other = any;
    for (int i = 0; i < n_tile; i += 16) {
        any   = _mm256_or_si256(any, load(mask + i));
        other = _mm256_or_si256(other, _mm256_xor_si256(load(mask + i), _mm256_set1_epi16((short) 0xfc00)));
    }
    return _mm256_testz_si256(any, any) ? ALL_SEEN : _mm256_testz_si256(other, other) ? NONE_SEEN : SOME_SEEN;
}

inline const uint16_t * mask_of(const attention_tile & tile, int token, int64_t first) {
    return (const uint16_t *) (tile.mask.first + token * (int64_t) tile.mask.row_bytes) + first;
}

inline mask_kind kind_of_masks(const attention_tile & tile, int64_t first) {
    if (!tile.mask.first) {
        return ALL_SEEN;
    }
    const mask_kind kind = kind_of_mask(mask_of(tile, 0, first));
    for (int t = 1; t < tile.n_tokens; t++) {
        if (kind == SOME_SEEN || kind_of_mask(mask_of(tile, t, first)) != kind) {
            return SOME_SEEN;
        }
    }
    return kind;
}

template <typename simd> inline void add_masks(const attention_tile & tile, int64_t first, float (*scores)[n_tile]) {
    alignas(64) float values[n_tile];
    for (int t = 0; t < tile.n_tokens; t++) {
        const uint16_t * mask = mask_of(tile, t, first);
        if (kind_of_mask(mask) == ALL_SEEN) {
            continue;
        }
        for (int i = 0; i < n_tile; i += simd::n_lanes) {
            simd::store(values + i, simd::load_halves(mask + i));
        }
        for (int i = 0; i < n_tile; i++) {
            scores[i][t] += values[i];
        }
    }
}

// the new largest scores; scales what is there to them
template <typename simd> inline void raise_max(attention_work & w, int n_value) {
    for (int c = 0; c < n_tile; c += simd::n_lanes) {
        typename simd::vec max = simd::set(-INFINITY);
        for (int i = 0; i < n_tile; i++) {
            max = simd::max(max, simd::load(&w.scores[i][c]));
        }
        simd::store(w.tile_max + c, max);
    }
    bool is_any = false;
    for (int t = 0; t < n_tile; t++) {
        w.factors[t] = 1;
        if (w.tile_max[t] == -INFINITY) {
            continue;
        }
        const float old = w.max[t];
        w.max[t]        = fmaxf(old, w.tile_max[t]);
        if (w.max[t] > old) {
            w.factors[t] = expf(old - w.max[t]);
            w.sums[t] *= w.factors[t];
            is_any = true;
        }
    }
    for (int i = 0; is_any && i < n_value; i++) {
        for (int c = 0; c < n_tile; c += simd::n_lanes) {
            simd::store(&w.out[i][c], simd::mul(simd::load(&w.out[i][c]), simd::load(w.factors + c)));
        }
    }
}

// scores become their exponentials, or zero where a token sees none of these keys, and are summed as ggml sums a register
template <typename simd> inline void exponentials(attention_work & w) {
    using vec             = typename simd::vec;
    constexpr int n_lanes = simd::n_lanes;
    for (int c = 0; c < n_tile; c += simd::n_lanes) {
        const vec                 max = simd::load(w.max + c), tile_max = simd::load(w.tile_max + c);
        typename simd::double_sum sum;
        for (int first = 0; first < n_tile; first += n_lanes) {
            vec part[n_lanes];
            for (int i = 0; i < n_lanes; i++) {
                float * at = &w.scores[first + i][c];
                part[i]    = simd::seen(tile_max, simd::exp(simd::sub(simd::load(at), max)));
                simd::store(at, part[i]);
            }
            for (int n = n_lanes / 2; n > 0; n /= 2) {
                for (int i = 0; i < n; i++) {
                    part[i] = simd::add(part[i], part[i + n]);
                }
            }
            sum.add(part[0]);
        }
        sum.add_to(w.sums + c);
    }
}

inline void add_sink(attention_work & w, float sink, int n_value) {
    for (int t = 0; t < n_tile; t++) {
        const bool is_larger = sink > w.max[t];
        w.factors[t]         = is_larger ? expf(w.max[t] - sink) : 1;
        w.sums[t]            = fmaf(w.sums[t], w.factors[t], is_larger ? 1 : expf(sink - w.max[t])); // as compilers make it of ggml's code
    }
    for (int i = 0; i < n_value; i++) {
        for (int t = 0; t < n_tile; t++) {
            w.out[i][t] *= w.factors[t];
        }
    }
}

template <typename simd> void prompt_attention(const attention_tile & tile) {
    attention_work w;
    for (int t = 0; t < n_tile; t++) {
        const float * row = (const float *) (tile.q.first + t * (int64_t) tile.q.row_bytes);
        for (int i = 0; i < tile.n_key; i++) {
            w.q[i][t] = t < tile.n_tokens ? row[i] : 0;
        }
        w.max[t]  = -INFINITY;
        w.sums[t] = 0;
    }
    memset(w.out, 0, sizeof(w.out[0]) * (size_t) tile.n_value);
    for (int64_t first = 0; first < tile.n_kv; first += n_tile) {
        const mask_kind kind = kind_of_masks(tile, first);
        if (kind == NONE_SEEN) {
            continue;
        }
        const float * keys = read_rows<simd>(tile.k, first, n_tile, tile.n_key, tile.is_half, w.rows);
        multiply_rows<simd, true>(n_tile, tile.n_key, w.q, keys, tile.n_key, 1, tile.scale, w.scores);
        if (kind == SOME_SEEN) {
            add_masks<simd>(tile, first, w.scores);
        }
        raise_max<simd>(w, tile.n_value);
        exponentials<simd>(w);
        const float * values = read_rows<simd>(tile.v, first, n_tile, tile.n_value, tile.is_half, w.rows);
        multiply_rows<simd, false>(tile.n_value, n_tile, w.scores, values, 1, tile.n_value, 1, w.out);
    }
    if (tile.sink) {
        add_sink(w, *tile.sink, tile.n_value);
    }
    for (int t = 0; t < tile.n_tokens; t++) {
        const float factor = w.sums[t] == 0 ? 0 : 1 / w.sums[t];
        float *     to     = (float *) (const_cast<char *>(tile.out.first) + t * (int64_t) tile.out.row_bytes);
        for (int i = 0; i < tile.n_value; i++) {
            to[i] = w.out[i][t] * factor;
        }
    }
}

template <typename simd> constexpr attention_kernels kernels_of_attention() {
    return { prompt_attention<simd>, attention_of_few<simd>, merge_attention };
}

} // namespace

} // namespace moeedge
