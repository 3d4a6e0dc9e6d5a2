// The largest values of a row of logits: what sampling looks at, of a vocabulary of any size.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "c-calls.h"

namespace moeedge {

// in which the values are seen; neighbours are in neighbouring columns, which vector instructions compare
static constexpr int64_t n_rows    = 64;
static constexpr int64_t n_at_once = 8; // rows

// The largest value of each column of n_columns; false where a value is no number
static inline __attribute__((always_inline)) bool find_maxima(const float * __restrict__ values, int64_t n_columns,
                                                              float * __restrict__ maxima) {
    int32_t unordered = 0;
    std::fill(maxima, maxima + n_columns, -INFINITY);
    for (int64_t row = 0; row < n_rows; row += n_at_once) {
        const float * rows = values + row * n_columns;
        for (int64_t i = 0; i < n_columns; i++) {
            float largest = maxima[i];
            for (int64_t j = 0; j < n_at_once; j++) {
                const float value = rows[j * n_columns + i];
                largest           = value > largest ? value : largest;
                unordered |= value != value;
            }
            maxima[i] = largest;
        }
    }
    return unordered == 0;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) static bool find_maxima_avx2(const float * values, int64_t n_columns, float * maxima) {
    return find_maxima(values, n_columns, maxima);
}
#endif

static bool column_maxima(const float * values, int64_t n_columns, float * maxima) {
#if defined(__x86_64__)
    static const bool has_avx2 = __builtin_cpu_supports("avx2");
    if (has_avx2) {
        return find_maxima_avx2(values, n_columns, maxima);
    }
#endif
    return find_maxima(values, n_columns, maxima);
}

// see moeedge_largest_values
static int64_t largest_values(const float * values, int64_t n, int64_t k, int32_t * ids, float * found) {
    thread_local std::vector<float>   maxima, ranked;
    thread_local std::vector<int32_t> kept;

    const int64_t n_kept    = std::min(k, n);
    const int64_t n_columns = n / n_rows;
    const int64_t n_grid    = n_columns * n_rows; // what fills no row follows, each value a column of its own
    maxima.resize((size_t) n_columns);
    if (!column_maxima(values, n_columns, maxima.data())) {
        return 0;
    }
    if (std::any_of(values + n_grid, values + n, [](float value) { return std::isnan(value); })) {
        return 0;
    }
    maxima.insert(maxima.end(), values + n_grid, values + n);

    // the maxima are values themselves: the k-th largest of them is a lower bound of the k-th largest value
    float least = -INFINITY;
    if (n_kept == 1) {
        least = *std::max_element(maxima.begin(), maxima.end());
    } else if (n_kept <= (int64_t) maxima.size()) {
        ranked = maxima;
        std::nth_element(ranked.begin(), ranked.begin() + (n_kept - 1), ranked.end(), std::greater<float>());
        least = ranked[(size_t) n_kept - 1];
    }
    kept.clear();
    for (int64_t column = 0; column < n_columns; column++) {
        if (maxima[(size_t) column] >= least) {
            for (int64_t i = column; i < n_grid; i += n_columns) {
                if (values[i] >= least) {
                    kept.push_back((int32_t) i);
                }
            }
        }
    }
    for (int64_t i = n_grid; i < n; i++) {
        if (values[i] >= least) {
            kept.push_back((int32_t) i);
        }
    }
    std::partial_sort(kept.begin(), kept.begin() + n_kept, kept.end(), [&](int32_t a, int32_t b) {
        return values[a] != values[b] ? values[a] > values[b] : a < b;
    });
    for (int64_t i = 0; i < n_kept; i++) {
        ids[i]   = kept[(size_t) i];
        found[i] = values[kept[(size_t) i]];
    }
    return n_kept;
}

} // namespace moeedge

int64_t moeedge_largest_values(const float * values, int64_t n, int64_t k, int32_t * ids, float * found) {
    if (values == nullptr || ids == nullptr || found == nullptr || n <= 0 || k <= 0) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return moeedge::guarded([&] { return moeedge::largest_values(values, n, k, ids, found); });
}
