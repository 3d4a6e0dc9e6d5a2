// The kernels of expert-dots.h for AVX2, and by way of expert-dots-avxvnni.cpp for AVX-VNNI. These files alone are compiled for
// them, so they must use no inline function of the standard library, which the linker might take for other files, too.
//
// Rows in groups of eight have the blocks of eight rows side by side, eight bytes of each in turn: 32 bytes hold eight bytes of
// rows 0-3 or 4-7. Eight bytes of a column are broadcast to meet them, so that 64 bits of a product belong to one row.

#include "expert-dots.h"

#ifndef KERNELS
#    define KERNELS avx2_kernels
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#    define AHEAD_BYTES 4096 // by measurement on Zen 3
#    include "expert-panels-x86.h"

namespace moeedge {

namespace {

// small steps

inline __m256i broadcast_8_bytes(const void * from) {
    long long value;
    memcpy(&value, from, sizeof(value));
    return _mm256_set1_epi64x(value);
}

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
#    if defined(__AVXVNNI__)
    UNROLLED
    for (int i = 0; i < 4; i++) {
        sum = _mm256_dpbusd_avx_epi32(sum, w[i], broadcast_8_bytes(column + 8 * i));
    }
#    else
    const __m256i ones = _mm256_set1_epi16(1);
    if (!is_signed) {
        return _mm256_madd_epi16(multiply_32(w, column), ones);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products<true>(w[i], broadcast_8_bytes(column + 8 * i)), ones));
    }
