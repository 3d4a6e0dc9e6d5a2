// What the kernels of expert-dots.h for x86 share: ggml's blocks, small steps, and the loop over rows and columns.
//
// Each file that includes this is compiled for other instructions, so all of it is local to the file: a shared inline function
// might run where its instructions are missing. For the same reason it uses no inline function of the standard library.

#pragma once

#include <immintrin.h>
#include <string.h>

#include "expert-dots.h"

// loops over columns and halves are unrolled, so that their arrays are registers
#if defined(__clang__)
#    define UNROLLED _Pragma("unroll")
#else
#    define UNROLLED _Pragma("GCC unroll 32")
#endif

namespace moeedge {

namespace {

// how far ahead of the rows memory is asked for; the processor's own prefetching stops at the end of a page
constexpr int64_t ahead_bytes   = 4096;
constexpr int     n_columns_max = 4; // per pass over the rows: with more, sums do not fit the registers

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

struct block_mxfp4x8 {
    uint8_t e[8]; // exponents
    uint8_t q[128];
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
    int32_t offset; // what unsigned values of the rows add too much, negative; or, if marked, 1 where a value is -128
    int8_t  q[32];
};

// a block of a column of Q8_K as kernels read it
struct alignas(64) column_256 {
    int8_t  q[256];
    int16_t sums[16];
    int16_t sums_of_32[8];
    float   d, unused[3];
};

static_assert(sizeof(column_256) == 320, "nothing is between the blocks");

static_assert(sizeof(block_q4_0) == 18 && sizeof(block_q4_K) == 144, "not ggml's blocks");
static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q8_K) == 292 && sizeof(block_q4_0x8) == 144, "not ggml's blocks");
static_assert(sizeof(block_q4_Kx8) == 1152 && sizeof(block_q6_K) == 210 && sizeof(block_mxfp4x8) == 136, "not ggml's blocks");

// small steps

inline __m256i load(const void * from) {
    return _mm256_loadu_si256((const __m256i *) from);
}

inline void store(void * to, __m256i x) {
    _mm256_storeu_si256((__m256i *) to, x);
}

inline int32_t read_int32(const void * from) {
    int32_t value;
    memcpy(&value, from, sizeof(value));
    return value;
}

inline void ask_for(const void * rows) {
    _mm_prefetch((const char *) rows + ahead_bytes, _MM_HINT_T0);
}

// how much later rows are that are asked for in the order in which they are in memory, while `bytes` of rows are read in another
inline int64_t bytes_until_later(int64_t bytes) {
    return (ahead_bytes / bytes + 1) * bytes;
}

template <int n_bytes> inline void ask_for_bytes(const char * from) {
    for (int i = 0; i < n_bytes; i += 64) {
        _mm_prefetch(from + i, _MM_HINT_T0);
    }
}

inline float to_float(uint16_t half) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

inline __m256 to_floats(__m128i halves) {
    return _mm256_cvtph_ps(halves);
}

inline float sum_of(__m128 x) {
    const __m128 sum = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

inline float sum_of(__m256 x) {
    return sum_of(_mm_add_ps(_mm256_extractf128_ps(x, 1), _mm256_castps256_ps128(x)));
}

#if defined(__AVX512F__)
// the sums of the sixteen values of four registers, each in the order of _mm512_reduce_add_ps
inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    const __m512 of_4 = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const __m512 of_2 = _mm512_add_ps(of_4, _mm512_permute_ps(of_4, 0x4e));
    const __m512 sums = _mm512_add_ps(of_2, _mm512_permute_ps(of_2, 0xb1));
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), sums));
}
#endif

// of each 32 values
inline __m128i sums_of_32(const block_q8_K & column) {
    const __m256i of_16 = load(column.sums);
    return _mm_hadd_epi16(_mm256_castsi256_si128(of_16), _mm256_extracti128_si256(of_16, 1));
}

inline __m128i sums_of_32(const column_256 & column) {
    return _mm_load_si128((const __m128i *) column.sums_of_32);
}

