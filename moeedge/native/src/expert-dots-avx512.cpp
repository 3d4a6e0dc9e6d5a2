// The kernels of expert-dots.h for AVX-512 with VNNI. This file alone is compiled for it.
//
// VPDPBUSD adds four products of unsigned and signed bytes to 32 bits, so rows are kept unsigned, and what that adds too much is
// the sum to begin with. Rows in groups of eight meet the columns sixteen at once: two groups, whose words of four bytes
// are sorted so that each 32 bits of a product belong to one row.

#include "expert-dots.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#    define AHEAD_BYTES 8000 // by measurement on Zen 5
#    include "expert-dots-x86.h"

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

// Q4_0 in groups of eight rows

// N columns, two groups
template <int N>
void dots_q4_0x8(int64_t n_blocks, const block_q4_0x8 * first, const block_q4_0x8 * second, const column_block * const * columns,
                 float * const * out) {
    const __m512i flip = _mm512_set1_epi8((char) 0x88); // from signed to unsigned

    __m512 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm512_setzero_ps();
    }
    const char * later = (const char *) first + bytes_until_later(2 * n_blocks * (int64_t) sizeof(*first));
    for (int64_t b = 0; b < n_blocks; b++) {
        ask_for_bytes<2 * sizeof(*first)>(later + 2 * b * (int64_t) sizeof(*first));
        __m512i w[8]; // four values of each row
        UNROLLED
        for (int i = 0; i < 2; i++) {
            const __m512i x    = _mm512_xor_si512(load_64(first[b].q + 64 * i), flip);
            const __m512i y    = _mm512_xor_si512(load_64(second[b].q + 64 * i), flip);
            const __m512i even = even_words(x, y);
            const __m512i odd  = odd_words(x, y);
            w[2 * i]           = low_bits(even);
            w[2 * i + 1]       = low_bits(odd);
            w[2 * i + 4]       = high_bits(even);
            w[2 * i + 5]       = high_bits(odd);
        }
        const __m512 d = factors(first[b].d, second[b].d);
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
        __m512i min_pairs[4]; // a row's minimums of two times 32 values
        UNROLLED
        for (int i = 0; i < 4; i++) {
            const __m128i even = _mm_loadu_si128((const __m128i *) mins[2 * i]);
            const __m128i odd  = _mm_loadu_si128((const __m128i *) mins[2 * i + 1]);
            min_pairs[i]       = _mm512_cvtepu8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd)));
        }
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

// Q8_0 and Q4_0, two rows side by side

// 32 values of two rows, offset_of more than they are

inline __m512i values_of(const block_q8_0 & first, const block_q8_0 & second) {
    return _mm512_xor_si512(join(load(first.q), load(second.q)), _mm512_set1_epi8((char) 0x80));
}

inline __m512i values_of(const block_q4_0 & first, const block_q4_0 & second) {
    const __m256i raw    = _mm256_loadu2_m128i((const __m128i *) second.q, (const __m128i *) first.q);
    const __m512i twice  = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(raw));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    return low_bits(_mm512_srlv_epi16(twice, shifts));
}

template <typename block_type> constexpr int offset_of = 0;
template <> constexpr int                    offset_of<block_q8_0> = 128;
template <> constexpr int                    offset_of<block_q4_0> = 8;

// a block of a column of Q8_0
struct column_words {
    float   d;
    int32_t offsets[8]; // what the rows' offset adds too much, of four values each, negative
    int8_t  q[32];
};

template <typename block_type> void pack_words(const void * quantized, int64_t n_blocks, void * to) {
    const block_q8_0 * from = (const block_q8_0 *) quantized;
    for (int64_t b = 0; b < n_blocks; b++) {
        column_words & block = ((column_words *) to)[b];
        const __m256i  q     = load(from[b].q);
        const __m256i  of_4  = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);
        block.d              = to_float(from[b].d);
        _mm256_storeu_si256((__m256i *) block.offsets, _mm256_mullo_epi32(of_4, _mm256_set1_epi32(-offset_of<block_type>)));
        _mm256_storeu_si256((__m256i *) block.q, q);
    }
}