#    endif
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
template <typename L, int N> void dots_32x8(int64_t n_blocks, const typename L::block * rows, const column_block * const * columns, float * const * out) {
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

template <int N> void dots_q4_Kx8(int64_t n_blocks, const block_q4_Kx8 * rows, const block_q8_K * const * columns, float * const * out) {
    constexpr int n_at_once = N == 1 ? 2 : 1; // halves of the rows, so that memory is read in its order
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
        ask_for_bytes<128>((const char *) &block + AHEAD_BYTES);
        for (int s = 0; s < 8; s++) {
            unpack_scales(block.scales + 12 * s, scales[s], mins[s]);
        }
        __m256i halves[2][N]; // of the rows
        UNROLLED
        for (int c = 0; c < N; c++) {
            halves[0][c] = halves[1][c] = _mm256_setzero_si256();
        }
        for (int i = 0; i < 4 * 2 / n_at_once; i++) { // the low bits are 32 values, the high bits the next 32
            const int       s = 2 * (i % 4);
            const uint8_t * q = block.q + 128 * s;
            ask_for_bytes<128 * n_at_once>((const char *) q + 128 * (i / 4) + AHEAD_BYTES);
            UNROLLED
            for (int h = 0; h < n_at_once; h++) {
                const int half = n_at_once * (i / 4) + h;
                __m256i   lows[4], highs[4];
                UNROLLED
                for (int j = 0; j < 4; j++) {
                    lows[j]  = low_4(load(q + 32 * half + 64 * j));
                    highs[j] = high_4(load(q + 32 * half + 64 * j));
                }
                const __m256i low_scales  = _mm256_shuffle_epi8(_mm256_set1_epi64x((long long) scales[s]), spread[half]);
                const __m256i high_scales = _mm256_shuffle_epi8(_mm256_set1_epi64x((long long) scales[s + 1]), spread[half]);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    const int8_t * column = columns[c][b].q + 32 * s;
                    const __m256i  first  = _mm256_madd_epi16(multiply_32(lows, column), low_scales);
                    const __m256i  second = _mm256_madd_epi16(multiply_32(highs, column + 32), high_scales);
                    halves[half][c]       = _mm256_add_epi32(halves[half][c], _mm256_add_epi32(first, second));
                }
            }
        }
        const __m256 d   = to_floats(order_halves(block.d));
        const __m256 min = to_floats(_mm_loadu_si128((const __m128i *) block.min));
        UNROLLED
        for (int c = 0; c < N; c++) {
            const block_q8_K & column = columns[c][b];
            int16_t            of_32[8];
            _mm_storeu_si128((__m128i *) of_32, sums_of_32(column));
            __m256i min_sum = _mm256_setzero_si256();
            for (int s = 0; s < 8; s += 2) {
                const __m128i pairs = _mm_unpacklo_epi8(_mm_cvtsi64_si128((long long) mins[s]), _mm_cvtsi64_si128((long long) mins[s + 1]));
                const __m256i pair  = _mm256_set1_epi32(read_int32(of_32 + s));
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

// blocks of 32, four rows

// n_sums: of each row, which blocks take in turn
template <typename block_type, int N, int n_sums>
void dots_32(int64_t n_blocks, const block_type * const * rows, size_t row_bytes,
             const column_block * const * columns, float * const * out) {
    constexpr int n_at_once = N == 1 ? 2 : 1; // rows, so that several sums are under way; one row is read best
    const __m256i ones      = _mm256_set1_epi16(1);
    // the same place in rows that come later
    const size_t  ahead     = (AHEAD_BYTES / (n_at_once * row_bytes) + 1) * n_at_once * row_bytes;

    for (int first = 0; first < 4; first += n_at_once) {
        __m256 sums[n_sums][n_at_once][N];
        UNROLLED
        for (int i = 0; i < n_sums * n_at_once * N; i++) {
            sums[i / (n_at_once * N)][i / N % n_at_once][i % N] = _mm256_setzero_ps();
        }
        for (int64_t b = 0; b < n_blocks; b += n_sums) {
            UNROLLED
            for (int i = 0; i < n_sums * n_at_once; i++) {
                const int          r     = i % n_at_once;
                const int64_t      at    = b + i / n_at_once;
                const block_type & block = rows[first + r][at];
                _mm_prefetch((const char *) &block + ahead, _MM_HINT_T0);
                const __m256i x    = values_of(block);
                const __m256i size = _mm256_abs_epi8(x);
                const float   d    = factor_of(block);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    const column_block & column = columns[c][at];
                    const __m256i        found  = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load(column.q), x));
                    const __m256         sum    = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, found));
                    __m256 &             to     = sums[i / n_at_once][r][c];
                    to                          = _mm256_fmadd_ps(_mm256_set1_ps(d * column.d), sum, to);
                }
            }
        }
        UNROLLED
        for (int i = 0; i < n_at_once * N; i++) {
            const int r = i / N, c = i % N;
            out[c][first + r] = sum_of(n_sums == 1 ? sums[0][r][c] : _mm256_add_ps(sums[0][r][c], sums[n_sums - 1][r][c]));
        }
    }
}

template <typename block_type, int n_sums = 1> struct for_32 {
    static constexpr int64_t n_rows = 4;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        const block_type * each[n_rows];
        for (int64_t r = 0; r < n_rows; r++) {
            each[r] = (const block_type *) (rows + r * (int64_t) row_bytes);
        }
        dots_32<block_type, N, n_sums>(n / 32, each, row_bytes, (const column_block * const *) columns, out);
    }
};