inline void pack_256(const void * quantized, int64_t n_blocks, void * to) {
    const block_q8_K * from = (const block_q8_K *) quantized;
    for (int64_t b = 0; b < n_blocks; b++) {
        column_256 & block = ((column_256 *) to)[b];
        block.d            = from[b].d;
        memcpy(block.q, from[b].q, sizeof(block.q));
        memcpy(block.sums, from[b].sums, sizeof(block.sums));
        _mm_store_si128((__m128i *) block.sums_of_32, sums_of_32(from[b]));
    }
}

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

template <int n> struct number { constexpr operator int() const { return n; } };

// Calls pass(number<n>, first) for n_wide columns at a time, at last for n_last if so many are left: eight drafts have nine
// columns. Returns how many columns that were.
template <int n_wide, int n_last, typename F> inline int in_passes(int n_columns, F pass) {
    int c = 0;
    for (; n_columns - c >= n_wide && n_columns - c != n_last; c += n_wide) {
        pass(number<n_wide>(), c);
    }
    if (n_columns - c == n_last) {
        pass(number<n_last>(), c);
        c = n_columns;
    }
    return c;
}

// offset: by which the rows' values are too large
template <int offset, bool is_marked = false> inline void pack_columns(const void * quantized, int64_t n_blocks, void * to) {
    const block_q8_0 * from = (const block_q8_0 *) quantized;
    for (int64_t b = 0; b < n_blocks; b++) {
        column_block & block = ((column_block *) to)[b];
        int32_t        sum = 0, lowest = 0;
        for (int i = 0; i < 32; i++) {
            sum += from[b].q[i];
            lowest |= from[b].q[i] == -128;
        }
        block.d      = to_float(from[b].d);
        block.offset = is_marked ? lowest : -offset * sum;
        memcpy(block.q, from[b].q, sizeof(block.q));
    }
}

// ggml quantizes four columns at a time with the other sign where a block has its largest size as a positive value
inline void quantize_fours(const float * x, void * quantized, int64_t n) {
    block_q8_K * to = (block_q8_K *) quantized;
    for (int64_t b = 0; b < n / 256; b++, x += 256) {
        __m256 sizes = _mm256_setzero_ps();
        for (int i = 0; i < 256; i += 8) {
            sizes = _mm256_max_ps(sizes, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x + i)));
        }
        const __m128 of_4  = _mm_max_ps(_mm256_extractf128_ps(sizes, 1), _mm256_castps256_ps128(sizes));
        const __m128 of_2  = _mm_max_ps(of_4, _mm_movehl_ps(of_4, of_4));
        const float  size  = _mm_cvtss_f32(_mm_max_ss(of_2, _mm_movehdup_ps(of_2)));
        __m256       found = _mm256_setzero_ps();
        for (int i = 0; i < 256; i += 8) {
            found = _mm256_or_ps(found, _mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(size), _CMP_EQ_OQ));
        }
        const float scale = size == 0 ? 0 : (_mm256_movemask_ps(found) ? -127.0f : 127.0f) / size;
        to[b].d           = size == 0 ? 0 : 1 / scale;
        for (int i = 0; i < 256; i += 32) {
            __m256i part[4];
            UNROLLED
            for (int j = 0; j < 4; j++) { // rounds to even
                part[j] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8 * j), _mm256_set1_ps(scale)));
            }
            const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(part[0], part[1]), _mm256_packs_epi32(part[2], part[3]));
            const __m256i q     = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), q);
            const __m256i fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
            const __m256i of_8  = _mm256_hadd_epi32(fours, fours);
            const __m256i of_16 = _mm256_hadd_epi32(of_8, of_8); // in each lane of a half
            _mm256_storeu_si256((__m256i *) (to[b].q + i), q);
            to[b].sums[i / 16]     = (int16_t) _mm256_extract_epi32(of_16, 0);
            to[b].sums[i / 16 + 1] = (int16_t) _mm256_extract_epi32(of_16, 4);
        }
    }
}

} // namespace

} // namespace moeedge
