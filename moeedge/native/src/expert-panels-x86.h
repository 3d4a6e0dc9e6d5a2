// Panels: eight rows, or sixteen with AVX-512, unpacked to bytes, meet many columns.
//
// A panel holds a part of these rows, four values of each row in turn. Its vectors meet four values of a column, broadcast, so
// that a product has a lane per row: nothing is summed across lanes, and sums of floats are made per row in ggml's order.
// Unpacking costs as much as a few columns do.

#pragma once

#include "expert-rows-x86.h"

namespace moeedge {

namespace {

constexpr int64_t n_panel_values = 1024; // of a row: panel and columns together fit the innermost cache

#if defined(__AVX512VNNI__)
constexpr int n_panel_rows = 16;
#else
constexpr int n_panel_rows = 8;
#endif
// per pass over a panel: with VNNI so many sums hide how long VPDPBUSD takes, else registers hold no more
constexpr int n_panel_columns = has_vnni ? 8 : 5;
constexpr int n_panel_columns_last = n_panel_rows == 16 ? 9 : n_panel_columns; // of the last pass

// a lane per row
typedef float   row_floats __attribute__((vector_size(4 * n_panel_rows)));
typedef int32_t row_ints __attribute__((vector_size(4 * n_panel_rows)));

using row_words = uint8_t[4 * n_panel_rows]; // four values of each row

template <typename T> inline T row_lanes(const void * from) {
    T lanes;
    memcpy(&lanes, from, sizeof(lanes));
    return lanes;
}

// a * b + c, rounded once
inline row_floats fused(row_floats a, row_floats b, row_floats c) {
#if defined(__AVX512VNNI__)
    return (row_floats) _mm512_fmadd_ps((__m512) a, (__m512) b, (__m512) c);
#else
    return (row_floats) _mm256_fmadd_ps((__m256) a, (__m256) b, (__m256) c);
#endif
}

// of two numbers of each row, 16 bits each, with the same two of a column
inline row_ints products_of_pairs(row_ints pairs, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (row_ints) _mm512_madd_epi16((__m512i) pairs, _mm512_set1_epi32(pair));
#else
    return (row_ints) _mm256_madd_epi16((__m256i) pairs, _mm256_set1_epi32(pair));
#endif
}

// adds products of a word of each row with the same word of a column, or of two numbers of 16 bits with two others
#if defined(__AVX512VNNI__)
inline row_ints add_products_of_pairs(row_ints sum, row_ints x, row_ints y) {
    return (row_ints) _mm512_dpwssd_epi32((__m512i) sum, (__m512i) x, (__m512i) y);
}

inline row_ints add_products(row_ints sum, row_ints w, int32_t column) {
    return (row_ints) _mm512_dpbusd_epi32((__m512i) sum, (__m512i) w, _mm512_set1_epi32(column));
}
#elif defined(__AVXVNNI__)
inline row_ints add_products_of_pairs(row_ints sum, row_ints x, row_ints y) {
    return (row_ints) _mm256_dpwssd_avx_epi32((__m256i) sum, (__m256i) x, (__m256i) y);
}

inline row_ints add_products(row_ints sum, row_ints w, int32_t column) {
    return (row_ints) _mm256_dpbusd_avx_epi32((__m256i) sum, (__m256i) w, _mm256_set1_epi32(column));
}
#else
// keeps the compiler from adding in an order that needs more registers than there are
inline void keep_order(__m256i & sum) {
    __asm__ volatile("" : "+x"(sum));
}
#endif

// adds the products of some words of the rows with those of columns, times a scale of each row, which `scales` has twice as 16 bits
// n_summed: products of two values of which 16 bits hold the sum; 0: values are signed. With VNNI all are unsigned
template <int n_words, int n_summed, int N, bool has_scales = true>
inline void add_words(const row_words * q, row_ints scales, const int8_t * const * columns, row_ints * totals) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    constexpr bool is_short = has_scales && n_summed >= n_words; // 16 bits hold the sums of half of the words at least
    constexpr int  n_part   = is_short && n_summed / 2 < n_words ? n_summed / 2 : n_words;
    const row_ints scale    = is_short ? scales & 0xffff : scales >> 16;
    UNROLLED
    for (int first = 0; first < n_words; first += n_part) {
        row_ints part[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            part[c] = has_scales ? row_ints{} : totals[c];
        }
        UNROLLED
        for (int i = first; i < first + n_part; i++) {
            const row_ints w = row_lanes<row_ints>(q[i]);
            UNROLLED
            for (int c = 0; c < N; c++) {
                part[c] = add_products(part[c], w, read_int32(columns[c] + 4 * i));
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] = !has_scales ? part[c] : is_short ? add_products_of_pairs(totals[c], part[c], scale) : totals[c] + part[c] * scale;
        }
    }
#else
    constexpr int n_together = n_summed == 0 ? 1 : n_summed < n_words ? n_summed : n_words;
    UNROLLED
    for (int i = 0; i < n_words; i += n_together) {
        __m256i part[N];
        UNROLLED
        for (int j = i; j < i + n_together; j++) {
            const __m256i w = load(q[j]);
            UNROLLED
            for (int c = 0; c < N; c++) {
                const __m256i each = products<n_summed == 0>(w, _mm256_set1_epi32(read_int32(columns[c] + 4 * j)));
                part[c]            = j == i ? each : _mm256_add_epi16(part[c], each);
                keep_order(part[c]);
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            totals[c] += (row_ints) _mm256_madd_epi16(part[c], (__m256i) scales);
        }
    }
#endif
}

// sums of a column with a panel's rows; the second are of minimums
struct column_sums {
    row_floats products;
    row_floats mins;
};

// how a panel has its rows
struct rows_in_order {
    static void write(row_floats rows, float * to) { memcpy(to, &rows, sizeof(rows)); }
};

// blocks of 32 in groups of eight rows

struct panel_32 {
    static constexpr int64_t n_blocks = n_panel_values / 32;

