// Expert dots in plain C++, for processors without kernels of their own. ggml's plain code unpacks a row once per pair.
//
// Sums of floats are made in the order of ggml's plain code (ggml-cpu/quants.c), so the bits are ggml's where its compiler does not
// fuse multiplications and additions.

#include <cstring>

#include "expert-dots.h"

namespace moeedge {

namespace {

constexpr int n_lanes = 8; // float sums of a row, of every eighth value

struct block_q8_0 {
    ggml_fp16_t d;
    int8_t      q[32];
};

struct block_q4_0 {
    ggml_fp16_t d;
    uint8_t     q[16];
};

struct block_q8_K {
    float   d;
    int8_t  q[256];
    int16_t sums[16];
};

struct block_q4_K {
    ggml_fp16_t d;
    ggml_fp16_t min;
    uint8_t     scales[12];
    uint8_t     q[128];
};

struct block_q6_K {
    uint8_t     low[128];
    uint8_t     high[64];
    int8_t      scales[16];
    ggml_fp16_t d;
};

static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q4_0) == 18 && sizeof(block_q8_K) == 292, "not ggml's blocks");
static_assert(sizeof(block_q4_K) == 144 && sizeof(block_q6_K) == 210, "not ggml's blocks");

// 32 values

struct for_q4_0 {
    using block                             = block_q4_0;
    static constexpr bool scales_come_first = false;
    static void           unpack(const block & from, int8_t * to) {
        for (int i = 0; i < 16; i++) {
            to[i]      = (int8_t) ((from.q[i] & 15) - 8);
            to[i + 16] = (int8_t) ((from.q[i] >> 4) - 8);
        }
    }
};

struct for_q8_0 {
    using block                             = block_q8_0;
    static constexpr bool scales_come_first = true;
    static void           unpack(const block & from, int8_t * to) { std::memcpy(to, from.q, sizeof(from.q)); }
};

template <typename F>
void dots_32(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    for (int64_t r = 0; r < n_rows; r++) {
        const auto * row = (const typename F::block *) ((const char *) rows + r * (int64_t) row_bytes);
        for (int c = 0; c < n_columns; c++) {
            out[c][r] = 0;
        }
        for (int64_t b = 0; b < n / 32; b++) {
            int8_t values[32];
            F::unpack(row[b], values);
            const float row_d = ggml_fp16_to_fp32(row[b].d);
            for (int c = 0; c < n_columns; c++) {
                const block_q8_0 & column   = ((const block_q8_0 *) columns[c])[b];
                const float        column_d = ggml_fp16_to_fp32(column.d);
                int32_t            sum      = 0;
                for (int i = 0; i < 32; i++) {
                    sum += values[i] * column.q[i];
                }
                out[c][r] += F::scales_come_first ? (float) sum * (row_d * column_d) : (float) sum * row_d * column_d;
            }
        }
    }
}

// 256 values

struct unpacked_256 {
    int8_t  values[256];
    int16_t scales[16]; // of sixteen values each
    int16_t mins[16];
    float   d;
    float   min_d;
};

