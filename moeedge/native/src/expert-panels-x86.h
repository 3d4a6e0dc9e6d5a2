// Panels: eight rows, unpacked to bytes, meet many columns.
//
// A panel holds a part of eight rows, four values of each row in turn. Its vectors meet four values of a column, broadcast, so
// that a product has a lane per row: nothing is summed across lanes, and sums of floats are made per row in ggml's order.
// Unpacking costs as much as a few columns do.

#pragma once

#include "expert-rows-x86.h"

namespace moeedge {

namespace {

constexpr int64_t n_panel_values = 1024; // of a row: panel and columns together fit the innermost cache
constexpr int     n_panel_rows   = 8;

// the same four values in each lane
inline __m256i broadcast_4(const int8_t * column) {
    return _mm256_set1_epi32(read_int32(column));
}

// keeps the compiler from adding in an order that needs more registers than there are
inline void keep_order(__m256i & sum) {
    __asm__ volatile("" : "+x"(sum));
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

// sums of a column with a panel's rows; the second are of minimums
struct alignas(32) column_sums {
    float products[n_panel_rows];
    float mins[n_panel_rows];
};

// blocks of 32 in groups of eight rows

struct panel_32 {
    static constexpr int64_t n_blocks = n_panel_values / 32;

    alignas(32) int8_t q[n_blocks][8][32];
    float              d[n_blocks][n_panel_rows];
};

inline void unpack_words(__m256i x, __m256i y, __m256i table, int8_t (*to)[32]) {
    const __m256i low[2]  = { _mm256_shuffle_epi8(table, low_4(x)), _mm256_shuffle_epi8(table, low_4(y)) };
    const __m256i high[2] = { _mm256_shuffle_epi8(table, high_4(x)), _mm256_shuffle_epi8(table, high_4(y)) };
    _mm256_store_si256((__m256i *) to[0], even_words(low[0], low[1]));
    _mm256_store_si256((__m256i *) to[1], odd_words(low[0], low[1]));
    _mm256_store_si256((__m256i *) to[4], even_words(high[0], high[1]));
    _mm256_store_si256((__m256i *) to[5], odd_words(high[0], high[1]));
}

// factors of eight rows, 0 1 4 5 2 3 6 7
template <typename block_type> inline __m256 factors_of(const block_type & block) {
    return to_floats(order_halves(block.d));
}

inline __m256 factors_of(const block_mxfp4x8 & block) {
    const __m128i exponents = _mm_loadl_epi64((const __m128i *) block.e);
    return halves_of_powers(_mm256_cvtepu8_epi32(_mm_shuffle_epi8(exponents, order_of_bytes(1))));
}

// L: what the rows' bits stand for
template <typename L> struct panels_32 {
    using panel                     = panel_32;
    using column                    = column_block;
    static constexpr bool is_sorted = false; // rows are 0 1 4 5 2 3 6 7

    static void unpack(const char * rows, size_t, int64_t first, int64_t n, panel & to) {
        const auto * at = (const typename L::block *) rows + first;
        for (int64_t b = 0; b < n; b++) {
            ask_for(at[b].q);
            ask_for(at[b].q + 64);
            for (int i = 0; i < 2; i++) {
                unpack_words(load(at[b].q + 64 * i), load(at[b].q + 64 * i + 32), L::table(), to.q[b] + 2 * i);
            }
            _mm256_store_ps(to.d[b], factors_of(at[b]));
        }
    }

    template <int N> static void multiply(const panel & rows, int64_t n, const column * const * columns, int64_t first, column_sums * sums) {
        constexpr int n_summed = L::is_signed ? 1 : 4; // of which 16 bits hold the sum
        const __m256i ones     = _mm256_set1_epi16(1);
        __m256        floats[N];
        UNROLLED
        for (int c = 0; c < N; c++) {
            floats[c] = _mm256_load_ps(sums[c].products);
        }
        for (int64_t b = first; b < first + n; b++) {
            const auto & q = rows.q[b - first];
            __m256i      totals[N];
            UNROLLED
            for (int c = 0; c < N; c++) {
                totals[c] = L::is_signed ? _mm256_setzero_si256() : _mm256_set1_epi32(columns[c][b].offset);
            }
            UNROLLED
            for (int i = 0; i < 8; i += n_summed) {
                __m256i part[N];
                UNROLLED
                for (int j = 0; j < n_summed; j++) {
                    const __m256i w = load(q[i + j]);
                    UNROLLED
                    for (int c = 0; c < N; c++) {
                        const __m256i each = products<L::is_signed>(w, broadcast_4(columns[c][b].q + 4 * (i + j)));
                        part[c]            = j == 0 ? each : _mm256_add_epi16(part[c], each);
                        keep_order(part[c]);
                    }
                }
                UNROLLED
                for (int c = 0; c < N; c++) {
                    totals[c] = _mm256_add_epi32(totals[c], _mm256_madd_epi16(part[c], ones));
                }
            }
            const __m256 d = _mm256_load_ps(rows.d[b - first]);
            UNROLLED
            for (int c = 0; c < N; c++) {
                const __m256 both = _mm256_mul_ps(d, _mm256_set1_ps(columns[c][b].d));
                floats[c]         = _mm256_fmadd_ps(_mm256_cvtepi32_ps(totals[c]), both, floats[c]);
            }
        }
        UNROLLED
        for (int c = 0; c < N; c++) {
            _mm256_store_ps(sums[c].products, floats[c]);
        }
    }
};

// blocks of 256

template <int n_scales> struct panel_256 {
    static constexpr int64_t n_blocks = n_panel_values / 256;

    alignas(32) uint8_t q[n_blocks][64][32];
    int16_t             scales[n_blocks][n_scales][16];   // of each row twice
    int16_t             mins[n_blocks][n_scales / 2][16]; // of each row those of two neighbours, or what their offset multiplies
    float               d[n_blocks][n_panel_rows];
    float               min[n_blocks][n_panel_rows];
};

// words of eight rows
inline void transpose(const uint8_t (*rows)[32], uint8_t (*to)[32]) {
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
        _mm256_store_si256((__m256i *) to[i], _mm256_permute2x128_si256(b[i], b[4 + i], 0x20));
        _mm256_store_si256((__m256i *) to[4 + i], _mm256_permute2x128_si256(b[i], b[4 + i], 0x31));
    }
}

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

template <typename T> inline void unpack_block(const typename T::block * const * rows, int64_t b, panel_256<T::n_scales> & to) {
    alignas(32) uint8_t values[8][n_panel_rows][32];
    __m128i             scales[n_panel_rows], mins[n_panel_rows];
    for (int r = 0; r < n_panel_rows; r++) {
        const auto &      block = *rows[r];
        const scale_bytes bytes = T::scales(block);
        scales[r]               = bytes.scales;
        mins[r]                 = bytes.mins;
        to.d[b][r]              = to_float(block.d);
        to.min[b][r]            = min_factor_of<T>(block);
        UNROLLED
        for (int i = 0; i < 8; i++) {
            _mm256_store_si256((__m256i *) values[i][r], T::values(block, i));
        }
    }
    for (int i = 0; i < 8; i++) {
        transpose(values[i], to.q[b] + 8 * i);
    }
    UNROLLED
    for (int half = 0; half < T::n_scales / 8; half++) {
        __m128i of_two[4], mins_of_two[4];
        transpose_bytes(scales, half == 1, of_two);
        transpose_bytes(mins, half == 1, mins_of_two);
        UNROLLED
        for (int i = 0; i < 4; i++) {
            const int s = 8 * half + 2 * i;
            _mm256_store_si256((__m256i *) to.scales[b][s], _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(of_two[i], of_two[i])));
            _mm256_store_si256((__m256i *) to.scales[b][s + 1], _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(of_two[i], of_two[i])));
            const __m256i pairs = T::mins != NO_MINS
                                      ? _mm256_cvtepu8_epi16(pairs_of(mins_of_two[i]))
                                      : _mm256_mullo_epi16(_mm256_cvtepi8_epi16(pairs_of(of_two[i])), _mm256_set1_epi16(T::offset));
            _mm256_store_si256((__m256i *) to.mins[b][s / 2], pairs);
        }
    }
}

