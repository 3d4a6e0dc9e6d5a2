// The kernels of expert-dots.h for AVX2. This file alone is compiled for it, so it must use no inline function of the standard
// library, which the linker might take for other files, too.
//
// Rows in groups of eight have the blocks of eight rows side by side, eight bytes of each in turn: 32 bytes hold eight bytes of
// rows 0-3 or 4-7. Eight bytes of a column are broadcast to meet them, so that 64 bits of a product belong to one row.

#include "expert-dots.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#    define AHEAD_BYTES 1536 // by measurement on Zen 3
#    include "expert-dots-x86.h"

namespace moeedge {

namespace {

// small steps

inline __m256i broadcast_8_bytes(const void * from) {
    long long value;
    memcpy(&value, from, sizeof(value));
    return _mm256_set1_epi64x(value);
}

// rows 0 1 4 5 2 3 6 7: the order in which add_rows leaves eight rows
inline __m128i order_halves(const uint16_t * halves) {
    return _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *) halves), _MM_SHUFFLE(3, 1, 2, 0));
}

// rows 0-7 of an order as order_halves makes it
inline __m256 in_order(__m256 rows) {
    return _mm256_permutevar8x32_ps(rows, _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7));
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

// Q4_0 in groups of eight rows

// N columns, one group
template <int N> void dots_q4_0x8(int64_t n_blocks, const block_q4_0x8 * rows, const column_block * const * columns, float * const * out) {
    const __m256i low  = _mm256_set1_epi8(15);
    const __m256i flip = _mm256_set1_epi8((char) 0x88); // from signed to unsigned
    const __m256i ones = _mm256_set1_epi16(1);

    __m256 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q4_0x8 & block = rows[b];
        ask_for(&block);
        ask_for(block.q + 48);
        ask_for(block.q + 112);
        const __m256 d = to_floats(order_halves(block.d));

        __m256i halves[2][N]; // of the rows
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m256i even = _mm256_xor_si256(load(block.q + 32 * half), flip);
            const __m256i odd  = _mm256_xor_si256(load(block.q + 32 * half + 64), flip);
            const __m256i w[4] = { _mm256_and_si256(even, low), _mm256_and_si256(odd, low),
                                   _mm256_and_si256(_mm256_srli_epi16(even, 4), low),
                                   _mm256_and_si256(_mm256_srli_epi16(odd, 4), low) };
            UNROLLED
            for (int c = 0; c < N; c++) {
                halves[half][c] = _mm256_madd_epi16(multiply_32(w, columns[c][b].q), ones);
            }
        }
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
    const __m256i low = _mm256_set1_epi8(15);
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
        for (int s = 0; s < 8; s++) {
            unpack_scales(block.scales + 12 * s, scales[s], mins[s]);
        }
        __m256i halves[2][N]; // of the rows
        UNROLLED
        for (int half = 0; half < 2; half++) {
            UNROLLED
            for (int c = 0; c < N; c++) {
                halves[half][c] = _mm256_setzero_si256();
            }
            for (int s = 0; s < 8; s += 2) { // the low bits are 32 values, the high bits the next 32
                const uint8_t * q = block.q + 128 * s + 32 * half;
                const __m256i raw[4] = { load(q), load(q + 64), load(q + 128), load(q + 192) };
                ask_for(block.q + 128 * s + 64 * half);
                ask_for(block.q + 128 * s + 64 * half + 128);
                __m256i lows[4], highs[4];
                UNROLLED
                for (int i = 0; i < 4; i++) {
                    lows[i]  = _mm256_and_si256(raw[i], low);
                    highs[i] = _mm256_and_si256(_mm256_srli_epi16(raw[i], 4), low);
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

// Q8_0 and Q4_0, four rows

// 32 values, signed
inline __m256i values_of(const block_q8_0 & block) {
    return load(block.q);
}

inline __m256i values_of(const block_q4_0 & block) {
    const __m128i raw    = _mm_loadu_si128((const __m128i *) block.q);
    const __m256i halves = _mm256_inserti128_si256(_mm256_castsi128_si256(raw), _mm_srli_epi16(raw, 4), 1);
    return _mm256_sub_epi8(_mm256_and_si256(halves, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
}

template <typename block_type, int N>
void dots_32(int64_t n_blocks, const block_type * const * rows, size_t row_bytes,
             const column_block * const * columns, float * const * out) {
    constexpr int n_at_once = N == 1 ? 2 : 1; // rows, so that several sums are under way; one row is read best
    const __m256i ones      = _mm256_set1_epi16(1);
    // the same place in rows that come later
    const size_t  ahead     = (AHEAD_BYTES / (n_at_once * row_bytes) + 1) * n_at_once * row_bytes;

    for (int first = 0; first < 4; first += n_at_once) {
        __m256 sums[n_at_once][N];
        UNROLLED
        for (int r = 0; r < n_at_once; r++) {
            UNROLLED
            for (int c = 0; c < N; c++) {
                sums[r][c] = _mm256_setzero_ps();
            }
        }
        for (int64_t b = 0; b < n_blocks; b++) {
            UNROLLED
            for (int r = 0; r < n_at_once; r++) {
                const block_type & block = rows[first + r][b];
                _mm_prefetch((const char *) &block + ahead, _MM_HINT_T0);
                const __m256i x    = values_of(block);
                const __m256i size = _mm256_abs_epi8(x);
                const float   d    = to_float(block.d);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    const column_block & column   = columns[c][b];
                    const __m256i        products = _mm256_maddubs_epi16(size, _mm256_sign_epi8(load(column.q), x));
                    const __m256         sum      = _mm256_cvtepi32_ps(_mm256_madd_epi16(ones, products));
                    sums[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(d * column.d), sum, sums[r][c]);
                }
            }
        }
        UNROLLED
        for (int r = 0; r < n_at_once; r++) {
            UNROLLED
            for (int c = 0; c < N; c++) {
                out[c][first + r] = sum_of(sums[r][c]);
            }
        }
    }
}

// Q4_K, one row

template <int N, rounding R>
void dots_q4_K(int64_t n_blocks, const block_q4_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m256i low = _mm256_set1_epi8(15);

    row_sums<N, R, true> sums;
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q4_K & block = row[b];
        ask_for(&block);
        ask_for(block.q + 48);
        ask_for(block.q + 112);
        uint64_t scale_bytes, min_bytes; // of 32 values each
        unpack_scales(block.scales, scale_bytes, min_bytes);
        const __m256i scales = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long) scale_bytes)));
        const __m128i mins   = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long) min_bytes));
        const float   d      = to_float(block.d);
        const float   min    = to_float(block.min);
        __m256i       block_sums[N];
        __m128i       min_totals[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            min_totals[c] = _mm_madd_epi16(mins, sums_of_32(columns[c][b]));
            block_sums[c] = _mm256_setzero_si256();
        }
        UNROLLED
        for (int i = 0; i < 4; i++) { // the low bits are 32 values, the high bits the next 32
            const __m256i raw         = load(block.q + 32 * i);
            const __m256i lows        = _mm256_and_si256(raw, low);
            const __m256i highs       = _mm256_and_si256(_mm256_srli_epi16(raw, 4), low);
            const __m256i low_scales  = _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (0x0100 + 0x0404 * i)));
            const __m256i high_scales = _mm256_shuffle_epi8(scales, _mm256_set1_epi16((short) (0x0302 + 0x0404 * i)));
            UNROLLED
            for (int c = 0; c < N; c++) {
                const int8_t * column = columns[c][b].q + 64 * i;
                const __m256i  first  = _mm256_madd_epi16(low_scales, _mm256_maddubs_epi16(lows, load(column)));
                const __m256i  second = _mm256_madd_epi16(high_scales, _mm256_maddubs_epi16(highs, load(column + 32)));
                block_sums[c]         = _mm256_add_epi32(block_sums[c], _mm256_add_epi32(first, second));
            }
        }
        sums.add(columns, b, d, block_sums, min, min_totals);
    }
    sums.store(out);
}

