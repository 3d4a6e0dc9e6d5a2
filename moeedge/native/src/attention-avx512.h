// Attention with registers of 512 bits: what attention-x86.h needs.

#pragma once

#include "attention-x86.h"
#include "expert-few-avx512.h"

namespace moeedge {

namespace {

struct simd : no_halves {
    using vec = __m512;
    static constexpr int n_lanes = 16, n_rows_at_once = 4, n_vectors_at_once = 4, n_keys_at_once = 4; // sixteen sums

    static vec  zero() { return _mm512_setzero_ps(); }
    static vec  set(float x) { return _mm512_set1_ps(x); }
    static vec  load(const float * from) { return _mm512_loadu_ps(from); }
    static vec  load_halves(const uint16_t * from) { return _mm512_cvtph_ps(moeedge::load(from)); }
    static void store(float * to, vec x) { _mm512_storeu_ps(to, x); }
    static vec  add(vec x, vec y) { return _mm512_add_ps(x, y); }
    static vec  sub(vec x, vec y) { return _mm512_sub_ps(x, y); }
    static vec  mul(vec x, vec y) { return _mm512_mul_ps(x, y); }
    static vec  fma(vec x, vec y, vec z) { return _mm512_fmadd_ps(x, y, z); }
    static vec  max(vec x, vec y) { return _mm512_max_ps(x, y); }
    static vec  to_half(vec x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
    // x, or 0 where `tile_max` is minus infinity
    static vec seen(vec tile_max, vec x) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(tile_max, set(-INFINITY), _CMP_NEQ_UQ), x); }

    // of x that are not positive; ggml's polynomial and order
    static vec exp(vec x) {
        const exp_parts<simd> parts(x);
        const vec             sum = fma(parts.high, parts.square, fma(set(exp_first), parts.rest, set(1)));
        return _mm512_mask_scalef_ps(zero(), _mm512_cmp_ps_mask(parts.n, set(-192), _CMP_NLT_UQ), sum, parts.n);
    }

    static __m256 upper(vec x) { return _mm256_castsi256_ps(upper_half(_mm512_castps_si512(x))); }
    static void   store_sums(float * to, vec a, vec b, vec c, vec d, int n) { _mm_mask_storeu_ps(to, (__mmask8) ((1 << n) - 1), sums_of(a, b, c, d)); }

    struct double_sum {
        __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

        static __m512d to_doubles(__m256 x) { return _mm512_cvtps_pd(x); }
        void           add(vec x) {
            low  = _mm512_add_pd(low, to_doubles(_mm512_castps512_ps256(x)));
            high = _mm512_add_pd(high, to_doubles(upper(x)));
        }
        void add_to(float * sums) const {
            const vec old = simd::load(sums);
            _mm256_storeu_ps(sums, _mm512_cvtpd_ps(_mm512_add_pd(to_doubles(_mm512_castps512_ps256(old)), low)));
            _mm256_storeu_ps(sums + 8, _mm512_cvtpd_ps(_mm512_add_pd(to_doubles(upper(old)), high)));
        }
    };
};

} // namespace

} // namespace moeedge
