// The kernels of expert-dots.h for AVX-512 with VNNI. This file alone is compiled for it.
//
// VPDPBUSD adds four products of unsigned and signed bytes to 32 bits. So the rows are made unsigned where they are in groups of
// eight, and the columns where they meet other blocks of 32; what that adds too much is the sum to begin with. Few columns of
// K-quants take VPMADDUBSW and VPDPWSSD, which multiplies by the scales.

#include "expert-dots.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#    include "expert-few-avx512.h"
#    include "expert-panels-x86.h"
#    include "attention-avx512.h"

namespace moeedge {

namespace {

// the even and odd words of two registers: words 0 and 1 of the eight bytes of sixteen rows
inline __m512i even_words(__m512i first, __m512i second) {
    return _mm512_permutex2var_epi32(first, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), second);
}

inline __m512i odd_words(__m512i first, __m512i second) {
    return _mm512_permutex2var_epi32(first, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), second);
}

// factors of sixteen rows
inline __m512 factors(const uint16_t * first, const uint16_t * second) {
    return _mm512_cvtph_ps(_mm256_loadu2_m128i((const __m128i *) second, (const __m128i *) first));
}

// 32 values in groups of eight rows

template <typename block_type> inline __m512 factors_of(const block_type & first, const block_type & second) {
    return factors(first.d, second.d);
}

inline __m512 factors_of(const block_mxfp4x8 & first, const block_mxfp4x8 & second) {
    return _mm512_castsi512_ps(join(_mm256_castps_si256(factors_of(first)), _mm256_castps_si256(factors_of(second))));
}

// from two groups to four values of each row
inline void unpack_words(const uint8_t * first, const uint8_t * second, __m512i table, __m512i * w) {
    UNROLLED
    for (int i = 0; i < 2; i++) {
        const __m512i x    = load_64(first + 64 * i);
        const __m512i y    = load_64(second + 64 * i);
        const __m512i even = even_words(x, y);
        const __m512i odd  = odd_words(x, y);
        w[2 * i]           = _mm512_shuffle_epi8(table, low_bits(even));
        w[2 * i + 1]       = _mm512_shuffle_epi8(table, low_bits(odd));
        w[2 * i + 4]       = _mm512_shuffle_epi8(table, high_bits(even));
        w[2 * i + 5]       = _mm512_shuffle_epi8(table, high_bits(odd));
    }
}

template <typename L> struct panels_32 : panels_32_multiply<L>, rows_in_order {
    static void unpack(const char * rows, size_t row_bytes, int64_t from, int64_t n, panel_32 & to) {
        const __m512i table  = join(L::table(), L::table());
        const auto *  first  = (const typename L::block *) rows + from;
        const auto *  second = (const typename L::block *) (rows + 8 * row_bytes) + from;
        for (int64_t b = 0; b < n; b++) {
            ask_for_bytes<sizeof(*first)>((const char *) &first[b] + 16 * row_bytes); // of the next panel
            ask_for_bytes<sizeof(*first)>((const char *) &second[b] + 16 * row_bytes);
            unpack_words(first[b].q, second[b].q, table, (__m512i *) to.q[b]);
            _mm512_store_ps(to.d[b], factors_of(first[b], second[b]));
        }
    }
};

// Q4_K in groups of eight rows

// of two groups
inline __m512i gather_words(const uint8_t * first, const uint8_t * second, int w) {
    return join(_mm512_castsi512_si256(gather_words(first, w)), _mm512_castsi512_si256(gather_words(second, w)));
}

// from rows 0-3 and 4-7 of two groups per 32 values to sixteen rows per 32 values
inline void store_rows(__m512i rows_0_3, __m512i rows_4_7, uint8_t (*to)[16]) {
    const __m512i places = _mm512_setr_epi32(0, 16, 8, 24, 1, 17, 9, 25, 2, 18, 10, 26, 3, 19, 11, 27);
    _mm512_storeu_si512(to[0], _mm512_permutex2var_epi32(rows_0_3, places, rows_4_7));
    _mm512_storeu_si512(to[4], _mm512_permutex2var_epi32(rows_0_3, _mm512_add_epi32(places, _mm512_set1_epi32(4)), rows_4_7));
}

// the scales and minimums of sixteen rows for each 32 values, as unpack_scales
inline void unpack_all_scales(const uint8_t * first, const uint8_t * second, uint8_t (*scales)[16], uint8_t (*mins)[16]) {
    const __m512i a   = gather_words(first, second, 0);
    const __m512i b   = gather_words(first, second, 1);
    const __m512i c   = gather_words(first, second, 2);
    const __m512i six = _mm512_set1_epi8(63);
    store_rows(_mm512_and_si512(a, six), six_bits(low_bits(c), a), scales);
    store_rows(_mm512_and_si512(b, six), six_bits(high_bits(c), b), mins);
}