// one row and many columns
template <typename block_type, int n_sums> struct wide_dots_32 {
    static constexpr int     n_columns    = 8 / n_sums;
    static constexpr int64_t n_blocks_max = 256; // of a row; longer ones take few columns at a time

    alignas(32) int8_t columns[n_blocks_max][n_columns][32];
    alignas(32) float  of_columns[n_blocks_max][n_columns]; // factors
    alignas(32) float  of_both[n_blocks_max][n_columns];    // times those of the row

    void read_columns(int64_t n_blocks, const column_block * const * from) {
        for (int64_t b = 0; b < n_blocks; b++) {
            for (int c = 0; c < n_columns; c++) {
                of_columns[b][c] = from[c][b].d;
                _mm256_store_si256((__m256i *) columns[b][c], load(from[c][b].q));
            }
        }
    }

    void run(int64_t n_blocks, const block_type * row, float * const * out, int64_t at) {
        const __m256i ones = _mm256_set1_epi16(1);
        __m256        sums[n_sums][n_columns];
        UNROLLED
        for (int i = 0; i < n_sums * n_columns; i++) {
            sums[i / n_columns][i % n_columns] = _mm256_setzero_ps();
        }
        for (int64_t b = 0; b < n_blocks; b++) {
            const float d = factor_of(row[b]);
            UNROLLED
            for (int c = 0; c < n_columns; c += 4) {
                _mm_store_ps(of_both[b] + c, _mm_mul_ps(_mm_set1_ps(d), _mm_load_ps(of_columns[b] + c)));
            }
        }
        for (int64_t b = 0; b < n_blocks; b += n_sums) {
            UNROLLED
            for (int i = 0; i < n_sums; i++) {
                const __m256i x    = values_of(row[b + i]);
                const __m256i size = _mm256_abs_epi8(x);
                ask_for(&row[b + i]);
                UNROLLED
                for (int c = 0; c < n_columns; c++) {
                    const __m256i found = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load(columns[b + i][c]), x));
                    const __m256  sum   = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, found));
                    sums[i][c]          = _mm256_fmadd_ps(_mm256_broadcast_ss(&of_both[b + i][c]), sum, sums[i][c]);
                }
            }
        }
        UNROLLED
        for (int c = 0; c < n_columns; c++) {
            out[c][at] = sum_of(n_sums == 1 ? sums[0][c] : _mm256_add_ps(sums[0][c], sums[n_sums - 1][c]));
        }
    }
};

template <typename block_type, int n_sums>
void wide_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    using wide             = wide_dots_32<block_type, n_sums>;
    const int64_t n_blocks = n / 32;
    wide          found;
    int           c = 0;
    for (; n_blocks <= wide::n_blocks_max && c + wide::n_columns <= n_columns; c += wide::n_columns) {
        found.read_columns(n_blocks, (const column_block * const *) columns + c);
        for (int64_t r = 0; r < n_rows; r++) {
            found.run(n_blocks, (const block_type *) ((const char *) rows + r * (int64_t) row_bytes), out + c, r);
        }
    }
    all_dots<for_32<block_type, n_sums>>(n, rows, row_bytes, n_rows, columns + c, n_columns - c, out + c);
}

// 16 bits of a float, one row

struct column_bf16 { // 32 values
    float v[32];
};

