// The kernels of expert-dots.h for AVX2, and by way of expert-dots-avxvnni.cpp for AVX-VNNI. These files alone are compiled for
// them, so they must use no inline function of the standard library, which the linker might take for other files, too.

#include "expert-dots.h"

#ifndef KERNELS
#    define KERNELS avx2_kernels
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#    include "expert-few-avx2.h"
#    include "expert-panels-x86.h"
#    include "attention-x86.h"

namespace moeedge {

namespace {

// blocks of 32, one row

// n_sums: of the row, which blocks take in turn
template <typename block_type, int N, int n_sums>
void dots_32(int64_t n_blocks, const block_type * row, const column_block * const * columns, float * const * out) {
    __m256 sums[n_sums][N];
    UNROLLED
    for (int i = 0; i < n_sums * N; i++) {
        sums[i / N][i % N] = _mm256_setzero_ps();
    }
    for (int64_t b = 0; b < n_blocks; b += n_sums) {
        UNROLLED
        for (int i = 0; i < n_sums; i++) {
            const block_type & block = row[b + i];
            ask_for(&block);
            const __m256i x    = values_of(block);
            const __m256i size = _mm256_abs_epi8(x);
            const float   d    = factor_of(block);
            UNROLLED
            for (int c = 0; c < N; c++) {
                const column_block & column = columns[c][b + i];
                const __m256         sum    = _mm256_cvtepi32_ps(sums_of_four(size, _mm256_sign_epi8(load(column.q), x)));
                sums[i][c]                  = _mm256_fmadd_ps(_mm256_set1_ps(d * column.d), sum, sums[i][c]);
            }
        }
    }
    UNROLLED
    for (int c = 0; c < N; c++) {
        *out[c] = sum_of(n_sums == 1 ? sums[0][c] : _mm256_add_ps(sums[0][c], sums[n_sums - 1][c]));
    }
}

template <typename block_type, int n_sums = 1> struct for_32 {
    static constexpr int64_t n_rows = 1;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        dots_32<block_type, N, n_sums>(n / 32, (const block_type *) rows, (const column_block * const *) columns, out);
    }
};

// a row and many columns, a part of both at a time: a row is unpacked once for all of them

template <typename block_type, int n_sums, int N> struct wide_dots_32 {
    static constexpr int64_t n_part    = row_values::n_part;
    static constexpr int64_t n_kept    = 64; // rows whose sums wait for the next part
    static constexpr int     n_factors = (N + 7) / 8 * 8;

    alignas(32) uint8_t columns[n_part][N][row_values::n_bytes];
    alignas(32) float   of_columns[n_part][n_factors]; // factors
    alignas(32) float   of_both[n_part][n_factors];    // times those of the row
    __m256              sums[n_kept][n_sums][N];

    // returns whether a value is -128, which is what ggml makes of numbers that are not finite; its products are then -128 times
    // the row's sizes, whatever the signs
    bool read_columns(const column_block * const * from, int64_t first, int64_t n) {
        int32_t lowest = 0;
        for (int64_t b = 0; b < n; b++) {
            for (int c = 0; c < n_factors; c++) {
                const column_block & column = from[c < N ? c : 0][first + b]; // unused factors are usual numbers: others take long
                of_columns[b][c]            = column.d;
                if (c < N) {
                    lowest |= column.offset;
                    row_values::write(load(column.q), columns[b][c]);
                }
            }
        }
        return lowest != 0;
    }

    void add(const block_type * row, int64_t n, __m256 (*to)[N]) {
        for (int64_t b = 0; b < n; b++) {
            const __m256 d = _mm256_set1_ps(factor_of(row[b]));
            UNROLLED
            for (int c = 0; c < n_factors; c += 8) {
                _mm256_store_ps(of_both[b] + c, _mm256_mul_ps(d, _mm256_load_ps(of_columns[b] + c)));
            }
        }
        for (int i = 0; i < n_sums; i++) { // which blocks take in turn; registers hold one of each column
            __m256 sum[N];
            UNROLLED
            for (int c = 0; c < N; c++) {
                sum[c] = to[i][c];
            }
            for (int64_t b = i; b < n; b += n_sums) {
                const row_values values(values_of(row[b]));
                ask_for(&row[b]);
                UNROLLED
                for (int c = 0; c < N; c++) {
                    sum[c] = _mm256_fmadd_ps(_mm256_broadcast_ss(&of_both[b][c]), values.times(columns[b][c]), sum[c]);
                }
            }
            UNROLLED
            for (int c = 0; c < N; c++) {
                to[i][c] = sum[c];
            }
        }
    }

    // returns false where it must not compute
    bool run(int64_t n_blocks, const char * rows, size_t row_bytes, int64_t n_rows, const column_block * const * from, float * const * out) {
        for (int64_t r = 0; r < n_rows; r += n_kept) {
            const int64_t n_now = n_rows - r < n_kept ? n_rows - r : n_kept;
            memset(sums, 0, (size_t) n_now * sizeof(sums[0]));
            for (int64_t first = 0; first < n_blocks; first += n_part) {
                const int64_t n = n_blocks - first < n_part ? n_blocks - first : n_part;
                if ((r == 0 || n_blocks > n_part) && read_columns(from, first, n)) {
                    return false;
                }
                for (int64_t i = 0; i < n_now; i++) {
                    add((const block_type *) (rows + (r + i) * (int64_t) row_bytes) + first, n, sums[i]);
                }
            }
            for (int64_t i = 0; i < n_now; i++) {
                for (int c = 0; c < N; c++) {
                    out[c][r + i] = sum_of(n_sums == 1 ? sums[i][0][c] : _mm256_add_ps(sums[i][0][c], sums[i][n_sums - 1][c]));
                }
            }
        }
        return true;
    }
};

template <typename block_type, int n_sums>
void wide_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    const auto one_by_one = [&](int n_now, int first) {
        all_dots<for_32<block_type, n_sums>>(n, rows, row_bytes, n_rows, columns + first, n_now, out + first);
    };
    const auto pass = [&](auto n_now, int first) {
        wide_dots_32<block_type, n_sums, n_now> dots;
        if (!dots.run(n / 32, (const char *) rows, row_bytes, n_rows, (const column_block * const *) columns + first, out + first)) {
            one_by_one(n_now, first);
        }
    };
    const int c = in_passes<8, 9>(n_columns, pass);
    switch (n_columns - c) {
        case 0:  break;
        case 5:  pass(number<5>(), c); break;
        case 6:  pass(number<6>(), c); break;
        case 7:  pass(number<7>(), c); break;
        default: one_by_one(n_columns - c, c);
    }
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
        group_dots_32<L, N>(n / 32, (const typename L::block *) rows, (const column_block * const *) columns, out);
    }
};

