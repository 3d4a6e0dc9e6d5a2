// Few columns by registers of 512 bits: rows in groups of eight, as llama.cpp repacks them, one group at a time, pairs of rows of
// blocks of 32, and rows of blocks of 256. Memory is the limit, and it is read best in its order.

#pragma once

#include "expert-rows-x86.h"

namespace moeedge {

namespace {

// small steps

// in assembler: with GCC 12's own prefetches these loops were up to 1.3 times slower on a Zen 4
template <int n_bytes> inline void ask_in_place(const void * from) {
    UNROLLED
    for (int i = 0; i < n_bytes; i += 64) {
        __asm__ volatile("prefetcht0 %0" : : "m"(*((const char *) from + ahead_bytes + i)));
    }
}

// a constant that stays in a register: GCC would make it anew in each turn of a loop
template <typename T> inline T kept(T x) {
    __asm__("" : "+v"(x));
    return x;
}

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

inline __m512i low_bits(__m512i x) {
    return _mm512_and_si512(x, _mm512_set1_epi8(15));
}

inline __m512i high_bits(__m512i x) {
    return low_bits(_mm512_srli_epi16(x, 4));
}

// factors of eight rows
template <typename block_type> inline __m256 factors_of(const block_type & block) {
    return to_floats(load_16(block.d));
}

inline __m256 factors_of(const block_mxfp4x8 & block) {
    return halves_of_powers(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) block.e)));
}

// rows in groups of eight: registers have 64 bits of each row

inline __m512i broadcast_8_bytes(const void * from) {
    long long value;
    memcpy(&value, from, sizeof(value));
    return _mm512_set1_epi64(value);
}

// in the first half of each row's 64 bits
inline __m512 spread(__m256 rows) {
    return _mm512_castsi512_ps(_mm512_cvtepu32_epi64(_mm256_castps_si256(rows)));
}

inline __m256 unspread(__m512 rows) {
    return _mm256_castsi256_ps(_mm512_cvtepi64_epi32(_mm512_castps_si512(rows)));
}

// the sum of both halves, in the first
inline __m512 sum_of_halves(__m512i x) {
    return _mm512_cvtepi32_ps(_mm512_add_epi32(x, _mm512_srli_epi64(x, 32)));
}

// products of 32 values of eight rows (w: eight values of each) with a column, four int16 per row
inline __m512i multiply_32(const __m512i * w, const int8_t * column) {
    const __m512i first  = _mm512_add_epi16(_mm512_maddubs_epi16(w[0], broadcast_8_bytes(column)),
                                            _mm512_maddubs_epi16(w[1], broadcast_8_bytes(column + 8)));
    const __m512i second = _mm512_add_epi16(_mm512_maddubs_epi16(w[2], broadcast_8_bytes(column + 16)),
                                            _mm512_maddubs_epi16(w[3], broadcast_8_bytes(column + 24)));
    return _mm512_add_epi16(first, second);
}

template <typename L, int N> void group_dots_32(int64_t n_blocks, const typename L::block * rows, const column_block * const * columns, float * const * out) {
    const __m512i table = join(L::table(), L::table());

    __m512 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const auto & block = rows[b];
        ask_in_place<sizeof(block)>(&block);
        const __m512i first = load_64(block.q), second = load_64(block.q + 64);
        const __m512i w[4] = { _mm512_shuffle_epi8(table, low_bits(first)), _mm512_shuffle_epi8(table, low_bits(second)),
                               _mm512_shuffle_epi8(table, high_bits(first)), _mm512_shuffle_epi8(table, high_bits(second)) };
        const __m512  d    = spread(factors_of(block));
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_block & column = columns[c][b];
            __m512i              sum    = _mm512_maskz_set1_epi32(0xaaaa, column.offset);
            UNROLLED
            for (int i = 0; i < 4; i++) {
                sum = _mm512_dpbusd_epi32(sum, w[i], broadcast_8_bytes(column.q + 8 * i));
            }
            sums[c] = _mm512_fmadd_ps(sum_of_halves(sum), _mm512_mul_ps(d, _mm512_set1_ps(column.d)), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm256_storeu_ps(out[c], unspread(sums[c]));
    }
}

// word w of each of the eight 12 bytes of a group
inline __m512i gather_words(const uint8_t * from, int w) {
    const __m512i places = _mm512_add_epi32(_mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 0, 0, 0, 0, 0, 0, 0, 0), _mm512_set1_epi32(w));
    return _mm512_permutex2var_epi32(load_64(from), kept(places), _mm512_castsi256_si512(load(from + 64)));
}