    alignas(64) row_words q[n_blocks][8];
    alignas(64) float     d[n_blocks][n_panel_rows];
};

// L: what the rows' bits stand for
template <typename L> struct panels_32_multiply {
    using panel  = panel_32;
    using column = column_block;

    template <int N> static void multiply(const panel & rows, int64_t n, const column * const * columns, int64_t first, column_sums * sums) {
        row_floats floats[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            floats[c] = sums[c].products;
        }
        for (int64_t b = first; b < first + n; b++) {
            row_ints       totals[N];
            const int8_t * q[N];
            UNROLLED
            for (int c = 0; c < N; c++) {
                totals[c] = row_ints{} + columns[c][b].offset;
                q[c]      = columns[c][b].q;
            }
            add_words<8, L::is_signed ? 0 : 4, N, false>(rows.q[b - first], row_ints{} + 0x00010001, q, totals);
            const row_floats d = row_lanes<row_floats>(rows.d[b - first]);
            UNROLLED
            for (int c = 0; c < N; c++) {
                floats[c] = fused(__builtin_convertvector(totals[c], row_floats), d * columns[c][b].d, floats[c]);
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            sums[c].products = floats[c];
        }
    }
};

// blocks of 256

template <int n_scales> struct panel_256 {
    static constexpr int64_t n_blocks = n_panel_values / 256;

    alignas(64) row_words q[n_blocks][64];
    alignas(64) int16_t   scales[n_blocks][n_scales][2 * n_panel_rows];   // of each row twice
    alignas(64) int16_t   mins[n_blocks][n_scales / 2][2 * n_panel_rows]; // of each row those of two neighbours, or what their offset multiplies
    alignas(64) float     d[n_blocks][n_panel_rows];
    alignas(64) float     min[n_blocks][n_panel_rows];
};

// eight bytes of eight rows to two times eight rows' bytes, of the lower or upper eight
inline void transpose_bytes(const __m128i * rows, bool upper, __m128i * to) {
    __m128i a[4];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        a[i] = upper ? _mm_unpackhi_epi8(rows[2 * i], rows[2 * i + 1]) : _mm_unpacklo_epi8(rows[2 * i], rows[2 * i + 1]);
    }
    const __m128i b[4] = { _mm_unpacklo_epi16(a[0], a[1]), _mm_unpackhi_epi16(a[0], a[1]), _mm_unpacklo_epi16(a[2], a[3]),
                           _mm_unpackhi_epi16(a[2], a[3]) };
    to[0] = _mm_unpacklo_epi32(b[0], b[2]);
    to[1] = _mm_unpackhi_epi32(b[0], b[2]);
    to[2] = _mm_unpacklo_epi32(b[1], b[3]);
    to[3] = _mm_unpackhi_epi32(b[1], b[3]);
}

// the numbers of two neighbours of each row
inline __m128i pairs_of(__m128i rows_of_two) {
    return _mm_unpacklo_epi8(rows_of_two, _mm_srli_si128(rows_of_two, 8));
}

// of eight rows from `first` on: all but the values
template <typename T> __attribute__((noinline)) void unpack_factors(const typename T::block * const * rows, int64_t b, int first, panel_256<T::n_scales> & to) {
    __m128i scales[8], mins[8];
    for (int r = 0; r < 8; r++) {
        const scale_bytes bytes = T::scales(*rows[r]);
        scales[r]               = bytes.scales;
        mins[r]                 = bytes.mins;
        to.d[b][first + r]      = to_float(rows[r]->d);
        to.min[b][first + r]    = min_factor_of<T>(*rows[r]);
    }
    UNROLLED
    for (int half = 0; half < T::n_scales / 8; half++) {
        __m128i of_two[4], mins_of_two[4];
        transpose_bytes(scales, half == 1, of_two);
        transpose_bytes(mins, half == 1, mins_of_two);
        UNROLLED
        for (int i = 0; i < 4; i++) {
            const int s = 8 * half + 2 * i;
            store(to.scales[b][s] + 2 * first, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(of_two[i], of_two[i])));
            store(to.scales[b][s + 1] + 2 * first, _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(of_two[i], of_two[i])));
            const __m256i pairs = T::mins != NO_MINS ? _mm256_cvtepu8_epi16(pairs_of(mins_of_two[i]))
                                                     : _mm256_mullo_epi16(_mm256_cvtepi8_epi16(pairs_of(of_two[i])), _mm256_set1_epi16(panel_offset<T>));
            store(to.mins[b][s / 2] + 2 * first, pairs);
        }
    }
}

