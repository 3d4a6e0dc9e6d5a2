// The kernels of expert-dots.h for AVX2. This file alone is compiled for it, so it must use no inline function of the standard
// library, which the linker might take for other files, too.
//
// Rows in groups of eight have the blocks of eight rows side by side, eight bytes of each in turn: 32 bytes hold eight bytes of
// rows 0-3 or 4-7. Eight bytes of a column are broadcast to meet them, so that 64 bits of a product belong to one row.

#include "expert-dots.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#    include <immintrin.h>
#    include <string.h>

// loops over columns and halves are unrolled, so that their arrays are registers
#    if defined(__clang__)
#        define UNROLLED _Pragma("unroll")
#    else
#        define UNROLLED _Pragma("GCC unroll 8")
#    endif

namespace moeedge {

namespace {

constexpr int n_columns_max = 4; // per pass over the rows: with more, sums do not fit the registers

// how far ahead of the rows memory is asked for: the processor's own prefetching stops at the end of a page
constexpr int ahead_bytes = 1536;

// blocks as ggml lays them out (ggml-common.h, ggml-cpu/repack.h)

struct block_q8_0 {
    uint16_t d; // half precision
    int8_t   q[32];
};

struct block_q8_K {
    float   d;
    int8_t  q[256];
    int16_t sums[16]; // of sixteen values each
};

struct block_q4_0 {
    uint16_t d;
    uint8_t  q[16]; // 8 too large
};

struct block_q4_0x8 {
    uint16_t d[8];
    uint8_t  q[128]; // signed: 8 is subtracted already
};

struct block_q4_K {
    uint16_t d;
    uint16_t min;
    uint8_t  scales[12]; // 6 bits of scale and minimum of each 32 values
    uint8_t  q[128];
};

struct block_q4_Kx8 {
    uint16_t d[8];
    uint16_t min[8];
    uint8_t  scales[96]; // per 32 values: 12 bytes with 6 bits of scale and minimum of each row
    uint8_t  q[1024];
};

struct block_q6_K {
    uint8_t  low[128];
    uint8_t  high[64];
    int8_t   scales[16];
    uint16_t d;
};

// a block of a column of Q8_0, without conversions left to do per row
struct column_block {
    float   d;
    int32_t offset; // what unsigned values of Q4_0 add too much, negative
    int8_t  q[32];
};

static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q4_K) == 144, "not ggml's blocks");
static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q8_K) == 292 && sizeof(block_q4_0x8) == 144, "not ggml's blocks");
static_assert(sizeof(block_q4_Kx8) == 1152 && sizeof(block_q6_K) == 210 && sizeof(column_block) == 40, "not ggml's blocks");

// small steps

inline __m256i load(const void * from) {
    return _mm256_loadu_si256((const __m256i *) from);
}

inline __m256i broadcast_8_bytes(const void * from) {
    long long value;
    memcpy(&value, from, sizeof(value));
    return _mm256_set1_epi64x(value);
}

inline int32_t read_int32(const void * from) {
    int32_t value;
    memcpy(&value, from, sizeof(value));
    return value;
}

inline void ask_for(const void * rows) {
    _mm_prefetch((const char *) rows + ahead_bytes, _MM_HINT_T0);
}

inline float to_float(uint16_t half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

inline __m256 to_floats(__m128i halves) {
    return _mm256_cvtph_ps(halves);
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

inline float sum_of(__m256 x) {
    __m128 sum = _mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x));
    sum        = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
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

// the scales and minimums of eight rows for 32 values, a byte each
inline void unpack_scales(const uint8_t * from, uint64_t & scales, uint64_t & mins) {
    uint32_t a, b, c;
    memcpy(&a, from, 4);
    memcpy(&b, from + 4, 4);
    memcpy(&c, from + 8, 4);
    const uint32_t scales_4_7 = (c & 0x0f0f0f0f) | ((a >> 6 & 0x03030303) << 4);
    const uint32_t mins_4_7   = (c >> 4 & 0x0f0f0f0f) | ((b >> 6 & 0x03030303) << 4);
    scales = (a & 0x3f3f3f3f) | (uint64_t) scales_4_7 << 32;
    mins   = (b & 0x3f3f3f3f) | (uint64_t) mins_4_7 << 32;
}

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
            const __m256i      of_16  = load(column.sums);
            int16_t            of_32[8];
            _mm_storeu_si128((__m128i *) of_32, _mm_hadd_epi16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1)));
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
    const size_t  ahead     = (ahead_bytes / (n_at_once * row_bytes) + 1) * n_at_once * row_bytes;

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