// Q6_K, one row

template <int N, rounding R>
void dots_q6_K(int64_t n_blocks, const block_q6_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m256i low = _mm256_set1_epi8(15);

    row_sums<N, R, false> sums;
    for (int64_t b = 0; b < n_blocks; b++) {
        const block_q6_K & block = row[b];
        ask_for(&block);
        ask_for(block.low + 64);
        ask_for(block.high);
        ask_for(block.scales);
        const __m128i scales    = _mm_loadu_si128((const __m128i *) block.scales);
        const __m256i scales_16 = _mm256_cvtepi8_epi16(scales);
        const float   d         = to_float(block.d);
        __m256i       block_sums[N];
        UNROLLED
        for (int c = 0; c < N; c++) { // values are unsigned below: 32 too large
            block_sums[c] = _mm256_sub_epi32(_mm256_setzero_si256(),
                                             _mm256_slli_epi32(_mm256_madd_epi16(load(columns[c][b].sums), scales_16), 5));
        }
        UNROLLED
        for (int half = 0; half < 2; half++) {
            const __m256i first  = load(block.low + 64 * half);
            const __m256i second = load(block.low + 64 * half + 32);
            const __m256i high   = load(block.high + 32 * half);
            const __m256i top    = _mm256_set1_epi8(48);
            const __m256i w[4]   = {
                _mm256_or_si256(_mm256_and_si256(first, low), _mm256_and_si256(_mm256_slli_epi16(high, 4), top)),
                _mm256_or_si256(_mm256_and_si256(second, low), _mm256_and_si256(_mm256_slli_epi16(high, 2), top)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(first, 4), low), _mm256_and_si256(high, top)),
                _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(second, 4), low), _mm256_and_si256(_mm256_srli_epi16(high, 2), top)),
            };
            __m128i pick = _mm_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1); // the scales of 32 values
            pick         = _mm_add_epi8(pick, _mm_set1_epi8((char) (8 * half)));
            UNROLLED
            for (int i = 0; i < 4; i++) {
                const __m256i scale = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, pick));
                pick                = _mm_add_epi8(pick, _mm_set1_epi8(2));
                UNROLLED
                for (int c = 0; c < N; c++) {
                    const __m256i products = _mm256_maddubs_epi16(w[i], load(columns[c][b].q + 128 * half + 32 * i));
                    block_sums[c]          = _mm256_add_epi32(block_sums[c], _mm256_madd_epi16(scale, products));
                }
            }
        }
        sums.add(columns, b, d, block_sums, 0, nullptr);
    }
    sums.store(out);
}

