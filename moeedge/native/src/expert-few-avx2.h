// Few columns by registers of 256 bits: rows in groups of eight, as llama.cpp repacks them, one group at a time, and rows of blocks
// of 256 as in the file.
//
// A group has the blocks of eight rows side by side, eight bytes of each in turn: 32 bytes hold eight bytes of rows 0-3 or 4-7.
// Eight bytes of a column are broadcast to meet them, so that 64 bits of a product belong to one row.

#pragma once

#include "expert-rows-x86.h"

namespace moeedge {

namespace {

// small steps

inline __m256i broadcast_8_bytes(const void * from) {
    long long value;
    memcpy(&value, from, sizeof(value));
    return _mm256_set1_epi64x(value);
}

// of products
inline __m256i sums_of_four(__m256i unsigned_bytes, __m256i signed_bytes) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), unsigned_bytes, signed_bytes);
#else
    return _mm256_madd_epi16(_mm256_set1_epi16(1), _mm256_maddubs_epi16(unsigned_bytes, signed_bytes));
#endif
}

// a block of 32 values of a row that meets many columns

#if defined(__AVXVNNI__)
// Sums begin at the bits of a float whose fraction counts ones, so that a subtraction takes the place of a conversion. A column's
// bytes are 128 too large, so that they are unsigned
struct row_values {
    static constexpr int n_bytes = 32, n_part = 64; // of a column's block; blocks of columns that fit the innermost cache

    __m256i x, start;
    __m256  begin = _mm256_set1_ps(12582912); // 1.5 * 2^23

    explicit row_values(__m256i values) : x(values) {
        start = _mm256_sub_epi32(_mm256_castps_si256(begin), sums_of_four(_mm256_set1_epi8((char) 0x80), x));
    }
    static void write(__m256i column, uint8_t * to) { store(to, _mm256_xor_si256(column, _mm256_set1_epi8((char) 0x80))); }
    __m256 times(const uint8_t * column) const {
        return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_dpbusd_avx_epi32(start, load(column), x)), begin);
    }
};
#else
// As 16 bits, of each four values the first two and the last two: bytes would need a third operation for their signs
struct row_values {
    static constexpr int n_bytes = 64, n_part = 16;

    __m256i first, last;

    explicit row_values(__m256i x) : first(two_of_four(x, 0)), last(two_of_four(x, 2)) {}
    static __m256i two_of_four(__m256i x, int from) {
        const __m128i bytes = _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13);
        const __m128i order = _mm_add_epi8(bytes, _mm_set1_epi16((short) (from << 8)));
        return _mm256_srai_epi16(_mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(order)), 8);
    }
    static void write(__m256i column, uint8_t * to) {
        const row_values values(column);
        store(to, values.first);
        store(to + 32, values.last);
    }
    __m256 times(const uint8_t * column) const {
        return _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(first, load(column)), _mm256_madd_epi16(last, load(column + 32))));
    }
};
#endif

// the sums of rows 0-3 and 4-7, two parts each: one number per row
inline __m256i add_rows(__m256i rows_0_3, __m256i rows_4_7) {
    return _mm256_hadd_epi32(rows_0_3, rows_4_7);
}

// products of 32 values of four rows (w: eight values of each) with a column, four int16 per row
inline __m256i multiply_32(const __m256i * w, const int8_t * column) {
    const __m256i first  = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], broadcast_8_bytes(column)),
                                            _mm256_maddubs_epi16(w[1], broadcast_8_bytes(column + 8)));
    const __m256i second = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], broadcast_8_bytes(column + 16)),
                                            _mm256_maddubs_epi16(w[3], broadcast_8_bytes(column + 24)));
    return _mm256_add_epi16(first, second);
}

// the same, two int32 per row
template <bool is_signed> inline __m256i add_32(const __m256i * w, const int8_t * column) {
    __m256i sum = _mm256_setzero_si256();
#if defined(__AVXVNNI__)
    UNROLLED
    for (int i = 0; i < 4; i++) {
        sum = _mm256_dpbusd_avx_epi32(sum, w[i], broadcast_8_bytes(column + 8 * i));
    }
#else
    const __m256i ones = _mm256_set1_epi16(1);
    if (!is_signed) {
        return _mm256_madd_epi16(multiply_32(w, column), ones);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products<true>(w[i], broadcast_8_bytes(column + 8 * i)), ones));
    }