inline void pack_bf16(const void * rounded, int64_t n_blocks, void * to) {
    for (int64_t i = 0; i < 32 * n_blocks; i += 8) {
        const __m256i bits = _mm256_cvtepu16_epi32(load_16((const uint16_t *) rounded + i));
        _mm256_storeu_ps((float *) to + i, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    }
}

template <int N> void dots_bf16(int64_t n_blocks, const uint16_t * row, const column_bf16 * const * columns, float * const * out) {
    __m256 sums[4][N]; // of eight values each, which blocks of 32 have in turn
    UNROLLED
    for (int i = 0; i < 4 * N; i++) {
        sums[i / N][i % N] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        ask_for(row + 32 * b);
        UNROLLED
        for (int i = 0; i < 4; i++) {
            const __m256i bits = _mm256_cvtepu16_epi32(load_16(row + 32 * b + 8 * i));
            const __m256  x    = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
            UNROLLED
            for (int c = 0; c < N; c++) {
                sums[i][c] = _mm256_fmadd_ps(x, _mm256_loadu_ps(columns[c][b].v + 8 * i), sums[i][c]);
            }
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        *out[c] = sum_of(_mm256_add_ps(_mm256_add_ps(sums[0][c], sums[2][c]), _mm256_add_ps(sums[1][c], sums[3][c])));
    }
}

struct for_bf16 {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        constexpr int n_first = N == 4 ? 2 : N; // sums of four do not fit the registers
        const auto *  all     = (const column_bf16 * const *) columns;
        dots_bf16<n_first>(n / 32, (const uint16_t *) rows, all, out);
        if (n_first < N) {
            dots_bf16<n_first>(n / 32, (const uint16_t *) rows, all + n_first, out + n_first);
        }
    }
};

// panels of rows in groups of eight

struct rows_of_groups {
    static void write(row_floats rows, float * to) { _mm256_storeu_ps(to, in_order((__m256) rows)); }
};

inline void unpack_words(__m256i x, __m256i y, __m256i table, uint8_t * to) {
    const __m256i low[2]  = { _mm256_shuffle_epi8(table, low_4(x)), _mm256_shuffle_epi8(table, low_4(y)) };
    const __m256i high[2] = { _mm256_shuffle_epi8(table, high_4(x)), _mm256_shuffle_epi8(table, high_4(y)) };
    store(to, even_words(low[0], low[1]));
    store(to + sizeof(row_words), odd_words(low[0], low[1]));
    store(to + 4 * sizeof(row_words), even_words(high[0], high[1]));
    store(to + 5 * sizeof(row_words), odd_words(high[0], high[1]));
}

template <typename L> struct panels_32 : panels_32_multiply<L>, rows_of_groups {
    static void unpack(const char * rows, size_t, int64_t first, int64_t n, panel_32 & to) {
        const auto * at = (const typename L::block *) rows + first;
        for (int64_t b = 0; b < n; b++) {
            ask_for(at[b].q);
            ask_for(at[b].q + 64);
            for (int i = 0; i < 2; i++) {
                unpack_words(load(at[b].q + 64 * i), load(at[b].q + 64 * i + 32), L::table(), to.q[b][2 * i]);
            }
            _mm256_store_ps(to.d[b], factors_of(at[b]));
        }
    }
};

template <panel_rounding R> struct panels_q4_Kx8 : panels_256_multiply<q4_K_reader, R>, rows_of_groups {
    static void unpack(const char * rows, size_t, int64_t first, int64_t n, panel_256<8> & to) {
        for (int64_t b = 0; b < n; b++) {
            const block_q4_Kx8 & block = ((const block_q4_Kx8 *) rows)[first + b];
            __m128i              mins[8];
            UNROLLED
            for (int s = 0; s < 8; s++) {
                const scale_bytes bytes = scales_of_4_5(block.scales + 12 * s);
                store(to.scales[b][s], _mm256_cvtepu8_epi16(_mm_shuffle_epi8(bytes.scales, order_of_bytes(2))));
                mins[s] = _mm_shuffle_epi8(bytes.mins, order_of_bytes(1));
            }
            UNROLLED
            for (int i = 0; i < 4; i++) {
                store(to.mins[b][i], _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(mins[2 * i], mins[2 * i + 1])));
            }
            for (int i = 0; i < 16; i++) { // of two times 32 values, eight values of each row
                const uint8_t * q = block.q + 64 * i;
                ask_for(q);
                const __m256i even = even_words(load(q), load(q + 32));
                const __m256i odd  = odd_words(load(q), load(q + 32));
                row_words *   low  = to.q[b] + 16 * (i / 4) + 2 * (i % 4);
                store(low[0], low_4(even));
                store(low[1], low_4(odd));
                store(low[8], high_4(even));
                store(low[9], high_4(odd));
            }
            _mm256_store_ps(to.d[b], to_floats(order_halves(block.d)));
            _mm256_store_ps(to.min[b], to_floats(order_halves(block.min)));
        }
    }
};

template <typename L> struct for_32x8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_32x8<L, N>(n / 32, (const typename L::block *) rows, (const column_block * const *) columns, out);
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q4_Kx8<N>(n / 256, (const block_q4_Kx8 *) rows, (const block_q8_K * const *) columns, out);
    }
};

constexpr const char * instructions = has_vnni ? "avxvnni" : "avx2";

template <typename L> constexpr dot_kernel kernel_of_32x8(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_32<L>>;
    return { instructions, layout, type, true, GGML_TYPE_Q8_0, 32, sizeof(column_block), 8, 32, pack_columns<L::offset>, all_dots<for_32x8<L>>,
             many, 7, 8, many, nullptr };
}