template <typename block_type, int N>
void dots_32(int64_t n_blocks, const block_type * first, const block_type * second,
             const column_words * const * columns, float * const * out) {
    const char * later = (const char *) first + bytes_until_later(2 * n_blocks * (int64_t) sizeof(*first));
    __m512 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        ask_for_bytes<2 * sizeof(*first)>(later + 2 * b * (int64_t) sizeof(*first));
        const __m512i w      = values_of(first[b], second[b]);
        const __m128  d_both = _mm_cvtph_ps(_mm_cvtsi32_si128(first[b].d | second[b].d << 16));
        const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m512  d      = _mm512_permutexvar_ps(places, _mm512_castps128_ps512(d_both));
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_words & column = columns[c][b];
            const __m512i        sum    = _mm512_dpbusd_epi32(load_32_twice(column.offsets), w, load_32_twice(column.q));
            sums[c] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(column.d)), _mm512_cvtepi32_ps(sum), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        out[c][0] = sum_of(_mm512_castps512_ps256(sums[c]));
        out[c][1] = sum_of(_mm256_castsi256_ps(upper_half(_mm512_castps_si512(sums[c]))));
    }
}

// float sums of one row of 256-value blocks and N columns

enum rounding { ROUNDED_AS_SINGLE, ROUNDED_AS_TILE };

// lane c: the sum of x[c]
template <int N> inline __m128i sum_of_each(const __m128i * x) {
    __m128i all[4];
    UNROLLED
    for (int c = 0; c < 4; c++) {
        all[c] = c < N ? x[c < N ? c : 0] : _mm_setzero_si128();
    }
    return _mm_hadd_epi32(_mm_hadd_epi32(all[0], all[1]), _mm_hadd_epi32(all[2], all[3]));
}

template <int N, rounding R, bool has_mins> struct row_sums {
    __m256 sums[N];
    __m128 min_sums[N];
    __m128 tile_sums; // a lane per column

    inline row_sums() {
        UNROLLED
        for (int c = 0; c < N; c++) {
            sums[c]     = _mm256_setzero_ps();
            min_sums[c] = _mm_setzero_ps();
        }
        tile_sums = _mm_setzero_ps();
    }

    // adds block b of each column: d * totals - min * min_totals
    inline void add(const block_q8_K * const * columns, int64_t b, float d, const __m256i * totals, float min, const __m128i * min_totals) {
        if constexpr (R == ROUNDED_AS_TILE) {
            add_tile(columns, b, d, totals, min, min_totals);
            return;
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            const float column_d = columns[c][b].d;
            sums[c]              = _mm256_fmadd_ps(_mm256_set1_ps(column_d * d), _mm256_cvtepi32_ps(totals[c]), sums[c]);
            if constexpr (has_mins) {
                min_sums[c] = _mm_fmadd_ps(_mm_set1_ps(-column_d * min), _mm_cvtepi32_ps(min_totals[c]), min_sums[c]);
            }
        }
    }

    inline void add_tile(const block_q8_K * const * columns, int64_t b, float d, const __m256i * totals, float min, const __m128i * min_totals) {
        __m128i halves[N];
        float   column_d[4] = {};
        UNROLLED
        for (int c = 0; c < N; c++) {
            halves[c]   = _mm_add_epi32(_mm256_castsi256_si128(totals[c]), _mm256_extracti128_si256(totals[c], 1));
            column_d[c] = columns[c][b].d;
        }
        __m128 block = _mm_mul_ps(_mm_set1_ps(d), _mm_cvtepi32_ps(sum_of_each<N>(halves)));
        if constexpr (has_mins) {
            block = _mm_fnmadd_ps(_mm_set1_ps(min), _mm_cvtepi32_ps(sum_of_each<N>(min_totals)), block);
        }
        tile_sums = _mm_fmadd_ps(block, _mm_loadu_ps(column_d), tile_sums);
    }

    inline void store(float * const * out) const {
        float tiles[4];
        _mm_storeu_ps(tiles, tile_sums);
        UNROLLED
        for (int c = 0; c < N; c++) {
            *out[c] = R == ROUNDED_AS_TILE ? tiles[c] : has_mins ? sum_of(sums[c]) + sum_of(min_sums[c]) : sum_of(sums[c]);
        }
    }
};