// the sums of a column's values per scale
template <int n_scales> inline void read_sums(const block_q8_K & column, int16_t * to) {
    if constexpr (n_scales == 8) {
        _mm_storeu_si128((__m128i *) to, sums_of_32(column));
    } else {
        memcpy(to, column.sums, sizeof(column.sums));
    }
}

// how float sums are rounded: as ggml's tiles, or as its products of rows in groups of eight with one column, or with four
enum panel_rounding { AS_TILE, AS_GROUP, AS_GROUP_BY_FOUR };

// T: reader of the rows, or like one
template <typename T, panel_rounding R> struct panels_256_multiply {
    using panel  = panel_256<T::n_scales>;
    using column = block_q8_K;

    template <int N> static void multiply(const panel & rows, int64_t n, const column * const * columns, int64_t first, column_sums * sums) {
        constexpr int n_words  = 64 / T::n_scales;
        constexpr int n_summed = T::n_summed == 0 ? 1 : T::n_summed < n_words ? T::n_summed : n_words;
        for (int64_t b = 0; b < n; b++) {
            const column * at[N];
            __m256i        totals[N];
            int16_t        of_scale[N][T::n_scales];
            UNROLLED
            for (int c = 0; c < N; c++) {
                at[c]     = columns[c] + first + b;
                totals[c] = _mm256_setzero_si256();
                read_sums<T::n_scales>(*at[c], of_scale[c]);
            }
            for (int s = 0; s < T::n_scales; s++) {
                const __m256i scale = load(rows.scales[b][s]);
                UNROLLED
                for (int i = 0; i < n_words; i += n_summed) {
                    __m256i part[N];
                    UNROLLED
                    for (int j = 0; j < n_summed; j++) {
                        const int     word = s * n_words + i + j;
                        const __m256i w    = load(rows.q[b][word]);
                        UNROLLED
                        for (int c = 0; c < N; c++) {
                            const __m256i each = products<T::n_summed == 0>(w, broadcast_4(at[c]->q + 4 * word));
                            part[c]            = j == 0 ? each : _mm256_add_epi16(part[c], each);
                            keep_order(part[c]);
                        }
                    }
                    UNROLLED
                    for (int c = 0; c < N; c++) {
                        totals[c] = _mm256_add_epi32(totals[c], _mm256_madd_epi16(part[c], scale));
                    }
                }
                if (R == AS_GROUP_BY_FOUR && s % 2 == 1) { // rounded every 64 values
                    UNROLLED
                    for (int c = 0; c < N; c++) {
                        add(rows, b, at[c]->d, totals[c], mins_of(rows, b, of_scale[c], s / 2, s / 2 + 1), sums[c]);
                        totals[c] = _mm256_setzero_si256();
                    }
                }
            }
            if (R != AS_GROUP_BY_FOUR) {
                UNROLLED
                for (int c = 0; c < N; c++) {
                    add(rows, b, at[c]->d, totals[c], mins_of(rows, b, of_scale[c], 0, T::n_scales / 2), sums[c]);
                }
            }
        }
    }

  private:
    static __m256i mins_of(const panel & rows, int64_t b, const int16_t * of_scale, int from, int to) {
        __m256i total = _mm256_setzero_si256();
        UNROLLED
        for (int i = from; (T::mins != NO_MINS || T::offset != 0) && i < to; i++) {
            total = _mm256_add_epi32(total, _mm256_madd_epi16(load(rows.mins[b][i]), _mm256_set1_epi32(read_int32(of_scale + 2 * i))));
        }
        return total;
    }

    static void add(const panel & rows, int64_t b, float column_d, __m256i total, __m256i mins, column_sums & sums) {
        const __m256 d      = _mm256_load_ps(rows.d[b]);
        const __m256 min    = _mm256_load_ps(rows.min[b]);
        const __m256 factor = _mm256_set1_ps(column_d);
        const __m256 before = _mm256_load_ps(sums.products);
        const __m256 found  = _mm256_cvtepi32_ps(T::mins == NO_MINS ? _mm256_sub_epi32(total, mins) : total);
        if constexpr (R == AS_TILE) {
            __m256 block = _mm256_mul_ps(d, found);
            if constexpr (T::mins != NO_MINS) {
                block = _mm256_fnmadd_ps(min, _mm256_cvtepi32_ps(mins), block);
            }
            _mm256_store_ps(sums.products, _mm256_fmadd_ps(block, factor, before));
        } else {
            _mm256_store_ps(sums.products, _mm256_fmadd_ps(found, _mm256_mul_ps(d, factor), before));
            const __m256 mins_before = _mm256_load_ps(sums.mins);
            _mm256_store_ps(sums.mins, _mm256_fmadd_ps(_mm256_cvtepi32_ps(mins), _mm256_mul_ps(min, factor), mins_before));
        }
    }
};

