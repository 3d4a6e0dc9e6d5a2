// Attention with the bits of a ggml that was built for AVX512-FP16. This file alone is compiled for it.
//
// There ggml adds 128 values of a key at once in half precision, after it has rounded their weight to it; the rest of a value's
// numbers are rounded as elsewhere.

#include "expert-dots.h"

#if defined(__AVX512FP16__) && defined(__AVX512VL__)

#    include "attention-avx512.h"

namespace moeedge {

namespace {

struct simd_fp16 : simd {
    static constexpr int n_halves_at_once = 128;

    // adds keys' values to n floats that half precision holds
    static void add_halves(const seen_keys & seen, const attention_rows & values, int64_t first_key, int n, float * out) {
        constexpr int n_sums = 8;
        for (int first = 0; first < n; first += n_sums * n_lanes) {
            __m256h sums[n_sums];
            UNROLLED
            for (int i = 0; i < n_sums; i++) {
                sums[i] = _mm512_cvtxps_ph(simd::load(out + first + i * n_lanes));
            }
            for (int k = 0; k < seen.n; k++) {
                if (seen.factors[k] >= 0) {
                    const __m256h factor = _mm256_set1_ph((_Float16) seen.factors[k]);
                    UNROLLED
                    for (int i = 0; i < n_sums; i++) {
                        sums[i] = _mm256_mul_ph(sums[i], factor);
                    }
                }
                const auto *  row    = (const uint16_t *) (values.first + (first_key + seen.places[k]) * (int64_t) values.row_bytes) + first;
                const __m256h weight = _mm256_set1_ph((_Float16) seen.weights[k]);
                UNROLLED
                for (int i = 0; i < n_sums; i++) {
                    sums[i] = _mm256_fmadd_ph(_mm256_loadu_ph(row + i * n_lanes), weight, sums[i]);
                }
            }
            UNROLLED
            for (int i = 0; i < n_sums; i++) {
                simd::store(out + first + i * n_lanes, _mm512_cvtxph_ps(sums[i]));
            }
        }
    }
};

} // namespace

attention_kernels avx512fp16_attention() {
    return { nullptr, attention_of_few<simd_fp16>, merge_attention }; // prompts are rounded as elsewhere
}

} // namespace moeedge

#endif