// the 6 bits of rows 4-7, whose upper two are above those of the first rows
inline __m512i six_bits(__m512i low_4_bits, __m512i first_rows) {
    return _mm512_or_si512(low_4_bits, _mm512_and_si512(_mm512_srli_epi32(first_rows, 2), _mm512_set1_epi8(48)));
}

// the scales and minimums of eight rows for each 32 values, as unpack_scales
inline void unpack_group_scales(const uint8_t * from, uint64_t * scales, uint64_t * mins) {
    const __m512i a = gather_words(from, 0), b = gather_words(from, 1), c = gather_words(from, 2);
    const __m512i six    = kept(_mm512_set1_epi8(63));
    const __m512i places = kept(_mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
    _mm512_storeu_si512(scales, _mm512_permutex2var_epi32(_mm512_and_si512(a, six), places, six_bits(low_bits(c), a)));
    _mm512_storeu_si512(mins, _mm512_permutex2var_epi32(_mm512_and_si512(b, six), places, six_bits(high_bits(c), b)));
}

template <int N> void group_dots_q4_K(int64_t n_blocks, const block_q4_Kx8 * rows, const column_256 * const * columns, float * const * out) {
    const __m512i rows_of_two = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 0, -1, 0, -1, 0, -1, 1, -1, 1, -1, 1, -1, 1, -1));
    // a row's scale four times as int16; -1 stays negative
    const __m512i four_times = kept(_mm512_add_epi8(rows_of_two, _mm512_setr_epi64(0, 0, 0x0002000200020002, 0x0002000200020002, 0x0004000400040004,
                                                                                   0x0004000400040004, 0x0006000600060006, 0x0006000600060006)));
    __m512 sums[N];
    __m256 min_sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c]     = _mm512_setzero_ps();
        min_sums[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q4_Kx8 & block = rows[b];
        uint64_t             scales[8], mins[8]; // per 32 values
        ask_in_place<128>(&block);
        unpack_group_scales(block.scales, scales, mins);
        __m512i totals[N];
        __m256i min_totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c]     = _mm512_setzero_si512();
            min_totals[c] = _mm256_setzero_si256();
        }
        UNROLLED
        for (int i = 0; i < 4; i++) { // the low bits are 32 values, the high bits the next 32
            const uint8_t * q = block.q + 256 * i;
            ask_in_place<256>(q);
            __m512i lows[4], highs[4];
            UNROLLED
            for (int j = 0; j < 4; j++) {
                lows[j]  = low_bits(load_64(q + 64 * j));
                highs[j] = high_bits(load_64(q + 64 * j));
            }
            const __m512i low_scales  = _mm512_shuffle_epi8(broadcast_8_bytes(scales + 2 * i), four_times);
            const __m512i high_scales = _mm512_shuffle_epi8(broadcast_8_bytes(scales + 2 * i + 1), four_times);
            const __m128i both_mins   = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *) (mins + 2 * i)), _mm_loadl_epi64((const __m128i *) (mins + 2 * i + 1)));
            UNROLLED
            for (int c = 0; c < N; c++) {
                const column_256 & column = columns[c][b];
                totals[c]     = _mm512_dpwssd_epi32(totals[c], multiply_32(lows, column.q + 64 * i), low_scales);
                totals[c]     = _mm512_dpwssd_epi32(totals[c], multiply_32(highs, column.q + 64 * i + 32), high_scales);
                min_totals[c] = _mm256_dpwssd_epi32(min_totals[c], _mm256_cvtepu8_epi16(both_mins), _mm256_set1_epi32(read_int32(column.sums_of_32 + 2 * i)));
            }
        }
        const __m512 d   = spread(to_floats(load_16(block.d)));
        const __m256 min = to_floats(load_16(block.min));
        UNROLLED
        for (int c = 0; c < N; c++) {
            const float column_d = columns[c][b].d;
            sums[c]     = _mm512_fmadd_ps(sum_of_halves(totals[c]), _mm512_mul_ps(d, _mm512_set1_ps(column_d)), sums[c]);
            min_sums[c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(min_totals[c]), _mm256_mul_ps(min, _mm256_set1_ps(column_d)), min_sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        _mm256_storeu_ps(out[c], _mm256_sub_ps(unspread(sums[c]), min_sums[c]));
    }
}

// blocks of 32, pairs of rows side by side

// 32 values of two rows

template <typename block_type> inline __m512i values_of(const block_type & first, const block_type & second) {
    return join(values_of(first), values_of(second));
}