// Q4_K, one row

template <int N, rounding R>
void dots_q4_K(int64_t n_blocks, const block_q4_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m512i shifts = join(_mm256_setzero_si256(), _mm256_set1_epi16(4));
    const __m512i picks  = join(_mm256_setzero_si256(), _mm256_set1_epi16(1));

    row_sums<N, R, true> sums;
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q4_K & block = row[b];
        ask_for(&block);
        ask_for(block.q + 48);
        ask_for(block.q + 112);
        uint64_t scale_bytes, min_bytes; // of 32 values each
        unpack_scales(block.scales, scale_bytes, min_bytes);
        const __m512i scales = _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long) scale_bytes)));
        const __m128i mins   = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long) min_bytes));
        const float   d      = to_float(block.d);
        const float   min    = to_float(block.min);
        __m512i       totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] = _mm512_setzero_si512();
        }
        UNROLLED
        for (int i = 0; i < 4; i++) { // the low bits are 32 values, the high bits the next 32
            const __m512i w     = low_bits(_mm512_srlv_epi16(load_32_twice(block.q + 32 * i), shifts));
            const __m512i scale = _mm512_permutexvar_epi16(_mm512_add_epi16(picks, _mm512_set1_epi16((short) (2 * i))), scales);
            UNROLLED
            for (int c = 0; c < N; c++) {
                totals[c] = _mm512_dpwssd_epi32(totals[c], _mm512_maddubs_epi16(w, load_64(columns[c][b].q + 64 * i)), scale);
            }
        }
        __m256i halves[N];
        __m128i min_totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            halves[c]     = _mm256_add_epi32(_mm512_castsi512_si256(totals[c]), upper_half(totals[c]));
            min_totals[c] = _mm_madd_epi16(mins, sums_of_32(columns[c][b]));
        }
        sums.add(columns, b, d, halves, min, min_totals);
    }
    sums.store(out);
}

// Q6_K, one row

template <int N, rounding R>
void dots_q6_K(int64_t n_blocks, const block_q6_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m512i top    = _mm512_set1_epi8(48);
    const __m512i lefts  = join(_mm256_set1_epi16(4), _mm256_set1_epi16(2));
    const __m512i rights = join(_mm256_setzero_si256(), _mm256_set1_epi16(2));
    // the scales of 64 values
    const __m512i picks  = _mm512_setr_epi64(0, 0, 0x0001000100010001, 0x0001000100010001, 0x0002000200020002, 0x0002000200020002,
                                             0x0003000300030003, 0x0003000300030003);
    row_sums<N, R, false> sums;
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q6_K & block = row[b];
        ask_for(&block);
        ask_for(block.low + 64);
        ask_for(block.high);
        ask_for(block.scales);
        const __m256i scales_16 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *) block.scales));
        const __m512i scales    = _mm512_castsi256_si512(scales_16);
        const float   d         = to_float(block.d);
        __m512i       totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] = _mm512_setzero_si512();
        }
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m512i both = load_64(block.low + 64 * half);
            const __m512i high = load_32_twice(block.high + 32 * half);
            const __m512i w[2] = { // unsigned: 32 too large
                _mm512_or_si512(low_bits(both), _mm512_and_si512(_mm512_sllv_epi16(high, lefts), top)),
                _mm512_or_si512(high_bits(both), _mm512_and_si512(_mm512_srlv_epi16(high, rights), top)),
            };
            UNROLLED
            for (int i = 0; i < 2; i++) {
                const int     part  = 2 * half + i;
                const __m512i scale = _mm512_permutexvar_epi16(_mm512_add_epi16(picks, _mm512_set1_epi16((short) (4 * part))), scales);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    totals[c] = _mm512_dpwssd_epi32(totals[c], _mm512_maddubs_epi16(w[i], load_64(columns[c][b].q + 64 * part)), scale);
                }
            }
        }
        __m256i halves[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            const __m256i too_much = _mm256_slli_epi32(_mm256_madd_epi16(load(columns[c][b].sums), scales_16), 5);
            const __m256i total    = _mm256_add_epi32(_mm512_castsi512_si256(totals[c]), upper_half(totals[c]));
            halves[c]              = _mm256_sub_epi32(total, too_much);
        }
        sums.add(columns, b, d, halves, 0, nullptr);
    }
    sums.store(out);
}

