// What the checks of kernels share: values, a node that ggml computes, too, and times in turns.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "cache-device.h"
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

// a graph of one node on a CPU backend of its own
struct kernel_case {
    ggml_backend_ptr cpu;
    ggml_cgraph *    graph = nullptr;
    ggml_tensor *    node  = nullptr;
    check_values     random;

    explicit kernel_case(int n_threads) {
        ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        cpu.reset(dev ? ggml_backend_dev_init(dev, nullptr) : nullptr);
        if (cpu) {
            set_n_threads(cpu.get(), n_threads);
        }
    }

    // without memory for its work ggml's backend has a dangling pointer: it is not freed then
    template <typename F> bool run(F compute) try {
        return cpu && graph && compute() == GGML_STATUS_SUCCESS;
    } catch (const std::bad_alloc &) {
        (void) cpu.release();
        return false;
    }

    bool run_theirs() {
        return run([&] { return ggml_backend_graph_compute(cpu.get(), graph); });
    }

    // whether the node has ggml's bits once `ours` has computed it
    template <typename F> bool is_equal_to(F ours) {
        if (!run_theirs()) {
            return false;
        }
        const std::vector<char> theirs((const char *) node->data, (const char *) node->data + ggml_nbytes(node));
        std::memset(node->data, 0xff, theirs.size());
        return run(ours) && std::memcmp(theirs.data(), node->data, theirs.size()) == 0;
    }
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
