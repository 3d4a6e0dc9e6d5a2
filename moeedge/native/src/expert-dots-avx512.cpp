// The kernels of expert-dots.h for AVX-512 with VNNI. This file alone is compiled for it.
//
// VPDPBUSD adds four products of unsigned and signed bytes to 32 bits, so rows in groups of eight are kept unsigned, columns of
// other blocks of 32, and what that adds too much is the sum to begin with. Rows in groups of eight meet the columns sixteen at once: two groups, whose words of four bytes
// are sorted so that each 32 bits of a product belong to one row.

#include "expert-dots.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#    include "expert-groups-x86.h"
#    include "expert-panels-x86.h"
#    include "attention-x86.h"

namespace moeedge {

namespace {

// small steps

inline __m512i load_64(const void * from) {
    return _mm512_loadu_si512(from);
}

// the same 32 bytes twice
inline __m512i load_32_twice(const void * from) {
    return _mm512_broadcast_i64x4(load(from));
}

inline __m512i join(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

inline __m256i upper_half(__m512i x) {
    return _mm512_extracti64x4_epi64(x, 1);
}

// adds products of w with the same four bytes of a column
inline __m512i add_products(__m512i sum, __m512i w, const int8_t * column) {
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(read_int32(column)));
}

// the even and odd words of two registers: words 0 and 1 of the eight bytes of sixteen rows
inline __m512i even_words(__m512i first, __m512i second) {
    return _mm512_permutex2var_epi32(first, _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30), second);
}

inline __m512i odd_words(__m512i first, __m512i second) {
    return _mm512_permutex2var_epi32(first, _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), second);
}

inline __m512i low_bits(__m512i x) {
    return _mm512_and_si512(x, _mm512_set1_epi8(15));
}

inline __m512i high_bits(__m512i x) {
    return low_bits(_mm512_srli_epi16(x, 4));
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
    const auto powers_of = [](const uint8_t * e) { return _mm256_castps_si256(halves_of_powers(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) e)))); };
    return _mm512_castsi512_ps(join(powers_of(first.e), powers_of(second.e)));
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

// N columns, two groups
template <typename L, int N>
void dots_32x8(int64_t n_blocks, const typename L::block * first, const typename L::block * second, const column_block * const * columns,
               float * const * out) {
    const __m512i table = join(L::table(), L::table());

    __m512 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm512_setzero_ps();
    }
    const char * later = (const char *) first + bytes_until_later(2 * n_blocks * (int64_t) sizeof(*first));
    for (int64_t b = 0; b < n_blocks; b++) {
        ask_for_bytes<2 * sizeof(*first)>(later + 2 * b * (int64_t) sizeof(*first));
        __m512i w[8];
        unpack_words(first[b].q, second[b].q, table, w);
        const __m512 d = factors_of(first[b], second[b]);
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_block & column = columns[c][b];
            __m512i              halves[2] = { _mm512_set1_epi32(column.offset), _mm512_setzero_si512() };
            UNROLLED
            for (int i = 0; i < 8; i++) {
                halves[i / 4] = add_products(halves[i / 4], w[i], column.q + 4 * i);
            }
            const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(halves[0], halves[1]));
            sums[c]          = _mm512_fmadd_ps(sum, _mm512_mul_ps(d, _mm512_set1_ps(column.d)), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm512_storeu_ps(out[c], sums[c]);
    }
}

// Q4_K in groups of eight rows

// word w of each of the eight 12 bytes of two groups
inline __m512i gather_words(const uint8_t * first, const uint8_t * second, int w) {
    const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 0, 0, 0, 0, 0, 0, 0), _mm512_set1_epi32(w));
    const __m512i x = _mm512_permutex2var_epi32(load_64(first), places, _mm512_castsi256_si512(load(first + 64)));
    const __m512i y = _mm512_permutex2var_epi32(load_64(second), places, _mm512_castsi256_si512(load(second + 64)));
    return join(_mm512_castsi512_si256(x), _mm512_castsi512_si256(y));
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
    const __m512i two = _mm512_set1_epi8(48); // where the upper two bits go
    store_rows(_mm512_and_si512(a, six), _mm512_or_si512(low_bits(c), _mm512_and_si512(_mm512_srli_epi32(a, 2), two)), scales);
    store_rows(_mm512_and_si512(b, six), _mm512_or_si512(high_bits(c), _mm512_and_si512(_mm512_srli_epi32(b, 2), two)), mins);
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

