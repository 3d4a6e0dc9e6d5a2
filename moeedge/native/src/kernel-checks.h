// What the checks of kernels share: values, and times in turns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ggml-cpp.h"
#include "timing.h"

namespace moeedge {

class check_values {
  public:
    float next() { // uniform in -1 to 1
        state = state * 1664525u + 1013904223u;
        return (float) (int32_t) state / 2147483648.0f;
    }

  private:
    uint32_t state = 1;
};

// their time over ours, of the fastest of n runs each in turns; before: runs before each
template <typename F, typename G, typename H> double speed_of(int n, F before, G theirs, H ours) {
    int64_t best_ns[2] = { std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max() };
    for (int i = 0; i < 2 * n; i++) {
        before();
        const int64_t begin_ns = now_ns();
        i % 2 == 1 ? ours() : theirs();
        best_ns[i % 2] = std::min(best_ns[i % 2], now_ns() - begin_ns);
    }
    return (double) best_ns[0] / (double) std::max(best_ns[1], (int64_t) 1);
}

} // namespace moeedge