// as nibbles, of two times 16 bytes
inline __m512i nibbles_of_two(__m256i raw) {
    const __m512i twice  = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), _mm512_castsi256_si512(raw));
    const __m512i shifts = _mm512_setr_epi64(0, 0, 0x0004000400040004, 0x0004000400040004, 0, 0, 0x0004000400040004, 0x0004000400040004);
    return low_bits(_mm512_srlv_epi16(twice, shifts));
}

inline __m512i values_of(const block_q4_0 & first, const block_q4_0 & second) {
    const __m256i raw = _mm256_loadu2_m128i((const __m128i *) second.q, (const __m128i *) first.q);
    return _mm512_sub_epi8(nibbles_of_two(raw), _mm512_set1_epi8(8));
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
            if constexpr (n_pairs == 1 && N > 1 && sizeof(block_type) == sizeof(block_q8_0)) { // further ahead, into the second cache: one column is slower with it
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

// blocks of 256, one row, 64 values at a time

// the same 32 bytes twice, with bits turned right by so many
inline __m512i turned(const uint8_t * from, int first, int second) {
    const __m512i n = kept(_mm512_inserti64x4(_mm512_set1_epi32(first & 31), _mm256_set1_epi32(second & 31), 1));
    return _mm512_rorv_epi32(load_32_twice(from), n);
}

inline __m512i masked(__m512i x, int mask) {
    return _mm512_and_si512(x, kept(_mm512_set1_epi8((char) mask)));
}

// a | (b & mask)
inline __m512i or_masked(__m512i a, __m512i b, int mask) {
    return _mm512_ternarylogic_epi32(a, b, kept(_mm512_set1_epi8((char) mask)), 0xf8);
}

inline __m512i wide_values(const block_q2_K & x, int i) {
    return masked(turned(x.q + 32 * (i / 2), 4 * (i % 2), 4 * (i % 2) + 2), 3);
}

inline __m512i wide_values(const block_q3_K & x, int i) {
    const __m512i low = masked(turned(x.q + 32 * (i / 2), 4 * (i % 2), 4 * (i % 2) + 2), 3);
    return or_masked(low, turned(x.high, 2 * i - 2, 2 * i - 1), 4);
}

inline __m512i wide_values(const block_q4_K & x, int i) {
    return masked(turned(x.q + 32 * i, 0, 4), 15);
}

inline __m512i wide_values(const block_q5_K & x, int i) {
    return or_masked(masked(turned(x.q + 32 * i, 0, 4), 15), turned(x.high, 2 * i - 4, 2 * i - 3), 16);
}

inline __m512i wide_values(const block_q6_K & x, int i) {
    const __m512i raw  = load_64(x.low + 64 * (i / 2));
    const __m512i high = turned(x.high + 32 * (i / 2), 4 * (i % 2) - 4, 4 * (i % 2) - 2);
    return or_masked(i % 2 == 0 ? low_bits(raw) : high_bits(raw), high, 48);
}

inline __m512i wide_values(const block_iq4_xs & x, int i) { // 128 too large
    const __m256i table = _mm256_add_epi8(table_of_iq4(), _mm256_set1_epi8((char) 128));
    return _mm512_shuffle_epi8(kept(join(table, table)), nibbles_of_two(load(x.q + 32 * i)));
}

// values without their signs, and which are negative
template <typename block_type> inline __m512i wide_sizes(const block_type & x, int i, __mmask64 &) {
    return wide_values(x, i);
}

inline __m512i wide_sizes(const block_iq4_xs & x, int i, __mmask64 & negative) {
    const __m256i table = _mm256_abs_epi8(table_of_iq4());
    const __m512i raw   = nibbles_of_two(load(x.q + 32 * i));
    negative            = _mm512_testn_epi8_mask(raw, kept(_mm512_set1_epi8(8)));
    return _mm512_shuffle_epi8(kept(join(table, table)), raw);
}

// the scales of 64 values; all: as int16
template <int n_scales> inline __m512i wide_scales(__m256i all, int i) {
    const __m256i zeros  = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
    const __m512i places = n_scales == 8 ? join(zeros, ones)
                                         : join(_mm256_blend_epi32(zeros, ones, 0xf0), _mm256_blend_epi32(_mm256_set1_epi16(2), _mm256_set1_epi16(3), 0xf0));
    return _mm512_permutexvar_epi16(kept(_mm512_add_epi16(places, _mm512_set1_epi16((short) (n_scales / 4 * i)))), _mm512_castsi256_si512(all));
}

// a block's factor in eight lanes, and the negated factor of its minimums in the other eight
template <typename T> inline __m512 factors_of_block(const typename T::block & x) {
    if constexpr (T::mins == NO_MINS) {
        return _mm512_zextps256_ps512(to_floats(_mm_set1_epi16((short) x.d)));
    } else {
        const __m256i both   = _mm256_set1_epi32(read_int32(&x.d)); // neighbours
        const __m256i places = kept(_mm256_setr_m128i(_mm_set1_epi16(0x0100), _mm_set1_epi16(0x0302)));
        const __m256i sign   = kept(_mm256_setr_m128i(_mm_setzero_si128(), _mm_set1_epi16((short) 0x8000)));
        return _mm512_cvtph_ps(_mm256_xor_si256(_mm256_shuffle_epi8(both, places), sign));
    }
}

template <typename T, int N> void dots_256(int64_t n_blocks, const typename T::block * row, const column_256 * const * columns, float * const * out) {
    constexpr bool are_mins_added = T::mins == MINS_BY_FOUR || T::mins == MINS_BY_BLOCK; // at the end
    __m512 sums[N]; // in ggml's eight lanes; then of minimums, in four lanes or one
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const auto & block = row[b];
        ask_in_place<sizeof(block)>(&block);
        const scale_bytes bytes  = T::scales(block);
        const __m256i     scales = _mm256_cvtepi8_epi16(bytes.scales);
        const __m512      d      = factors_of_block<T>(block);
        __m512i           totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] = _mm512_setzero_si512();
            if constexpr (T::offset != 0 && !T::is_offset_per_value) {
                const __m256i too_much = _mm256_madd_epi16(load(columns[c][b].sums), scales);
                totals[c]              = _mm512_zextsi256_si512(_mm256_mullo_epi32(too_much, _mm256_set1_epi32(-T::offset)));
            }
        }
        UNROLLED
        for (int i = 0; i < 4; i++) {
            __mmask64     negative = 0;
            const __m512i scale    = wide_scales<T::n_scales>(scales, i);
            const __m512i w        = wide_sizes(block, i, negative);
            UNROLLED
            for (int c = 0; c < N; c++) {
                __m512i x = load_64(columns[c][b].q + 64 * i);
                if constexpr (T::n_summed == 0) {
                    x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
                }
                __m512i found = _mm512_maddubs_epi16(w, x);
                if constexpr (T::is_offset_per_value) {
                    found = _mm512_sub_epi16(found, _mm512_maddubs_epi16(_mm512_set1_epi8(T::offset), x));
                }
                totals[c] = _mm512_dpwssd_epi32(totals[c], scale, found);
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            const column_256 & column = columns[c][b];
            const __m512       factor = _mm512_mul_ps(d, _mm512_set1_ps(column.d));
            __m512i            total  = _mm512_maskz_add_epi32(0x00ff, totals[c], _mm512_shuffle_i64x2(totals[c], totals[c], 0x0e));
            if constexpr (T::mins == MINS_FIRST) {
                const __m256i found  = _mm256_madd_epi16(_mm256_cvtepu8_epi16(bytes.mins), load(column.sums));
                const __m512  of_min = _mm512_zextps256_ps512(_mm256_castsi256_ps(upper_half(_mm512_castps_si512(factor))));
                sums[c]              = _mm512_fmadd_ps(of_min, _mm512_cvtepi32_ps(_mm512_zextsi256_si512(found)), sums[c]);
            } else if constexpr (are_mins_added) {
                __m128i found = _mm_madd_epi16(_mm_cvtepu8_epi16(bytes.mins), sums_of_32(column));
                if constexpr (T::mins == MINS_BY_BLOCK) {
                    found = _mm_add_epi32(found, _mm_shuffle_epi32(found, 0x4e));
                    found = _mm_add_epi32(found, _mm_shuffle_epi32(found, 0xb1));
                }
                total = _mm512_inserti32x4(total, found, 2);
            }
            sums[c] = _mm512_fmadd_ps(factor, _mm512_cvtepi32_ps(total), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        const float  products = sum_of(_mm512_castps512_ps256(sums[c]));
        const __m128 mins     = _mm512_extractf32x4_ps(sums[c], 2);
        *out[c]               = !are_mins_added ? products : products + (T::mins == MINS_BY_FOUR ? sum_of(mins) : _mm_cvtss_f32(mins));
    }
}

} // namespace

} // namespace moeedge
