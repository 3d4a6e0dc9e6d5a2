// Rows of quantized blocks as ggml lays them out (ggml-common.h): readers, which give 32 values of a block at a time.
//
// A reader of a type of 256 values tells by its constants how products of its values are summed; so a new type is a reader, for
// AVX-512 its wide_values (expert-few-avx512.h), and an entry in a table of kernels.

#pragma once

#include "expert-dots-x86.h"

namespace moeedge {

namespace {

// VPDPBUSD multiplies unsigned bytes with signed ones, exactly
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool has_vnni = true;
#else
constexpr bool has_vnni = false;
#endif

struct block_q2_K {
    uint8_t  scales[16]; // 4 bits of scale and minimum of each 16 values
    uint8_t  q[64];
    uint16_t d;
    uint16_t min;
};

struct block_q3_K {
    uint8_t  high[32];
    uint8_t  q[64];
    uint8_t  scales[12]; // 6 bits of each 16 values
    uint16_t d;
};

struct block_q5_K {
    uint16_t d;
    uint16_t min;
    uint8_t  scales[12]; // as Q4_K's
    uint8_t  high[32];
    uint8_t  q[128];
};

struct block_iq4_xs {
    uint16_t d;
    uint16_t scales_high; // 2 bits of each 32 values
    uint8_t  scales_low[4];
    uint8_t  q[128];
};

struct block_q5_0 {
    uint16_t d;
    uint8_t  high[4];
    uint8_t  q[16];
};

struct block_iq4_nl {
    uint16_t d;
    uint8_t  q[16];
};

struct block_mxfp4 {
    uint8_t e; // exponent
    uint8_t q[16];
};

static_assert(sizeof(block_q2_K) == 84 && sizeof(block_q3_K) == 110 && sizeof(block_q5_K) == 176, "not ggml's blocks");
static_assert(sizeof(block_iq4_xs) == 136 && sizeof(block_q5_0) == 22 && sizeof(block_iq4_nl) == 18, "not ggml's blocks");
static_assert(sizeof(block_mxfp4) == 17, "not ggml's block");

// steps

inline __m128i load_16(const void * from) {
    return _mm_loadu_si128((const __m128i *) from);
}

inline __m256i low_4(__m256i x) {
    return _mm256_and_si256(x, _mm256_set1_epi8(15));
}

inline __m256i high_4(__m256i x) {
    return low_4(_mm256_srli_epi16(x, 4));
}

// a | (b & mask)
inline __m256i or_masked(__m256i a, __m256i b, int mask) {
    return _mm256_or_si256(a, _mm256_and_si256(b, _mm256_set1_epi8((char) mask)));
}

// 32 values of 4 bits: the low bits of 16 bytes, and the high ones
inline __m256i nibbles(const uint8_t * from) {
    const __m128i raw = load_16(from);
    return low_4(_mm256_set_m128i(_mm_srli_epi16(raw, 4), raw));
}

inline __m256i table_of_iq4() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
}

// twice what they stand for
inline __m256i table_of_mxfp4() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// half of the powers of two with these exponents, so that the products with table_of_mxfp4 are right
inline __m256 halves_of_powers(__m256i exponents) {
    const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(exponents, _mm256_set1_epi32(1)), 23);
    const __m256i tiny  = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponents); // denormal
    return _mm256_castsi256_ps(_mm256_blendv_epi8(usual, tiny, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), exponents)));
}

// the same, as bits, of all exponents
struct power_table {
    uint32_t bits[256];

    constexpr power_table() : bits() {
        for (uint32_t e = 0; e < 256; e++) {
            bits[e] = e < 2 ? 0x00200000u << e : (e - 1) << 23;
        }
    }
};

constexpr power_table powers;

// blocks of 32 in groups of eight rows: what four bits stand for

struct q4_0x8_layout {
    using block                     = block_q4_0x8;
    static constexpr bool is_signed = false;
    static constexpr int  offset    = 8;