template <int N>
void dots_q4_Kx8(int64_t n_blocks, const block_q4_Kx8 * first, const block_q4_Kx8 * second, const block_q8_K * const * columns,
                 float * const * out) {
    __m512 sums[N];
    __m512 min_sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c]     = _mm512_setzero_ps();
        min_sums[c] = _mm512_setzero_ps();
    }
    const char * later = (const char *) first + bytes_until_later(2 * n_blocks * (int64_t) sizeof(*first));
    for (int64_t b = 0; b < n_blocks; b++) {
        uint8_t scales[8][16], mins[8][16];
        unpack_all_scales(first[b].scales, second[b].scales, scales, mins);
        __m512i totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] = _mm512_setzero_si512();
        }
        for (int s = 0; s < 8; s += 2) { // the low bits are 32 values, the high bits the next 32
            ask_for_bytes<sizeof(*first) / 2>(later + (4 * b + s / 2) * (int64_t) sizeof(*first) / 2);
            __m512i lows[N], highs[N];
            UNROLLED
            for (int c = 0; c < N; c++) {
                lows[c] = highs[c] = _mm512_setzero_si512();
            }
            UNROLLED
            for (int i = 0; i < 4; i++) {
                const int64_t at = 128 * s + 64 * i;
                const __m512i x    = load_64(first[b].q + at);
                const __m512i y    = load_64(second[b].q + at);
                const __m512i even = even_words(x, y);
                const __m512i odd  = odd_words(x, y);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    const int8_t * column = columns[c][b].q + 32 * s + 8 * i;
                    lows[c]  = add_products(add_products(lows[c], low_bits(even), column), low_bits(odd), column + 4);
                    highs[c] = add_products(add_products(highs[c], high_bits(even), column + 32), high_bits(odd), column + 36);
                }
            }
            const __m512i low_scales  = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) scales[s]));
            const __m512i high_scales = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) scales[s + 1]));
            UNROLLED
            for (int c = 0; c < N; c++) {
                const __m512i low  = _mm512_mullo_epi32(lows[c], low_scales);
                const __m512i high = _mm512_mullo_epi32(highs[c], high_scales);
                totals[c]          = _mm512_add_epi32(totals[c], _mm512_add_epi32(low, high));
            }
        }
        __m512i min_pairs[4];
        pair_mins(mins, min_pairs);
        const __m512 d   = factors(first[b].d, second[b].d);
        const __m512 min = factors(first[b].min, second[b].min);
        UNROLLED
        for (int c = 0; c < N; c++) {
            const block_q8_K & column = columns[c][b];
            const __m512i      of_32  = _mm512_castsi128_si512(sums_of_32(column));
            __m512i            total  = _mm512_setzero_si512();
            UNROLLED
            for (int i = 0; i < 4; i++) {
                total = _mm512_dpwssd_epi32(total, min_pairs[i], _mm512_permutexvar_epi32(_mm512_set1_epi32(i), of_32));
            }
            const __m512 column_d = _mm512_set1_ps(column.d);
            sums[c]     = _mm512_fmadd_ps(_mm512_cvtepi32_ps(totals[c]), _mm512_mul_ps(d, column_d), sums[c]);
            min_sums[c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(min, column_d), min_sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm512_storeu_ps(out[c], _mm512_sub_ps(sums[c], min_sums[c]));
    }
}

// blocks of 32, pairs of rows side by side

// 32 values of two rows

template <typename block_type> inline __m512i values_of(const block_type & first, const block_type & second) {
    return join(values_of(first), values_of(second));
}

inline __m512i values_of(const block_q4_0 & first, const block_q4_0 & second) {
    const __m256i raw    = _mm256_loadu2_m128i((const __m128i *) second.q, (const __m128i *) first.q);
    const __m512i twice  = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(raw));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    return _mm512_sub_epi8(low_bits(_mm512_srlv_epi16(twice, shifts)), _mm512_set1_epi8(8));
}

template <typename block_type> inline __m512 factors_of_pair(const block_type & first, const block_type & second) {
    const __m128  both   = _mm_cvtph_ps(_mm_cvtsi32_si128(first.d | second.d << 16));
    const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutexvar_ps(places, _mm512_castps128_ps512(both));
}

inline __m512 factors_of_pair(const block_mxfp4 & first, const block_mxfp4 & second) {
    return _mm512_castsi512_ps(join(_mm256_set1_epi32((int) powers.bits[first.e]), _mm256_set1_epi32((int) powers.bits[second.e])));
}

// a block of a column of Q8_0
struct column_bytes {
    float   d;
    uint8_t q[32]; // 128 too large
};

inline void pack_bytes(const void * quantized, int64_t n_blocks, void * to) {
    const block_q8_0 * from = (const block_q8_0 *) quantized;
    for (int64_t b = 0; b < n_blocks; b++) {
        column_bytes & block = ((column_bytes *) to)[b];
        block.d              = to_float(from[b].d);
        store(block.q, _mm256_xor_si256(load(from[b].q), _mm256_set1_epi8((char) 0x80)));
    }
}