template <typename block_type> constexpr dot_kernel kernel_of_32(const char * layout, ggml_type type) {
    const dots_function many = wide_dots<block_type, 1>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 32, pack_columns<0>, all_dots<for_32<block_type>>, many, 7, 8, many, nullptr };
}

// with two sums of each row; ggml rounds dense matrices of IQ4_NL otherwise
template <typename block_type, bool has_dense> constexpr dot_kernel kernel_of_64(const char * layout, ggml_type type) {
    const dots_function many = wide_dots<block_type, 2>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 64, pack_columns<0>, all_dots<for_32<block_type, 2>>, many,
             has_dense ? 7 : 0, 8, has_dense ? many : nullptr, nullptr };
}

template <typename T> constexpr dot_kernel kernel_of_256(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_256<T>>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 8, 256, nullptr, all_dots<for_256<T>>, many, 7, 8, many, nullptr };
}

const dot_kernel kernels[] = {
    kernel_of_32x8<q4_0x8_layout>("q4_0x8", GGML_TYPE_Q4_0),
    kernel_of_32x8<iq4_nlx8_layout>("iq4_nlx8", GGML_TYPE_IQ4_NL),
    kernel_of_32x8<mxfp4x8_layout>("mxfp4x8", GGML_TYPE_MXFP4),
    { instructions, "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 8, 256, nullptr, all_dots<for_q4_Kx8>,
      panel_dots<panels_q4_Kx8<AS_GROUP>>, 3, 4, panel_dots<panels_q4_Kx8<AS_GROUP_BY_FOUR>>, quantize_fours },
    kernel_of_32<block_q8_0>("q8_0", GGML_TYPE_Q8_0),
    kernel_of_32<block_q4_0>("q4_0", GGML_TYPE_Q4_0),
    kernel_of_32<block_q5_0>("q5_0", GGML_TYPE_Q5_0),
    kernel_of_64<block_iq4_nl, false>("iq4_nl", GGML_TYPE_IQ4_NL),
    kernel_of_64<block_mxfp4, true>("mxfp4", GGML_TYPE_MXFP4),
    kernel_of_256<q2_K_reader>("q2_K", GGML_TYPE_Q2_K),
    kernel_of_256<q3_K_reader>("q3_K", GGML_TYPE_Q3_K),
    kernel_of_256<q4_K_reader>("q4_K", GGML_TYPE_Q4_K),
    kernel_of_256<q5_K_reader>("q5_K", GGML_TYPE_Q5_K),
    kernel_of_256<q6_K_reader>("q6_K", GGML_TYPE_Q6_K),
    kernel_of_256<iq4_xs_reader>("iq4_xs", GGML_TYPE_IQ4_XS),
    // ggml has another order for dense matrices with two columns and more
    { instructions, "bf16", GGML_TYPE_BF16, false, GGML_TYPE_BF16, 32, sizeof(column_bf16), 1, 32, pack_bf16, all_dots<for_bf16>, nullptr, 1, 0, nullptr, nullptr },
};

int64_t multiply(int64_t n_turns) {
    const __m256i x = _mm256_set1_epi8(1);
    for (int64_t i = 0; i < n_turns; i++) {
        __asm__ volatile("vpmaddubsw %0, %0, %%ymm8\n\tvpmaddubsw %0, %0, %%ymm9\n\tvpmaddubsw %0, %0, %%ymm10\n\tvpmaddubsw %0, %0, %%ymm11\n\t"
                         "vpmaddubsw %0, %0, %%ymm12\n\tvpmaddubsw %0, %0, %%ymm13\n\tvpmaddubsw %0, %0, %%ymm14\n\tvpmaddubsw %0, %0, %%ymm15"
                         :
                         : "x"(x)
                         : "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    }
    return n_turns * 8 * 32;
}

} // namespace

dot_kernels KERNELS() {
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])), multiply };
}

} // namespace moeedge

#else

namespace moeedge {

dot_kernels KERNELS() {
    return { nullptr, 0, nullptr };
}

} // namespace moeedge

#endif