// a row's minimums of each two times 32 values
inline void pair_mins(const uint8_t (*mins)[16], __m512i * pairs) {
    UNROLLED
    for (int i = 0; i < 4; i++) {
        const __m128i even = _mm_loadu_si128((const __m128i *) mins[2 * i]);
        const __m128i odd  = _mm_loadu_si128((const __m128i *) mins[2 * i + 1]);
        pairs[i]           = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd)));
    }
}

template <panel_rounding R> struct panels_q4_Kx8 : panels_256_multiply<q4_K_reader, R>, rows_in_order {
    static void unpack(const char * rows, size_t row_bytes, int64_t from, int64_t n, panel_256<8> & to) {
        const auto * first  = (const block_q4_Kx8 *) rows + from;
        const auto * second = (const block_q4_Kx8 *) (rows + 8 * row_bytes) + from;
        for (int64_t b = 0; b < n; b++) {
            uint8_t scales[8][16], mins[8][16];
            unpack_all_scales(first[b].scales, second[b].scales, scales, mins);
            UNROLLED
            for (int s = 0; s < 8; s++) {
                const __m512i once = _mm512_cvtepu8_epi32(load_16(scales[s]));
                _mm512_store_si512(to.scales[b][s], _mm512_or_si512(once, _mm512_slli_epi32(once, 16)));
            }
            pair_mins(mins, (__m512i *) to.mins[b]);
            for (int i = 0; i < 16; i++) { // of two times 32 values, eight values of each row
                const __m512i x = load_64(first[b].q + 64 * i), y = load_64(second[b].q + 64 * i);
                _mm_prefetch((const char *) first[b].q + 64 * i + 16 * row_bytes, _MM_HINT_T0);
                _mm_prefetch((const char *) second[b].q + 64 * i + 16 * row_bytes, _MM_HINT_T0);
                const __m512i even = even_words(x, y), odd = odd_words(x, y);
                row_words *   low  = to.q[b] + 16 * (i / 4) + 2 * (i % 4);
                _mm512_store_si512(low[0], low_bits(even));
                _mm512_store_si512(low[1], low_bits(odd));
                _mm512_store_si512(low[8], high_bits(even));
                _mm512_store_si512(low[9], high_bits(odd));
            }
            _mm512_store_ps(to.d[b], factors(first[b].d, second[b].d));
            _mm512_store_ps(to.min[b], factors(first[b].min, second[b].min));
        }
    }
};

// sixteen rows' sixteen words to as many words of all rows
inline void transpose(__m512i * x, row_words * to) {
    __m512i y[16];
    UNROLLED
    for (int i = 0; i < 8; i++) {
        y[2 * i]     = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
    UNROLLED
    for (int i = 0; i < 16; i += 4) { // four words of each of four rows
        x[i]     = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88), d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
        _mm512_store_si512(to[i], _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_store_si512(to[i + 4], _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_store_si512(to[i + 8], _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_store_si512(to[i + 12], _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}

// rows of blocks of 256 one after the other, rounded as tiles
template <typename T> struct panels_256 : panels_256_multiply<T, AS_TILE>, rows_in_order {
    // apart: within the loop over columns GCC lacks registers for these
    __attribute__((noinline)) static void unpack(const char * rows, size_t row_bytes, int64_t first, int64_t n, panel_256<T::n_scales> & to) {
        for (int64_t b = 0; b < n; b++) {
            const typename T::block * each[16];
            for (int r = 0; r < 16; r++) {
                each[r] = (const typename T::block *) (rows + r * (int64_t) row_bytes) + first + b;
                ask_for_bytes<sizeof(*each[r])>((const char *) each[r] + n_panel_rows * row_bytes); // of the next panel
            }
            UNROLLED
            for (int i = 0; i < 4; i++) {
                __m512i values[16];
                UNROLLED
                for (int r = 0; r < 16; r++) {
                    values[r] = wide_values(*each[r], i);
                }
                transpose(values, to.q[b] + 16 * i);
            }
            unpack_factors<T>(each, b, 0, to);
            unpack_factors<T>(each + 8, b, 8, to);
        }
    }
};

// all rows and columns

template <typename L> struct for_32x8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        group_dots_32<L, N>(n / 32, (const typename L::block *) rows, (const column_block * const *) columns, out);
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        group_dots_q4_K<N>(n / 256, (const block_q4_Kx8 *) rows, (const column_256 * const *) columns, out);
    }
};

template <typename T> struct for_256 {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_256<T, N>(n / 256, (const typename T::block *) rows, (const column_256 * const *) columns, out);
    }
};

template <typename block_type, int n_sums> struct for_32 {
    static constexpr int64_t n_rows = 2;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        dots_32<block_type, 1, N, n_sums>(n / 32, rows, row_bytes, (const column_bytes * const *) columns, out);
    }
};

// the same columns meet all rows
template <typename block_type, int n_sums>
void wide_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    constexpr int n_wide = 8 / n_sums;
    const int     c      = in_passes<n_wide, n_wide + 1>(n_columns, [&](auto n_now, int first) {
        for (int64_t r = 0; r < n_rows; r += 4) {
            float * to[n_now];
            for (int i = 0; i < n_now; i++) {
                to[i] = out[first + i] + r;
            }
            dots_32<block_type, 2, n_now, n_sums>(n / 32, (const char *) rows + r * (int64_t) row_bytes, row_bytes,
                                                  (const column_bytes * const *) columns + first, to);
        }
    });
    all_dots<for_32<block_type, n_sums>>(n, rows, row_bytes, n_rows, columns + c, n_columns - c, out + c);
}