// all rows and columns

struct for_q4_0x8 {
    static constexpr int64_t n_rows = 16;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        dots_q4_0x8<N>(n / 32, (const block_q4_0x8 *) rows, (const block_q4_0x8 *) (rows + 8 * row_bytes),
                       (const column_block * const *) columns, out);
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 16;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        dots_q4_Kx8<N>(n / 256, (const block_q4_Kx8 *) rows, (const block_q4_Kx8 *) (rows + 8 * row_bytes),
                       (const block_q8_K * const *) columns, out);
    }
};

template <typename block_type> struct for_32 {
    static constexpr int64_t n_rows = 2;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        dots_32<block_type, N>(n / 32, (const block_type *) rows, (const block_type *) (rows + row_bytes),
                               (const column_words * const *) columns, out);
    }
};

template <rounding R> struct for_q4_K {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q4_K<N, R>(n / 256, (const block_q4_K *) rows, (const block_q8_K * const *) columns, out);
    }
};

template <rounding R> struct for_q6_K {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q6_K<N, R>(n / 256, (const block_q6_K *) rows, (const block_q8_K * const *) columns, out);
    }
};

constexpr size_t of_block = sizeof(column_block), of_words = sizeof(column_words), of_k = sizeof(block_q8_K);

const dot_kernel kernels[] = {
    { "avx512vnni", "q4_0x8", GGML_TYPE_Q4_0, true, GGML_TYPE_Q8_0, 32, of_block, 16, 32, pack_columns<8>, all_dots<for_q4_0x8>, nullptr, 15, 0, nullptr, nullptr },
    { "avx512vnni", "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, of_k, 16, 256, nullptr, all_dots<for_q4_Kx8>, nullptr, 3, 0, nullptr, nullptr },
    { "avx512vnni", "q4_0", GGML_TYPE_Q4_0, false, GGML_TYPE_Q8_0, 32, of_words, 2, 32, pack_words<block_q4_0>, all_dots<for_32<block_q4_0>>, nullptr, 15, 0, nullptr, nullptr },
    { "avx512vnni", "q4_K", GGML_TYPE_Q4_K, false, GGML_TYPE_Q8_K, 256, of_k, 1, 256, nullptr, all_dots<for_q4_K<ROUNDED_AS_SINGLE>>, all_dots<for_q4_K<ROUNDED_AS_TILE>>, 7, 0, nullptr, nullptr },
    { "avx512vnni", "q6_K", GGML_TYPE_Q6_K, false, GGML_TYPE_Q8_K, 256, of_k, 1, 256, nullptr, all_dots<for_q6_K<ROUNDED_AS_SINGLE>>, all_dots<for_q6_K<ROUNDED_AS_TILE>>, 7, 0, nullptr, nullptr },
    { "avx512vnni", "q8_0", GGML_TYPE_Q8_0, false, GGML_TYPE_Q8_0, 32, of_words, 2, 32, pack_words<block_q8_0>, all_dots<for_32<block_q8_0>>, nullptr, 15, 0, nullptr, nullptr },
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
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])), multiply };
}

} // namespace moeedge

#else

namespace moeedge {

dot_kernels avx512_kernels() {
    return { nullptr, 0, nullptr };
}

} // namespace moeedge

#endif