template <int N> void dots_q4_K(int64_t n_blocks, const block_q4_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m256i low = _mm256_set1_epi8(15);

    __m256 sums[N];
    __m128 min_sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c]     = _mm256_setzero_ps();
        min_sums[c] = _mm_setzero_ps();
    }
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
        UNROLLED
        for (int c = 0; c < N; c++) {
            const block_q8_K & column = columns[c][b];
            const __m256i      of_16  = load(column.sums);
            const __m128i      of_32  = _mm_hadd_epi16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
            const __m128       sum    = _mm_cvtepi32_ps(_mm_madd_epi16(mins, of_32));
            min_sums[c]   = _mm_fmadd_ps(_mm_set1_ps(-column.d * min), sum, min_sums[c]);
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
        UNROLLED
        for (int c = 0; c < N; c++) {
            sums[c] = _mm256_fmadd_ps(_mm256_set1_ps(columns[c][b].d * d), _mm256_cvtepi32_ps(block_sums[c]), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        const __m128 min_sum = _mm_add_ps(min_sums[c], _mm_movehl_ps(min_sums[c], min_sums[c]));
        *out[c] = sum_of(sums[c]) + _mm_cvtss_f32(_mm_add_ss(min_sum, _mm_movehdup_ps(min_sum)));
    }
}

// Q6_K, one row

template <int N> void dots_q6_K(int64_t n_blocks, const block_q6_K * row, const block_q8_K * const * columns, float * const * out) {
    const __m256i low = _mm256_set1_epi8(15);

    __m256 sums[N];
    UNROLLED
    for (int c = 0; c < N; c++) {
        sums[c] = _mm256_setzero_ps();
    }
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
        UNROLLED
        for (int c = 0; c < N; c++) {
            sums[c] = _mm256_fmadd_ps(_mm256_set1_ps(columns[c][b].d * d), _mm256_cvtepi32_ps(block_sums[c]), sums[c]);
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        *out[c] = sum_of(sums[c]);
    }
}

// all rows and columns

// F::run<N>(n blocks, rows, row_bytes, columns, out) computes F::n_rows rows with N columns
template <typename F>
void all_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns,
              float * const * out) {
    for (int64_t r = 0; r < n_rows; r += F::n_rows) {
        const char * at = (const char *) rows + r * (int64_t) row_bytes;
        for (int c = 0; c < n_columns; c += n_columns_max) { // the rows are in the innermost cache from the second pass on
            float *   to[n_columns_max];
            const int n_now = n_columns - c < n_columns_max ? n_columns - c : n_columns_max;
            for (int i = 0; i < n_now; i++) {
                to[i] = out[c + i] + r;
            }
            switch (n_now) {
                case 1:  F::template run<1>(n, at, row_bytes, columns + c, to); break;
                case 2:  F::template run<2>(n, at, row_bytes, columns + c, to); break;
                case 3:  F::template run<3>(n, at, row_bytes, columns + c, to); break;
                default: F::template run<4>(n, at, row_bytes, columns + c, to); break;
            }
        }
    }
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

struct for_q4_K {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q4_K<N>(n / 256, (const block_q4_K *) rows, (const block_q8_K * const *) columns, out);
    }
};

struct for_q6_K {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_q6_K<N>(n / 256, (const block_q6_K *) rows, (const block_q8_K * const *) columns, out);
    }
};

void pack_columns(const void * quantized, int64_t n_blocks, void * to) {
    const block_q8_0 * from = (const block_q8_0 *) quantized;
    for (int64_t b = 0; b < n_blocks; b++) {
        column_block & block = ((column_block *) to)[b];
        int32_t        sum   = 0;
        for (int i = 0; i < 32; i++) {
            sum += from[b].q[i];
        }
        block.d      = to_float(from[b].d);
        block.offset = -8 * sum;
        memcpy(block.q, from[b].q, sizeof(block.q));
    }
}

constexpr int64_t any_number = INT64_MAX;
// From eight columns of an expert on, ggml has tiled kernels for types that it does not repack. In batches of so many pairs few
// experts have eight columns; their results are then those of single tokens rather than those of the tiles.
constexpr int64_t n_before_tiles = 128;

const dot_kernel kernels[] = {
    { "q4_0x8", GGML_TYPE_Q4_0, true, GGML_TYPE_Q8_0, 32, sizeof(column_block), 8, any_number, pack_columns, all_dots<for_q4_0x8> },
    { "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 8, any_number, nullptr, all_dots<for_q4_Kx8> },
    { "q4_0", GGML_TYPE_Q4_0, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, any_number, pack_columns, all_dots<for_32<block_q4_0>> },
    { "q4_K", GGML_TYPE_Q4_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, n_before_tiles, nullptr, all_dots<for_q4_K> },
    { "q6_K", GGML_TYPE_Q6_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, n_before_tiles, nullptr, all_dots<for_q6_K> },
    { "q8_0", GGML_TYPE_Q8_0, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, any_number, pack_columns, all_dots<for_32<block_q8_0>> },
};

} // namespace

dot_kernels compiled_dot_kernels() {
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])) };
}

} // namespace moeedge

#else

namespace moeedge {

dot_kernels compiled_dot_kernels() {
    return { nullptr, 0 };
}

} // namespace moeedge

#endif
