// Read speed: bytes per second that threads read from memory at once, the limit of decoding on a CPU; and products of bytes per second
// that they compute, the limit of long prompts.

#include <algorithm>
#include <atomic>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "c-calls.h"
#include "ggml-cpp.h"
#include "kernel-choice.h"
#include "timing.h"

namespace moeedge {

static constexpr int64_t piece_words_max = 256 * 1024; // 2 MiB, as the pieces of a matrix at most

// a sum keeps the compiler from leaving out the reads; four of them so that none waits for another
static uint64_t sum_words(const uint64_t * words, int64_t n) {
    uint64_t sums[4] = {};
    for (int64_t i = 0; i + 4 <= n; i += 4) {
        for (int j = 0; j < 4; j++) {
            sums[j] += words[i + j];
        }
    }
    return sums[0] + sums[1] + sums[2] + sums[3];
}

// nanoseconds in which n_threads, or as many as the system has, do something at once
template <typename Work> static int64_t time_threads(int n_threads, const Work & work) {
    std::atomic<int>         n_ready{ 0 };
    std::atomic<bool>        starts{ false };
    std::vector<std::thread> others;
    others.reserve((size_t) n_threads);
    for (int t = 1; t < n_threads; t++) {
        try {
            others.emplace_back([&] {
                n_ready.fetch_add(1);
                while (!starts.load()) {
                    relax();
                }
                work();
            });
        } catch (const std::system_error &) {
            break;
        }
    }
    while (n_ready.load() < (int) others.size()) {
        relax();
    }
    const int64_t begin_ns = now_ns();
    starts.store(true);
    work();
    for (std::thread & thread : others) {
        thread.join();
    }
    return std::max(now_ns() - begin_ns, (int64_t) 1);
}

// nanoseconds in which n_threads read all words once; they take pieces as they come, as those that compute do
static int64_t time_reads(const uint64_t * words, int64_t n_words, int n_threads) {
    const int64_t         piece = std::clamp(n_words / (16 * (int64_t) n_threads) / 4 * 4, (int64_t) 4, piece_words_max); // enough for all
    std::atomic<int64_t>  next{ 0 };
    std::atomic<uint64_t> sum{ 0 };
    return time_threads(n_threads, [&] {
        uint64_t found = 0;
        for (int64_t at = next.fetch_add(piece); at < n_words; at = next.fetch_add(piece)) {
            found += sum_words(words + at, std::min(piece, n_words - at));
        }
        sum.fetch_add(found);
    });
}

static double multiply_speed(int n_threads, int n_repetitions) {
    constexpr int64_t       n_turns  = 500 * 1000;
    const multiply_function multiply = fastest_multiply();
    double                  best     = 0;
    for (int i = 0; multiply && i < n_repetitions; i++) {
        std::atomic<int64_t> n_products{ 0 };
        const int64_t        ns = time_threads(n_threads, [&] { n_products.fetch_add(multiply(n_turns)); });
        best                    = std::max(best, (double) n_products.load() * 1e9 / (double) ns);
    }
    return best;
}

static double read_speed(const void * memory, int64_t n_bytes, int n_threads, int n_repetitions) {
    const int64_t n_words = n_bytes / (int64_t) sizeof(uint64_t);
    // in pages as large as those of repacked weights
    const ggml_backend_buffer_ptr own(memory ? nullptr : ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), (size_t) n_bytes));
    if (own) {
        ggml_backend_buffer_clear(own.get(), 1);
    } else if (memory == nullptr) {
        throw std::bad_alloc();
    }
    const uint64_t * words   = (const uint64_t *) (memory ? memory : ggml_backend_buffer_get_base(own.get()));
    int64_t          best_ns = time_reads(words, n_words, n_threads);
    for (int i = 1; i < n_repetitions; i++) {
        best_ns = std::min(best_ns, time_reads(words, n_words, n_threads));
    }
    return (double) (n_words * (int64_t) sizeof(uint64_t)) * 1e9 / (double) best_ns;
}

} // namespace moeedge

// 0: it throws, as where memory is short
template <typename Measure> static double measured(const Measure & measure) {
    double speed = 0;
    moeedge::guarded([&] { speed = measure(); });
    return speed;
}

double moeedge_read_speed(const void * memory, int64_t n_bytes, int n_threads, int n_repetitions) {
    const bool is_possible = n_bytes > 0 && n_threads > 0 && n_repetitions > 0;
    return is_possible ? measured([&] { return moeedge::read_speed(memory, n_bytes, n_threads, n_repetitions); }) : 0;
}

double moeedge_multiply_speed(int n_threads, int n_repetitions) {
    return n_threads > 0 && n_repetitions > 0 ? measured([&] { return moeedge::multiply_speed(n_threads, n_repetitions); }) : 0;
}