// n_sums: of each row, which blocks take in turn
template <typename block_type, int n_pairs, int N, int n_sums>
void dots_32(int64_t n_blocks, const char * rows, size_t row_bytes, const column_bytes * const * columns, float * const * out) {
    const __m512i      too_large = _mm512_set1_epi8((char) 0x80);
    const block_type * row[2 * n_pairs];
    UNROLLED
    for (int r = 0; r < 2 * n_pairs; r++) {
        row[r] = (const block_type *) (rows + r * row_bytes);
    }
    const char * later = rows + bytes_until_later(2 * n_pairs * (int64_t) row_bytes);
    __m512       sums[n_sums][n_pairs][N];
    UNROLLED
    for (int i = 0; i < n_sums * n_pairs * N; i++) {
        sums[i / (n_pairs * N)][i / N % n_pairs][i % N] = _mm512_setzero_ps();
    }
    for (int64_t first = 0; first < n_blocks; first += n_sums) {
        UNROLLED
        for (int i = 0; i < n_sums; i++) {
            const int64_t b = first + i;
            ask_for_bytes<2 * n_pairs * sizeof(block_type)>(later + 2 * n_pairs * b * (int64_t) sizeof(block_type));
            if constexpr (n_pairs == 1 && sizeof(block_type) == sizeof(block_q8_0)) { // little to compute: further ahead, into the second cache
                _mm_prefetch(later + 2 * b * (int64_t) sizeof(block_type) + 2 * ahead_bytes, _MM_HINT_T1);
            }
            __m512i w[n_pairs], start[n_pairs];
            __m512  d[n_pairs];
            UNROLLED
            for (int p = 0; p < n_pairs; p++) {
                w[p]     = values_of(row[2 * p][b], row[2 * p + 1][b]);
                start[p] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_dpbusd_epi32(_mm512_setzero_si512(), too_large, w[p]));
                d[p]     = factors_of_pair(row[2 * p][b], row[2 * p + 1][b]);
            }
            UNROLLED
            for (int c = 0; c < N; c++) {
                const column_bytes & column = columns[c][b];
                const __m512i        q      = load_32_twice(column.q);
                UNROLLED
                for (int p = 0; p < n_pairs; p++) {
                    const __m512i sum = _mm512_dpbusd_epi32(start[p], q, w[p]);
                    __m512 &      to  = sums[i][p][c];
                    to                = _mm512_fmadd_ps(_mm512_mul_ps(d[p], _mm512_set1_ps(column.d)), _mm512_cvtepi32_ps(sum), to);
                }
            }
        }
    }
    UNROLLED
    for (int i = 0; i < n_pairs * N; i++) {
        const int    p = i / N, c = i % N;
        const __m512 sum  = n_sums == 1 ? sums[0][p][c] : _mm512_add_ps(sums[0][p][c], sums[n_sums - 1][p][c]);
        out[c][2 * p]     = sum_of(_mm512_castps512_ps256(sum));
        out[c][2 * p + 1] = sum_of(_mm256_castsi256_ps(upper_half(_mm512_castps_si512(sum))));
    }
}

// all rows and columns

// one: computes one group, both: two at once. With few columns memory is the limit, and it is read best in its order
template <int N, typename F, typename G> inline void by_groups(float * const * out, F one, G both) {
    if constexpr (N <= 2) {
        float * of_second[N];
        for (int c = 0; c < N; c++) {
            of_second[c] = out[c] + 8;
        }
        one(0, out);
        one(1, of_second);
    } else {
        both();
    }
}

template <typename L> struct for_32x8 {
    static constexpr int64_t n_rows = 16;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        const typename L::block * groups[] = { (const typename L::block *) rows, (const typename L::block *) (rows + 8 * row_bytes) };
        const auto *              all      = (const column_block * const *) columns;
        by_groups<N>(out, [&](int g, float * const * to) { group_dots_32<L, N>(n / 32, groups[g], all, to); },
                     [&] { dots_32x8<L, N>(n / 32, groups[0], groups[1], all, out); });
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 16;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        const block_q4_Kx8 * groups[] = { (const block_q4_Kx8 *) rows, (const block_q4_Kx8 *) (rows + 8 * row_bytes) };
        const auto *         all      = (const block_q8_K * const *) columns;
        by_groups<N>(out, [&](int g, float * const * to) { group_dots_q4_K<N>(n / 256, groups[g], all, to); },
                     [&] { dots_q4_Kx8<N>(n / 256, groups[0], groups[1], all, out); });
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
    int           c      = 0;
    for (; c + n_wide <= n_columns; c += n_wide) {
        for (int64_t r = 0; r < n_rows; r += 4) {
            float * to[n_wide];
            for (int i = 0; i < n_wide; i++) {
                to[i] = out[c + i] + r;
            }
            dots_32<block_type, 2, n_wide, n_sums>(n / 32, (const char *) rows + r * (int64_t) row_bytes, row_bytes,
                                                   (const column_bytes * const *) columns + c, to);
        }
    }
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
    return { "avx512vnni", layout, type, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 16, 256, nullptr, all_dots<for_256<T>>, many, 7, 8, many, nullptr };
}

const dot_kernel kernels[] = {
    kernel_of_32x8<q4_0x8_layout>("q4_0x8", GGML_TYPE_Q4_0),
    kernel_of_32x8<iq4_nlx8_layout>("iq4_nlx8", GGML_TYPE_IQ4_NL),
    kernel_of_32x8<mxfp4x8_layout>("mxfp4x8", GGML_TYPE_MXFP4),
    { "avx512vnni", "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 16, 256, nullptr, all_dots<for_q4_Kx8>,
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

// for attention-x86.h

struct simd {
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

#else

namespace moeedge {

dot_kernels avx512_kernels() {
    return { nullptr, 0, nullptr, {} };
}

} // namespace moeedge

#endif