#endif
    return sum;
}

// Eight rows side by side have eight bytes of rows 0-3 in one register (x) and of 4-7 in another (y): the first four bytes of each
// and the last four, of rows 0 1 4 5 2 3 6 7
inline __m256i even_words(__m256i x, __m256i y) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), 0x88));
}

inline __m256i odd_words(__m256i x, __m256i y) {
    return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(y), 0xdd));
}

// rows 0-7 of that order
inline __m256 in_order(__m256 rows) {
    return _mm256_permutevar8x32_ps(rows, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
}

// the same of bytes, each n times
inline __m128i order_of_bytes(int n) {
    return n == 1 ? _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, -1, -1, -1, -1, -1, -1, -1, -1)
                  : _mm_setr_epi8(0, 0, 1, 1, 4, 4, 5, 5, 2, 2, 3, 3, 6, 6, 7, 7);
}

// rows 0 1 4 5 2 3 6 7
inline __m128i order_halves(const uint16_t * halves) {
    return _mm_shuffle_epi32(load_16(halves), _MM_SHUFFLE(3, 1, 2, 0));
}

// factors of eight rows, 0 1 4 5 2 3 6 7
template <typename block_type> inline __m256 factors_of(const block_type & block) {
    return to_floats(order_halves(block.d));
}

inline __m256 factors_of(const block_mxfp4x8 & block) {
    const __m128i exponents = _mm_loadl_epi64((const __m128i *) block.e);
    return halves_of_powers(_mm256_cvtepu8_epi32(_mm_shuffle_epi8(exponents, order_of_bytes(1))));
}

// 32 values in groups of eight rows

// N columns, one group
template <typename L, int N> void group_dots_32(int64_t n_blocks, const typename L::block * rows, const column_block * const * columns, float * const * out) {
    const __m256i table = L::table();

    __m256 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const auto & block = rows[b];
        ask_for(&block);
        ask_for(block.q + 48);
        ask_for(block.q + 112);
        __m256i halves[2][N]; // of the rows
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m256i even = load(block.q + 32 * half);
            const __m256i odd  = load(block.q + 32 * half + 64);
            const __m256i w[4] = { _mm256_shuffle_epi8(table, low_4(even)), _mm256_shuffle_epi8(table, low_4(odd)),
                                   _mm256_shuffle_epi8(table, high_4(even)), _mm256_shuffle_epi8(table, high_4(odd)) };
            UNROLLED
            for (int c = 0; c < N; c++) {
                halves[half][c] = add_32<L::is_signed>(w, columns[c][b].q);
            }
        }
        const __m256 d = factors_of(block);
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_block & column = columns[c][b];
            const __m256i        sum    = _mm256_add_epi32(add_rows(halves[0][c], halves[1][c]), _mm256_set1_epi32(column.offset));
            sums[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(d, _mm256_set1_ps(column.d)), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm256_storeu_ps(out[c], in_order(sums[c]));
    }
}

// Q4_K in groups of eight rows

// products of 32 values of rows 0-3, and of 4-7, with a column, four int16 per row
inline void multiply_halves(const __m256i (*w)[4], const int8_t * column, __m256i * to) {
    UNROLLED
    for (int i = 0; i < 4; i++) {
        const __m256i x = broadcast_8_bytes(column + 8 * i);
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m256i each = _mm256_maddubs_epi16(w[half][i], x);
            to[half]           = i == 0 ? each : _mm256_add_epi16(to[half], each);
        }
    }
}