struct for_q4_Kx8 {
    static constexpr int64_t n_rows = 8;
    template <int N> static void run(int64_t n, const char * rows, size_t, const void * const * columns, float * const * out) {
        group_dots_q4_K<N>(n / 256, (const block_q4_Kx8 *) rows, (const column_256 * const *) columns, out);
    }
};

// F rounds as P does: up to four columns at a time F is faster
template <typename F, typename P>
void few_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    (n_columns > n_columns_max ? panel_dots<P> : all_dots<F>) (n, rows, row_bytes, n_rows, columns, n_columns, out);
}

constexpr const char * instructions = has_vnni ? "avxvnni" : "avx2";

template <typename L> constexpr dot_kernel kernel_of_32x8(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_32<L>>;
    return { instructions, layout, type, true, GGML_TYPE_Q8_0, 32, sizeof(column_block), 8, 32, pack_columns<L::offset>, few_dots<for_32x8<L>, panels_32<L>>,
             many, 7, 8, many, nullptr };
}

template <typename block_type> constexpr dot_kernel kernel_of_32(const char * layout, ggml_type type) {
    const dots_function many = wide_dots<block_type, 1>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 32, pack_columns<0, true>, many, many, 7, 8, many, nullptr };
}

// with two sums of each row; ggml rounds dense matrices of IQ4_NL otherwise
template <typename block_type, bool has_dense> constexpr dot_kernel kernel_of_64(const char * layout, ggml_type type) {
    const dots_function many = wide_dots<block_type, 2>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_0, 32, sizeof(column_block), 4, 64, pack_columns<0, true>, many, many,
             has_dense ? 7 : 0, 8, has_dense ? many : nullptr, nullptr };
}