template <typename L> constexpr dot_kernel kernel_of_32x8(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_32<L>>;
    return { "avx512vnni", layout, type, true, GGML_TYPE_Q8_0, 32, sizeof(column_block), 16, 32, pack_columns<L::offset>, all_dots<for_32x8<L>>,
             many, 7, 8, many, nullptr };
}

// ggml rounds dense matrices of IQ4_NL otherwise
template <typename block_type, int n_sums, bool has_dense = true> constexpr dot_kernel kernel_of_32(const char * layout, ggml_type type) {
    const dots_function many = wide_dots<block_type, n_sums>;
    return { "avx512vnni", layout, type, false, GGML_TYPE_Q8_0, 32, sizeof(column_bytes), 4, 32 * n_sums, pack_bytes, all_dots<for_32<block_type, n_sums>>,
             many, has_dense ? 7 : 0, 8, has_dense ? many : nullptr, nullptr };
}

template <typename T> constexpr dot_kernel kernel_of_256(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_256<T>>;
    return { "avx512vnni", layout, type, false, GGML_TYPE_Q8_K, 256, sizeof(column_256), 16, 256, pack_256, all_dots<for_256<T>>, many, 7, 8, many, nullptr };
}

const dot_kernel kernels[] = {
    kernel_of_32x8<q4_0x8_layout>("q4_0x8", GGML_TYPE_Q4_0),
    kernel_of_32x8<iq4_nlx8_layout>("iq4_nlx8", GGML_TYPE_IQ4_NL),
    kernel_of_32x8<mxfp4x8_layout>("mxfp4x8", GGML_TYPE_MXFP4),
    { "avx512vnni", "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(column_256), 16, 256, pack_256, all_dots<for_q4_Kx8>,
      panel_dots<panels_q4_Kx8<AS_GROUP>>, 3, 4, panel_dots<panels_q4_Kx8<AS_GROUP_BY_FOUR>>, quantize_fours },
    kernel_of_32<block_q8_0, 1>("q8_0", GGML_TYPE_Q8_0),
    kernel_of_32<block_q4_0, 1>("q4_0", GGML_TYPE_Q4_0),
    kernel_of_32<block_q5_0, 1>("q5_0", GGML_TYPE_Q5_0),
    kernel_of_32<block_iq4_nl, 2, false>("iq4_nl", GGML_TYPE_IQ4_NL),
    kernel_of_32<block_mxfp4, 2>("mxfp4", GGML_TYPE_MXFP4),
    kernel_of_256<q2_K_reader>("q2_K", GGML_TYPE_Q2_K),
    kernel_of_256<q3_K_reader>("q3_K", GGML_TYPE_Q3_K),
    kernel_of_256<q4_K_reader>("q4_K", GGML_TYPE_Q4_K),
    kernel_of_256<q5_K_reader>("q5_K", GGML_TYPE_Q5_K),
    kernel_of_256<q6_K_reader>("q6_K", GGML_TYPE_Q6_K),
    kernel_of_256<iq4_xs_reader>("iq4_xs", GGML_TYPE_IQ4_XS),
};

int64_t multiply(int64_t n_turns) {
    const __m512i x = _mm512_set1_epi8(1);
    for (int64_t i = 0; i < n_turns; i++) {
        __asm__ volatile("vpdpbusd %0, %0, %%zmm16\n\tvpdpbusd %0, %0, %%zmm17\n\tvpdpbusd %0, %0, %%zmm18\n\tvpdpbusd %0, %0, %%zmm19\n\t"
                         "vpdpbusd %0, %0, %%zmm20\n\tvpdpbusd %0, %0, %%zmm21\n\tvpdpbusd %0, %0, %%zmm22\n\tvpdpbusd %0, %0, %%zmm23"
                         :
                         : "v"(x)
                         : "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23");
    }
    return n_turns * 8 * 64;
}

} // namespace

dot_kernels avx512_kernels() {
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])), multiply, kernels_of_attention<simd>() };
}

} // namespace moeedge

#endif