// how float sums are rounded: as ggml's tiles, or as its products of rows in groups of eight with one column, or with four
enum panel_rounding { AS_TILE, AS_GROUP, AS_GROUP_BY_FOUR };

// T: reader of the rows, or like one
template <typename T, panel_rounding R> struct panels_256_multiply {
    using panel  = panel_256<T::n_scales>;
    using column = column_256;

    template <int N> static void multiply(const panel & rows, int64_t n, const column * const * columns, int64_t first, column_sums * sums) {
        constexpr int n_words = 64 / T::n_scales, n_per_part = T::n_scales / n_parts;
        for (int64_t b = 0; b < n; b++) {
            const column * at[N];
            row_ints       totals[N][n_kept];
            UNROLLED
            for (int c = 0; c < N; c++) {
                at[c] = columns[c] + first + b;
            }
            for (int part = 0; part < n_parts; part++) {
                row_ints now[N];
                UNROLLED
                for (int c = 0; c < N; c++) {
                    now[c] = row_ints{};
                }
                for (int s = part * n_per_part; s < (part + 1) * n_per_part; s++) {
                    const int8_t * q[N];
                    UNROLLED
                    for (int c = 0; c < N; c++) {
                        q[c] = at[c]->q + 4 * s * n_words;
                    }
                    add_words<n_words, T::n_summed, N>(rows.q[b] + s * n_words, row_lanes<row_ints>(rows.scales[b][s]), q, now);
                }
                UNROLLED
                for (int c = 0; c < N; c++) {
                    totals[c][part % n_kept] = now[c];
                }
                if ((part + 1) % n_kept == 0) {
                    UNROLLED
                    for (int c = 0; c < N; c++) {
                        add(rows, b, *at[c], totals[c], part + 1 - n_kept, sums[c]);
                    }
                }
            }
        }
    }

  private:
    static constexpr int n_parts = R == AS_GROUP_BY_FOUR ? 4 : 1; // of a block, rounded one after the other
    static constexpr int n_kept  = has_vnni ? 1 : n_parts;         // until they are rounded; with VNNI not measured

    static row_ints mins_of(const panel & rows, int64_t b, const column & column, int part) {
        constexpr int   n_pairs = T::n_scales / 2 / n_parts;
        const int16_t * sums    = T::n_scales == 8 ? column.sums_of_32 : column.sums;
        row_ints        total{};
        UNROLLED
        for (int i = part * n_pairs; (T::mins != NO_MINS || panel_offset<T> != 0) && i < (part + 1) * n_pairs; i++) {
            total += products_of_pairs(row_lanes<row_ints>(rows.mins[b][i]), read_int32(sums + 2 * i));
        }
        return total;
    }

    // n_kept parts from `first` on
    static void add(const panel & rows, int64_t b, const column & column, const row_ints * totals, int first, column_sums & sums) {
        const row_floats d      = row_lanes<row_floats>(rows.d[b]);
        const row_floats min    = row_lanes<row_floats>(rows.min[b]);
        const row_floats factor = row_floats{} + column.d;
        UNROLLED
        for (int part = 0; part < n_kept; part++) {
            const row_ints   mins    = mins_of(rows, b, column, first + part);
            const row_floats of_mins = __builtin_convertvector(mins, row_floats);
            const row_floats found   = __builtin_convertvector(T::mins == NO_MINS ? totals[part] - mins : totals[part], row_floats);
            if constexpr (R == AS_TILE) {
                const row_floats block = T::mins == NO_MINS ? d * found : fused(-min, of_mins, d * found);
                sums.products          = fused(block, factor, sums.products);
            } else {
                sums.products = fused(found, d * factor, sums.products);
                sums.mins     = fused(of_mins, min * factor, sums.mins);
            }
        }
    }
};