    static __m256i table() { // of signed bits
        return _mm256_broadcastsi128_si256(_mm_setr_epi8(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    }
};

struct mxfp4x8_layout {
    using block                     = block_mxfp4x8;
    static constexpr bool is_signed = false;
    static constexpr int  offset    = 12;

    static __m256i table() { return _mm256_add_epi8(table_of_mxfp4(), _mm256_set1_epi8(offset)); }
};

struct iq4_nlx8_layout {
    using block                     = block_q4_0x8; // but for what the bits stand for
    static constexpr bool is_signed = !has_vnni;
    static constexpr int  offset    = has_vnni ? 128 : 0;

    static __m256i table() { return _mm256_add_epi8(table_of_iq4(), _mm256_set1_epi8((char) offset)); }
};

// blocks of 32: the signed values

inline __m256i values_of(const block_q8_0 & block) {
    return load(block.q);
}

inline __m256i values_of(const block_q4_0 & block) {
    return _mm256_sub_epi8(nibbles(block.q), _mm256_set1_epi8(8));
}

inline __m256i values_of(const block_q5_0 & block) {
    const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bits   = _mm256_set1_epi64x((long long) 0x8040201008040201);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(read_int32(block.high)), places);
    const __m256i clear  = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bits), _mm256_setzero_si256()); // the value is negative
    return _mm256_or_si256(nibbles(block.q), _mm256_and_si256(clear, _mm256_set1_epi8((char) 0xf0)));
}

inline __m256i values_of(const block_iq4_nl & block) {
    return _mm256_shuffle_epi8(table_of_iq4(), nibbles(block.q));
}

inline __m256i values_of(const block_mxfp4 & block) {
    return _mm256_shuffle_epi8(table_of_mxfp4(), nibbles(block.q));
}

template <typename block_type> inline float factor_of(const block_type & block) {
    return to_float(block.d);
}

inline float factor_of(const block_mxfp4 & block) {
    return _mm_cvtss_f32(_mm_load_ss((const float *) &powers.bits[block.e]));
}

// blocks of 256

// what ggml does with a block's minimums when it multiplies one row and one column
enum mins_kind {
    NO_MINS,
    MINS_BY_FOUR,  // four sums of their own
    MINS_BY_BLOCK, // one
    MINS_FIRST,    // in the sums of the products, before these
};

struct reader_256 {
    static constexpr int       n_scales = 8;     // of a block
    static constexpr int       n_summed = 8;     // products of two values of which 16 bits hold the sum; 0: values are signed
    static constexpr int       offset   = 0;     // by which values are too large
    static constexpr bool      is_offset_per_value = false; // ggml subtracts it from each product rather than from their sum
    static constexpr mins_kind mins     = NO_MINS;
};

// n_scales signed scales and unsigned minimums, a byte each
struct scale_bytes {
    __m128i scales, mins;
};

inline scale_bytes scales_of_4_5(const uint8_t * from) { // of Q4_K and Q5_K
    uint64_t scales, mins;
    unpack_scales(from, scales, mins);
    return { _mm_cvtsi64_si128((long long) scales), _mm_cvtsi64_si128((long long) mins) };
}

struct q4_K_reader : reader_256 {
    using block = block_q4_K;
    static constexpr mins_kind mins = MINS_BY_FOUR;

    static scale_bytes scales(const block & x) { return scales_of_4_5(x.scales); }
    static __m256i     values(const block & x, int i) {
        const __m256i raw = load(x.q + 32 * (i / 2)); // the low bits are 32 values, the high bits the next 32
        return i % 2 == 0 ? low_4(raw) : high_4(raw);
    }
};

struct q5_K_reader : reader_256 {
    using block = block_q5_K;
    static constexpr int       n_summed = 4;
    static constexpr mins_kind mins     = MINS_BY_BLOCK;

    static scale_bytes scales(const block & x) { return scales_of_4_5(x.scales); }
    static __m256i     values(const block & x, int i) {
        const __m256i raw = load(x.q + 32 * (i / 2));
        const __m256i bit = i < 4 ? _mm256_slli_epi16(load(x.high), i < 4 ? 4 - i : 0) : _mm256_srli_epi16(load(x.high), i < 4 ? 0 : i - 4);
        return or_masked(i % 2 == 0 ? low_4(raw) : high_4(raw), bit, 16);
    }
};

struct q6_K_reader : reader_256 {
    using block = block_q6_K;
    static constexpr int n_scales = 16;
    static constexpr int n_summed = 2;
    static constexpr int offset   = 32;