struct for_q4_K {
    using block                     = block_q4_K;
    static constexpr bool has_mins = true;
    static void           unpack(const block & from, unpacked_256 & to) {
        for (int part = 0; part < 4; part++) {
            for (int i = 0; i < 32; i++) {
                to.values[64 * part + i]      = (int8_t) (from.q[32 * part + i] & 15);
                to.values[64 * part + i + 32] = (int8_t) (from.q[32 * part + i] >> 4);
            }
        }
        for (int i = 0; i < 16; i++) {
            const int       j = i / 2; // of 32 values
            const uint8_t * s = from.scales;
            to.scales[i]      = (int16_t) (j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
            to.mins[i]        = (int16_t) (j < 4 ? s[j + 4] & 63 : (s[j + 4] >> 4) | (s[j] >> 6) << 4);
        }
        to.d     = ggml_fp16_to_fp32(from.d);
        to.min_d = ggml_fp16_to_fp32(from.min);
    }
};

struct for_q6_K {
    using block                     = block_q6_K;
    static constexpr bool has_mins = false;
    static void           unpack(const block & from, unpacked_256 & to) {
        for (int half = 0; half < 2; half++) {
            const uint8_t * low    = from.low + 64 * half;
            const uint8_t * high   = from.high + 32 * half;
            int8_t *        values = to.values + 128 * half;
            for (int i = 0; i < 32; i++) {
                values[i]      = (int8_t) (((low[i] & 15) | (high[i] & 3) << 4) - 32);
                values[i + 32] = (int8_t) (((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4) - 32);
                values[i + 64] = (int8_t) ((low[i] >> 4 | (high[i] >> 4 & 3) << 4) - 32);
                values[i + 96] = (int8_t) ((low[i + 32] >> 4 | high[i] >> 6 << 4) - 32);
            }
        }
        for (int i = 0; i < 16; i++) {
            to.scales[i] = from.scales[i];
        }
        to.d = ggml_fp16_to_fp32(from.d);
    }
};

// the sums of a block's products in each lane, and of its minimums
template <typename F> void add_block(const unpacked_256 & row, const block_q8_K & column, float * lanes, float & rest) {
    int32_t products[n_lanes] = {};
    for (int group = 0; group < 16; group++) {
        const int8_t * values = row.values + 16 * group;
        const int8_t * q      = column.q + 16 * group;
        int16_t        sums[n_lanes]; // of two products of at most 63 * 128
        for (int lane = 0; lane < n_lanes; lane++) {
            sums[lane] = (int16_t) (values[lane] * q[lane] + values[lane + n_lanes] * q[lane + n_lanes]);
        }
        for (int lane = 0; lane < n_lanes; lane++) {
            products[lane] += row.scales[group] * sums[lane];
        }
    }
    const float d = row.d * column.d;
    for (int lane = 0; lane < n_lanes; lane++) {
        lanes[lane] += d * (float) products[lane];
    }
    if (F::has_mins) {
        int32_t mins = 0;
        for (int group = 0; group < 16; group++) {
            mins += column.sums[group] * row.mins[group];
        }
        rest -= row.min_d * column.d * (float) mins;
    }
}

template <typename F>
void dots_256(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns, float * const * out) {
    constexpr int n_columns_at_once = 8; // their sums stay in the innermost cache
    for (int64_t r = 0; r < n_rows; r++) {
        const auto * row = (const typename F::block *) ((const char *) rows + r * (int64_t) row_bytes);
        for (int c_begin = 0; c_begin < n_columns; c_begin += n_columns_at_once) {
            const int c_end = n_columns - c_begin < n_columns_at_once ? n_columns : c_begin + n_columns_at_once;
            float     lanes[n_columns_at_once][n_lanes] = {};
            float     rest[n_columns_at_once]           = {};
            for (int64_t b = 0; b < n / 256; b++) {
                unpacked_256 unpacked;
                F::unpack(row[b], unpacked);
                for (int c = c_begin; c < c_end; c++) {
                    add_block<F>(unpacked, ((const block_q8_K *) columns[c])[b], lanes[c - c_begin], rest[c - c_begin]);
                }
            }
            for (int c = c_begin; c < c_end; c++) {
                float sum = rest[c - c_begin];
                for (int lane = 0; lane < n_lanes; lane++) {
                    sum += lanes[c - c_begin][lane];
                }
                out[c][r] = sum;
            }
        }
    }
}

const dot_kernel kernels[] = {
    { "portable", "q4_0", GGML_TYPE_Q4_0, false, GGML_TYPE_Q8_0, 32, sizeof(block_q8_0), 1, 15, nullptr, dots_32<for_q4_0>, nullptr },
    { "portable", "q4_K", GGML_TYPE_Q4_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, 7, nullptr, dots_256<for_q4_K>, nullptr },
    { "portable", "q6_K", GGML_TYPE_Q6_K, false, GGML_TYPE_Q8_K, 256, sizeof(block_q8_K), 1, 7, nullptr, dots_256<for_q6_K>, nullptr },
    { "portable", "q8_0", GGML_TYPE_Q8_0, false, GGML_TYPE_Q8_0, 32, sizeof(block_q8_0), 1, 15, nullptr, dots_32<for_q8_0>, nullptr },
};

} // namespace

dot_kernels portable_kernels() {
    return { kernels, (int) (sizeof(kernels) / sizeof(kernels[0])) };
}

} // namespace moeedge