#if !defined(__AVX512VNNI__) // which unpacks sixteen rows
template <typename T> inline __m256i unsigned_values(const typename T::block & x, int i) {
    const __m256i values = T::values(x, i);
    return panel_offset<T> == T::offset ? values : _mm256_add_epi8(values, _mm256_set1_epi8((char) panel_offset<T>));
}

// words of eight rows
inline void transpose(const uint8_t (*rows)[32], uint8_t * to) {
    __m256i a[8], b[8];
    UNROLLED
    for (int i = 0; i < 4; i++) {
        const __m256i x = load(rows[2 * i]), y = load(rows[2 * i + 1]);
        a[2 * i]        = _mm256_unpacklo_epi32(x, y);
        a[2 * i + 1]    = _mm256_unpackhi_epi32(x, y);
    }
    UNROLLED
    for (int i = 0; i < 2; i++) {
        b[4 * i]     = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    UNROLLED
    for (int i = 0; i < 4; i++) {
        store(to + i * sizeof(row_words), _mm256_permute2x128_si256(b[i], b[4 + i], 0x20));
        store(to + (4 + i) * sizeof(row_words), _mm256_permute2x128_si256(b[i], b[4 + i], 0x31));
    }
}

// rows of blocks of 256 one after the other, rounded as tiles
template <typename T> struct panels_256 : panels_256_multiply<T, AS_TILE>, rows_in_order {
    static void unpack(const char * rows, size_t row_bytes, int64_t first, int64_t n, panel_256<T::n_scales> & to) {
        for (int64_t b = 0; b < n; b++) {
            alignas(32) uint8_t       values[8][8][32];
            const typename T::block * each[8];
            for (int r = 0; r < 8; r++) {
                each[r] = (const typename T::block *) (rows + r * (int64_t) row_bytes) + first + b;
                ask_for_bytes<sizeof(*each[r])>((const char *) each[r] + n_panel_rows * row_bytes); // of the next panel
                UNROLLED
                for (int i = 0; i < 8; i++) {
                    store(values[i][r], unsigned_values<T>(*each[r], i));
                }
            }
            for (int i = 0; i < 8; i++) {
                transpose(values[i], to.q[b][8 * i]);
            }
            unpack_factors<T>(each, b, 0, to);
        }
    }
};
#endif

// all rows and columns

template <typename P>
void panel_dots(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns, int n_columns,
                float * const * out) {
    constexpr int64_t n_per_block = n_panel_values / P::panel::n_blocks;
    const int64_t     n_blocks    = n / n_per_block;
    const auto *      all         = (const typename P::column * const *) columns;
    typename P::panel panel;
    column_sums       sums[n_columns_at_once];
    for (int64_t r = 0; r < n_rows; r += n_panel_rows) {
        memset(sums, 0, (size_t) n_columns * sizeof(sums[0]));
        for (int64_t first = 0; first < n_blocks; first += P::panel::n_blocks) {
            const int64_t n_now = n_blocks - first < P::panel::n_blocks ? n_blocks - first : P::panel::n_blocks;
            P::unpack((const char *) rows + r * (int64_t) row_bytes, row_bytes, first, n_now, panel);
            int c = in_passes<n_panel_columns, n_panel_columns_last>(n_columns, [&](auto n_cols, int at) {
                P::template multiply<n_cols>(panel, n_now, all + at, first, sums + at);
            });
            for (; c < n_columns; c += 4) {
                switch (n_columns - c) {
                    case 1:  P::template multiply<1>(panel, n_now, all + c, first, sums + c); break;
                    case 2:  P::template multiply<2>(panel, n_now, all + c, first, sums + c); break;
                    case 3:  P::template multiply<3>(panel, n_now, all + c, first, sums + c); break;
                    default: P::template multiply<4>(panel, n_now, all + c, first, sums + c); break;
                }
            }
        }
        for (int c = 0; c < n_columns; c++) {
            P::write(sums[c].products - sums[c].mins, out[c] + r);
        }
    }
}

} // namespace

} // namespace moeedge