struct for_q4_0x8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q4_0x8<N>(n / 32, (const block_q4_0x8 *) rows, (const column_block * const *) columns, out);
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q4_Kx8<N>(n / 256, (const block_q4_Kx8 *) rows, (const block_q8_K * const *) columns, out);
    }
};

template <typename block_type> struct for_32 {
    static constexpr int64_t n_rows = 4;
    template <int N> static void run(int64_t n, const char * rows, size_t row_bytes, const void * const * columns, float * const * out) {
        const block_type * each[n_rows];
        for (int64_t r = 0; r < n_rows; r++) {
            each[r] = (const block_type *) (rows + r * (int64_t) row_bytes);
        }
        dots_32<block_type, N>(n / 32, each, row_bytes, (const column_block * const *) columns, out);
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

const dot_kernel kernels[] = {
    { "avx2", "q4_0x8", GGML_TYPE_Q4_0, true, GGML_TYPE_Q8_0, 32, sizeof(column_block), 8, 15, pack_columns, all_dots<for_q4_0x8>, nullptr },
    { "avx2", "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 8, 3, nullptr, all_dots<for_q4_Kx8>, nullptr },
    { "avx2", "q4_0", GGML_TYPE_Q4_0, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 15, pack_columns, all_dots<for_32<block_q4_0>>, nullptr },
    { "avx2", "q4_K", GGML_TYPE_Q4_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, 7, nullptr, all_dots<for_q4_K<ROUNDED_AS_SINGLE>>, all_dots<for_q4_K<ROUNDED_AS_TILE>> },
    { "avx2", "q6_K", GGML_TYPE_Q6_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, 7, nullptr, all_dots<for_q6_K<ROUNDED_AS_SINGLE>>, all_dots<for_q6_K<ROUNDED_AS_TILE>> },
    { "avx2", "q8_0", GGML_TYPE_Q8_0, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 15, pack_columns, all_dots<for_32<block_q8_0>>, nullptr },
};

} // namespace

dot_kernels avx2_kernels() {
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])) };
}

} // namespace moeedge

#else

namespace moeedge {

dot_kernels avx2_kernels() {
    return { nullptr, 0 };
}

} // namespace moeedge

#endif
