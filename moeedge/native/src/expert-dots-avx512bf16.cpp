// The kernel of expert-dots.h for BF16 with AVX-512's VDPBF16PS. This file alone is compiled for it.
//
// ggml adds products of 32 values at a time to sixteen sums: two sets in turns for a product of one row and one column, as experts
// have it, one set in the tiles of a dense matrix.

#include "expert-dots.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)

#    include "expert-dots-x86.h"

namespace moeedge {

namespace {

constexpr int64_t n_values = 32; // per instruction
constexpr int     n_tile_rows = 4, n_tile_sums = 6; // of each row; 24 of the 32 registers are sums

struct line { // of a row or a column
    uint16_t v[n_values];
};

inline __m512bh read(const line & from) {
    return (__m512bh) _mm512_loadu_si512(&from);
}

// four rows and N columns, while memory is asked for the next rows; n_sets: of sums
template <int N, int n_sets>
void tile(int64_t n_lines, const char * rows, size_t row_bytes, const line * const * columns, float * const * out, int64_t first, bool asks) {
    __m512 sums[n_sets][N][n_tile_rows];
    UNROLLED
    for (int i = 0; i < n_sets * N * n_tile_rows; i++) {
        sums[i / (N * n_tile_rows)][i / n_tile_rows % N][i % n_tile_rows] = _mm512_setzero_ps();
    }
    for (int64_t at = 0; at < n_lines; at += n_sets) {
        UNROLLED
        for (int i = 0; i < n_sets; i++) {
            __m512bh x[n_tile_rows];
            if (asks) {
                UNROLLED
                for (int r = 0; r < n_tile_rows; r++) {
                    _mm_prefetch((const char *) &((const line *) (rows + (n_tile_rows + r) * (int64_t) row_bytes))[at + i], _MM_HINT_T1);
                }
            }
            UNROLLED
            for (int r = 0; r < n_tile_rows; r++) {
                x[r] = read(((const line *) (rows + r * (int64_t) row_bytes))[at + i]);
            }
            UNROLLED
            for (int c = 0; c < N; c++) {
                const __m512bh y = read(columns[c][at + i]);
                UNROLLED
                for (int r = 0; r < n_tile_rows; r++) {
                    sums[i][c][r] = _mm512_dpbf16_ps(sums[i][c][r], x[r], y);
                }
            }
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        __m128 found = sums_of(sums[0][c][0], sums[0][c][1], sums[0][c][2], sums[0][c][3]);
        if (n_sets > 1) { // 0 + -0 is 0
            const __m512 * of = sums[n_sets - 1][c];
            found             = _mm_add_ps(_mm_add_ps(_mm_setzero_ps(), found), sums_of(of[0], of[1], of[2], of[3]));
        }
        _mm_storeu_ps(out[c] + first, found);
    }
}

template <int n_sets>
void tiles(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    constexpr int n_at_once = n_tile_sums / n_sets;
    const int64_t n_lines   = n / n_values;
    for (int64_t r = 0; r < n_rows; r += n_tile_rows) {
        const char * at = (const char *) rows + r * (int64_t) row_bytes;
        for (int c = 0; c < n_columns; c += n_at_once) {
            const auto * these = (const line * const *) columns + c;
            switch (n_columns - c < n_at_once ? n_columns - c : n_at_once) {
                case 1:  tile<1, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
                case 2:  tile<2, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
                case 3:  tile<3, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
                case 4:  tile<4, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
                case 5:  tile<5, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
                default: tile<6, n_sets>(n_lines, at, row_bytes, these, out + c, r, c == 0); break;
            }
        }
    }
}

// one row, read in the order in which it is in memory
struct for_row {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * row, size_t, const void * const * columns, float * const * out) {
        __m512 sums[2][N];
        UNROLLED
        for (int i = 0; i < 2 * N; i++) {
            sums[i / N][i % N] = _mm512_setzero_ps();
        }
        for (int64_t at = 0; at < n / n_values; at += 2) {
            UNROLLED
            for (int i = 0; i < 2; i++) {
                const line & x = ((const line *) row)[at + i];
                ask_for(&x);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    sums[i][c] = _mm512_dpbf16_ps(sums[i][c], read(x), read(((const line *) columns[c])[at + i]));
                }
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            const __m128 found = sums_of(sums[0][c], sums[1][c], sums[0][c], sums[1][c]);
            *out[c]            = 0.0f + _mm_cvtss_f32(found) + _mm_cvtss_f32(_mm_movehdup_ps(found));
        }
    }
};

const dot_kernel kernels[] = {
    { "avx512bf16", "bf16", GGML_TYPE_BF16, false, GGML_TYPE_BF16, n_values, sizeof(line), n_tile_rows, 2 * n_values, nullptr, all_dots<for_row>, tiles<2>,
      1, 8, tiles<1>, nullptr },
};

} // namespace

dot_kernels avx512bf16_kernels() {
    return { kernels, 1, nullptr, {} };
}

} // namespace moeedge

#endif