template <typename T> constexpr dot_kernel kernel_of_256(const char * layout, ggml_type type) {
    const dots_function many = panel_dots<panels_256<T>>;
    return { instructions, layout, type, false, GGML_TYPE_Q8_K, 256, sizeof(column_256), 8, 256, pack_256, all_dots<for_256<T>>, many, 7, 8, many, nullptr };
}

const dot_kernel kernels[] = {
    kernel_of_32x8<q4_0x8_layout>("q4_0x8", GGML_TYPE_Q4_0),
    kernel_of_32x8<iq4_nlx8_layout>("iq4_nlx8", GGML_TYPE_IQ4_NL),
    kernel_of_32x8<mxfp4x8_layout>("mxfp4x8", GGML_TYPE_MXFP4),
    { instructions, "q4_Kx8", GGML_TYPE_Q4_K, true, GGML_TYPE_Q8_K, 256, sizeof(column_256), 8, 256, pack_256, few_dots<for_q4_Kx8, panels_q4_Kx8<AS_GROUP>>,
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

// for attention-x86.h

struct simd : no_halves {
    using vec = __m256;
    static constexpr int n_lanes = 8, n_rows_at_once = 2, n_vectors_at_once = 4, n_keys_at_once = 2; // eight sums

    static vec  zero() { return _mm256_setzero_ps(); }
    static vec  set(float x) { return _mm256_set1_ps(x); }
    static vec  load(const float * from) { return _mm256_loadu_ps(from); }
    static vec  load_halves(const uint16_t * from) { return to_floats(load_16(from)); }
    static void store(float * to, vec x) { _mm256_storeu_ps(to, x); }
    static vec  add(vec x, vec y) { return _mm256_add_ps(x, y); }
    static vec  sub(vec x, vec y) { return _mm256_sub_ps(x, y); }
    static vec  mul(vec x, vec y) { return _mm256_mul_ps(x, y); }
    static vec  fma(vec x, vec y, vec z) { return _mm256_fmadd_ps(x, y, z); }
    static vec  max(vec x, vec y) { return _mm256_max_ps(x, y); }
    static vec  to_half(vec x) { return to_floats(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }
    // x, or 0 where `tile_max` is minus infinity
    static vec seen(vec tile_max, vec x) { return _mm256_and_ps(_mm256_cmp_ps(tile_max, set(-INFINITY), _CMP_NEQ_UQ), x); }
    static vec power_of_2(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }

    // of x that are not positive; ggml's polynomial and order
    static vec exp(vec x) {
        const exp_parts<simd> parts(x);
        const vec             sum   = fma(parts.high, parts.square, mul(set(exp_first), parts.rest));
        const __m256i         n     = _mm256_cvtps_epi32(parts.n);
        const vec             small = _mm256_cmp_ps(parts.n, set(-126), _CMP_LT_OQ); // below the least normal power: two steps
        if (!_mm256_movemask_ps(small)) {
            const vec power = power_of_2(n);
            return fma(sum, power, power);
        }
        constexpr int n_second = 123;
        const vec     first = power_of_2(n), half = power_of_2(_mm256_add_epi32(n, _mm256_set1_epi32(n_second)));
        const vec     both  = _mm256_blendv_ps(fma(sum, first, first), mul(fma(half, sum, half), power_of_2(_mm256_set1_epi32(-n_second))), small);
        return _mm256_andnot_ps(_mm256_cmp_ps(parts.n, set(-192), _CMP_LT_OQ), both);
    }

    // neighbours of the halves' sum are added first
    static void store_sums(float * to, vec a, vec b, vec, vec, int n) {
        const __m128 halves = _mm_hadd_ps(_mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)),
                                          _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1)));
        const __m128 sums   = _mm_hadd_ps(halves, halves);
        _mm_store_ss(to, sums);
        if (n > 1) {
            _mm_store_ss(to + 1, _mm_movehdup_ps(sums));
        }
    }

    struct double_sum {
        __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

        void add(vec x) {
            low  = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
            high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
        }
        void add_to(float * sums) const {
            const vec old = simd::load(sums);
            _mm_storeu_ps(sums, _mm256_cvtpd_ps(_mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(old)), low)));
            _mm_storeu_ps(sums + 4, _mm256_cvtpd_ps(_mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(old, 1)), high)));
        }
    };
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
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])), multiply, kernels_of_attention<simd>() };
}

} // namespace moeedge

#endif