    static scale_bytes scales(const block & x) { return { load_16(x.scales), _mm_setzero_si128() }; }
    static __m256i     values(const block & x, int i) {
        const int     half = i / 4, part = i % 4;
        const __m256i raw  = load(x.low + 64 * half + 32 * (part % 2));
        const __m256i high = load(x.high + 32 * half);
        const __m256i bits = part < 2 ? _mm256_slli_epi16(high, 4 - 2 * (part % 2)) : _mm256_srli_epi16(high, 2 * (part % 2));
        return or_masked(part < 2 ? low_4(raw) : high_4(raw), bits, 48);
    }
};

struct q3_K_reader : reader_256 {
    using block = block_q3_K;
    static constexpr int  n_scales            = 16;
    static constexpr int  n_summed            = 8;
    static constexpr int  offset              = 4;
    static constexpr bool is_offset_per_value = true;

    static scale_bytes scales(const block & x) {
        uint64_t low;
        uint32_t high;
        memcpy(&low, x.scales, 8);
        memcpy(&high, x.scales + 8, 4);
        const uint64_t four = 0x0f0f0f0f0f0f0f0f, two = 0x3030303030303030;
        const uint64_t high_0_7  = (uint64_t) high << 4 | (uint64_t) high << 34;
        const uint64_t high_8_15 = (uint64_t) high | (uint64_t) (high >> 2) << 32;
        const __m128i  all = _mm_set_epi64x((long long) ((low >> 4 & four) | (high_8_15 & two)), (long long) ((low & four) | (high_0_7 & two)));
        return { _mm_sub_epi8(all, _mm_set1_epi8(32)), _mm_setzero_si128() };
    }
    static __m256i values(const block & x, int i) {
        const __m256i low  = _mm256_and_si256(_mm256_srli_epi16(load(x.q + 32 * (i / 4)), 2 * (i % 4)), _mm256_set1_epi8(3));
        const __m256i bit = i < 2 ? _mm256_slli_epi16(load(x.high), i < 2 ? 2 - i : 0) : _mm256_srli_epi16(load(x.high), i < 2 ? 0 : i - 2);
        return or_masked(low, bit, 4);
    }
};

struct q2_K_reader : reader_256 {
    using block = block_q2_K;
    static constexpr int       n_scales = 16;
    static constexpr int       n_summed = 8;
    static constexpr mins_kind mins     = MINS_FIRST;

    static scale_bytes scales(const block & x) {
        const __m128i low = _mm_set1_epi8(15), both = load_16(x.scales);
        return { _mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low) };
    }
    static __m256i values(const block & x, int i) {
        return _mm256_and_si256(_mm256_srli_epi16(load(x.q + 32 * (i / 4)), 2 * (i % 4)), _mm256_set1_epi8(3));
    }
};

struct iq4_xs_reader : reader_256 {
    using block = block_iq4_xs;
    static constexpr int n_summed = 0;

    static scale_bytes scales(const block & x) {
        uint64_t low = (uint32_t) read_int32(x.scales_low), high = x.scales_high; // 4 and 2 bits, to be a byte apart
#if defined(__BMI2__)
        low  = _pdep_u64(low, 0x0f0f0f0f0f0f0f0f);
        high = _pdep_u64(high, 0x0303030303030303);
#else
        low  = (low | low << 16) & 0x0000ffff0000ffff;
        high = (high | high << 24) & 0x000000ff000000ff;
        low  = (low | low << 8) & 0x00ff00ff00ff00ff;
        high = (high | high << 12) & 0x000f000f000f000f;
        low  = (low | low << 4) & 0x0f0f0f0f0f0f0f0f;
        high = (high | high << 6) & 0x0303030303030303;
#endif
        const __m128i all = _mm_cvtsi64_si128((long long) (low | high << 4));
        return { _mm_sub_epi8(all, _mm_set1_epi8(32)), _mm_setzero_si128() };
    }
    static __m256i values(const block & x, int i) {
        return _mm256_shuffle_epi8(table_of_iq4(), nibbles(x.q + 16 * i));
    }
};

// what the values of a panel are too large by
template <typename T> constexpr int panel_offset = has_vnni && T::n_summed == 0 ? 128 : T::offset;

template <typename T> inline float min_factor_of(const typename T::block & x) {
    if constexpr (T::mins == NO_MINS) {
        (void) x;
        return 0;
    } else {
        return to_float(x.min);
    }
}

// products of two times two values, or of signed ones
template <bool is_signed> inline __m256i products(__m256i w, __m256i column) {
    return is_signed ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(column, w)) : _mm256_maddubs_epi16(w, column);
}

} // namespace

} // namespace moeedge