template <int N> void group_dots_q4_K(int64_t n_blocks, const block_q4_Kx8 * rows, const column_256 * const * columns, float * const * out) {
    // a row's scale four times as int16, for rows 0-3 and 4-7
    const __m256i spread[2] = {
        _mm256_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1, 2, -1, 2, -1, 2, -1, 2, -1, 3, -1, 3, -1, 3, -1, 3, -1),
        _mm256_setr_epi8(4, -1, 4, -1, 4, -1, 4, -1, 5, -1, 5, -1, 5, -1, 5, -1, 6, -1, 6, -1, 6, -1, 6, -1, 7, -1, 7, -1, 7, -1, 7, -1),
    };
    __m256 sums[N];
    __m256 min_sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c]     = _mm256_setzero_ps();
        min_sums[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q4_Kx8 & block = rows[b];
        uint64_t             scales[8], mins[8]; // per 32 values
        ask_for_bytes<128>((const char *) &block + ahead_bytes);
        UNROLLED
        for (int s = 0; s < 8; s++) {
            unpack_scales(block.scales + 12 * s, scales[s], mins[s]);
        }
        __m256i halves[2][N]; // of the rows
        UNROLLED
        for (int c = 0; c < N; c++) {
            halves[0][c] = halves[1][c] = _mm256_setzero_si256();
        }
        for (int i = 0; i < 4; i++) {
            const uint8_t * q = block.q + 256 * i;
            ask_for_bytes<256>((const char *) q + ahead_bytes);
            UNROLLED
            for (int s = 0; s < 2; s++) { // the low bits are 32 values, the high bits the next 32
                __m256i w[2][4], products[2];
                UNROLLED
                for (int j = 0; j < 8; j++) {
                    w[j % 2][j / 2] = s == 0 ? low_4(load(q + 32 * j)) : high_4(load(q + 32 * j));
                }
                const __m256i all = _mm256_set1_epi64x((long long) scales[2 * i + s]);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    multiply_halves(w, columns[c][b].q + 64 * i + 32 * s, products);
                    UNROLLED
                    for (int half = 0; half < 2; half++) {
                        const __m256i scaled = _mm256_madd_epi16(products[half], _mm256_shuffle_epi8(all, spread[half]));
                        halves[half][c]      = _mm256_add_epi32(halves[half][c], scaled);
                    }
                }
            }
        }
        const __m256 d   = to_floats(order_halves(block.d));
        const __m256 min = to_floats(_mm_loadu_si128((const __m128i *) block.min));
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_256 & column = columns[c][b];
            __m256i min_sum = _mm256_setzero_si256();
            for (int s = 0; s < 8; s += 2) {
                const __m128i pairs = _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long) mins[s]), _mm_cvtsi64_si128((long long) mins[s + 1]));
                const __m256i pair  = _mm256_set1_epi32(read_int32(column.sums_of_32 + s));
                min_sum = _mm256_add_epi32(min_sum, _mm256_madd_epi16(pair, _mm256_cvtepu8_epi16(pairs)));
            }
            const __m256  column_d = _mm256_set1_ps(column.d);
            const __m256i sum      = add_rows(halves[0][c], halves[1][c]);
            sums[c]     = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(d, column_d), sums[c]);
            min_sums[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(min_sum), _mm256_mul_ps(min, column_d), min_sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm256_storeu_ps(out[c], _mm256_sub_ps(in_order(sums[c]), min_sums[c]));
    }
}

// blocks of 256, one row

// sum + x * y of neighbours of 16 bits
inline __m256i add_products_of_16(__m256i sum, __m256i x, __m256i y) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, x, y);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(x, y));
#endif
}

// the scales of 32 values as int16
template <int n_scales> inline __m256i scales_of_32(__m128i scales, int i) {
    if constexpr (n_scales == 8) {
        const __m256i all = _mm256_broadcastsi128_si256(_mm_cvtepi8_epi16(scales));
        return _mm256_shuffle_epi8(all, _mm256_set1_epi16((short) (0x0100 + 0x0202 * i)));
    }
    const __m128i first = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, _mm_add_epi8(first, _mm_set1_epi8((char) (2 * i)))));
}

// a * b + c of the first lane, rounded once
inline __m128 fused(float a, __m128i b, float c) {
    return _mm_fmadd_ss(_mm_set_ss(a), _mm_cvtepi32_ps(b), _mm_set_ss(c));
}

