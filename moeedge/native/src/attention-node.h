// Attention node: FLASH_ATTN_EXT with kernels of ours. Results are equal to ggml's bit by bit, which is checked before the first
// use, as is the speed (kernel-choice.h).
//
// Prompts  64 tokens of a head at a time. ggml does the same, but converts and transposes each tile of keys value by value.
// Less     ggml reads keys and values once for each token and head; here the heads of a key head and all tokens share them. One
//          token's keys are split between the threads, as ggml splits them.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "attention-kernels.h"
#include "ggml.h"

namespace moeedge {

struct attention_node {
    const ggml_tensor *          node;
    attention_kernels            kernels;
    std::vector<float> &         parts; // of one token's heads
    std::atomic<int64_t>         next{ 0 }; // piece of work
    std::deque<std::atomic<int>> n_done;    // parts, of rows that are merged

    // n_threads: that compute the node, at most
    attention_node(const ggml_tensor * of, const attention_kernels & with, std::vector<float> & all_parts, int n_threads);
    void compute(int ith, int nth);

  private:
    void compute_tiles();
    void compute_few(int nth);
};

// ggml's time over that of kernels of runnable_sets()[i], checked first if need be; 0: their bits differ, or there are none
double attention_speed(size_t i, bool of_prompt);

// without `tile`: ggml's own code. n_threads: that will compute it, at most; 0: unknown
attention_kernels choose_attention(const ggml_tensor * node, int n_threads);

} // namespace moeedge