// rows one after the other, rounded as tiles
template <typename T> struct panels_256 : panels_256_multiply<T, AS_TILE> {
    static constexpr bool is_sorted = true;

    static void unpack(const char * rows, size_t row_bytes, int64_t first, int64_t n, panel_256<T::n_scales> & to) {
        for (int64_t b = 0; b < n; b++) {
            const typename T::block * each[n_panel_rows];
            for (int r = 0; r < n_panel_rows; r++) {
                each[r] = (const typename T::block *) (rows + r * (int64_t) row_bytes) + first + b;
                ask_for_bytes<sizeof(*each[r])>((const char *) each[r] + n_panel_rows * row_bytes); // of the next panel
            }
            unpack_block<T>(each, b, to);
        }
    }
};

// Q4_K in groups of eight rows
template <panel_rounding R> struct panels_q4_Kx8 : panels_256_multiply<q4_K_reader, R> {
    static constexpr bool is_sorted = false;

    static void unpack(const char * rows, size_t, int64_t first, int64_t n, panel_256<8> & to) {
        for (int64_t b = 0; b < n; b++) {
            const block_q4_Kx8 & block = ((const block_q4_Kx8 *) rows)[first + b];
            __m128i              mins[8];
            UNROLLED
            for (int s = 0; s < 8; s++) {
                const scale_bytes bytes = scales_of_4_5(block.scales + 12 * s);
                _mm256_store_si256((__m256i *) to.scales[b][s], _mm256_cvtepu8_epi16(_mm_shuffle_epi8(bytes.scales, order_of_bytes(2))));
                mins[s] = _mm_shuffle_epi8(bytes.mins, order_of_bytes(1));
            }
            UNROLLED
            for (int i = 0; i < 4; i++) {
                _mm256_store_si256((__m256i *) to.mins[b][i], _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(mins[2 * i], mins[2 * i + 1])));
            }
            for (int i = 0; i < 16; i++) { // of two times 32 values, eight values of each row
                const uint8_t * q = block.q + 64 * i;
                ask_for(q);
                const __m256i even = even_words(load(q), load(q + 32));
                const __m256i odd  = odd_words(load(q), load(q + 32));
                uint8_t (*low)[32] = to.q[b] + 16 * (i / 4) + 2 * (i % 4);
                _mm256_store_si256((__m256i *) low[0], low_4(even));
                _mm256_store_si256((__m256i *) low[1], low_4(odd));
                _mm256_store_si256((__m256i *) low[8], high_4(even));
                _mm256_store_si256((__m256i *) low[9], high_4(odd));
            }
            _mm256_store_ps(to.d[b], to_floats(order_halves(block.d)));
            _mm256_store_ps(to.min[b], to_floats(order_halves(block.min)));
        }
    }
};

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
            for (int c = 0; c < n_columns; c += n_columns_max) {
                switch (n_columns - c) {
                    case 1:  P::template multiply<1>(panel, n_now, all + c, first, sums + c); break;
                    case 2:  P::template multiply<2>(panel, n_now, all + c, first, sums + c); break;
                    case 3:  P::template multiply<3>(panel, n_now, all + c, first, sums + c); break;
                    default: P::template multiply<4>(panel, n_now, all + c, first, sums + c); break;
                }
            }
        }
        for (int c = 0; c < n_columns; c++) {
            const __m256 found = _mm256_sub_ps(_mm256_load_ps(sums[c].products), _mm256_load_ps(sums[c].mins));
            _mm256_storeu_ps(out[c] + r, P::is_sorted ? found : in_order(found));
        }
    }
}

} // namespace

} // namespace moeedge