template <typename T, int N> void dots_256(int64_t n_blocks, const typename T::block * row, const column_256 * const * columns, float * const * out) {
    constexpr bool is_signed = T::n_summed == 0 || T::is_offset_per_value;
    constexpr int  n_chains  = N == 1 ? 4 : N == 2 ? 2 : 1; // of totals, so that their latency is hidden

    __m256 sums[N];
    __m128 mins_by_four[N];
    float  mins_by_block[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c]          = _mm256_setzero_ps();
        mins_by_four[c]  = _mm_setzero_ps();
        mins_by_block[c] = 0;
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const auto & block = row[b];
        ask_for_bytes<sizeof(block)>((const char *) &block + ahead_bytes);
        const scale_bytes bytes = T::scales(block);
        const float       d     = to_float(block.d);
        const float       min   = min_factor_of<T>(block);
        __m256i           totals[n_chains * N];
        UNROLLED
        for (int c = N; c < n_chains * N; c++) {
            totals[c] = _mm256_setzero_si256();
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_256 & column = columns[c][b];
            totals[c]                 = _mm256_setzero_si256();
            if constexpr (T::offset != 0 && !T::is_offset_per_value) {
                const __m256i too_much = _mm256_madd_epi16(load(column.sums), _mm256_cvtepi8_epi16(bytes.scales));
                totals[c]              = _mm256_mullo_epi32(too_much, _mm256_set1_epi32(-T::offset));
            }
            if constexpr (T::mins == MINS_FIRST) {
                const __m256i found = _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes.mins), load(column.sums));
                sums[c]             = _mm256_fmadd_ps(_mm256_set1_ps(-column.d * min), _mm256_cvtepi32_ps(found), sums[c]);
            } else if constexpr (T::mins != NO_MINS) {
                const __m128i found = _mm_madd_epi16(_mm_cvtepu8_epi16(bytes.mins), sums_of_32(column));
                if constexpr (T::mins == MINS_BY_FOUR) {
                    mins_by_four[c] = _mm_fmadd_ps(_mm_set1_ps(-column.d * min), _mm_cvtepi32_ps(found), mins_by_four[c]);
                } else {
                    const __m128i of_2 = _mm_hadd_epi32(found, found);
                    mins_by_block[c]   = _mm_cvtss_f32(fused(-column.d * min, _mm_hadd_epi32(of_2, of_2), mins_by_block[c]));
                }
            }
        }
        UNROLLED
        for (int i = 0; i < 8; i++) {
            const __m256i scale  = scales_of_32<T::n_scales>(bytes.scales, i);
            const __m256i offset = _mm256_set1_epi8(T::offset);
            __m256i       w      = T::values(block, i);
            if constexpr (T::is_offset_per_value && N > 1) {
                w = _mm256_sub_epi8(w, offset);
            }
            UNROLLED
            for (int c = 0; c < N; c++) {
                const __m256i x = load(columns[c][b].q + 32 * i);
                __m256i       found;
                if constexpr (T::is_offset_per_value && N == 1) { // one column: less than to change signs
                    found = _mm256_sub_epi16(_mm256_maddubs_epi16(w, x), _mm256_maddubs_epi16(offset, x));
                } else {
                    found = products<is_signed>(w, x);
                }
                __m256i & total = totals[i % n_chains * N + c];
                total           = add_products_of_16(total, scale, found);
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            __m256i total = totals[c];
            UNROLLED
            for (int i = 1; i < n_chains; i++) {
                total = _mm256_add_epi32(total, totals[i * N + c]);
            }
            sums[c] = _mm256_fmadd_ps(_mm256_set1_ps(columns[c][b].d * d), _mm256_cvtepi32_ps(total), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        const float mins = T::mins == MINS_BY_FOUR ? sum_of(mins_by_four[c]) : mins_by_block[c];
        *out[c]          = T::mins == NO_MINS || T::mins == MINS_FIRST ? sum_of(sums[c]) : sum_of(sums[c]) + mins;
    }
}

template <typename T> struct for_256 {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_256<T, N>(n / 256, (const typename T::block *) rows, (const column_256 * const *) columns, out);
    }
};

} // namespace

} // namespace moeedge
