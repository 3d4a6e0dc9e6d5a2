// Prompt attention: flash attention of a batch of tokens, a head and 64 of its tokens at a time. ggml does the same, but converts and
// transposes each tile of keys value by value. The additions have its order, so results are equal bit by bit, which is checked
// before the first use, as is the speed (kernel-choice.h).

#pragma once

#include <atomic>
#include <cstdint>

#include "attention-tile.h"
#include "ggml.h"

namespace moeedge {

// A FLASH_ATTN_EXT node. ggml does it in another order for less tokens, and for keys that are quantized.
struct prompt_attention {
    const ggml_tensor *  node;
    attention_function   compute_tile;
    std::atomic<int64_t> next{ 0 }; // tile

    prompt_attention(const ggml_tensor * of, attention_function with) : node(of), compute_tile(with) {}
    void compute(int ith, int nth);
};

// ggml's time over that of the attention of runnable_sets()[i], checked first if need be; 0: its bits differ, or it has none
double attention_speed(size_t i);

// null: ggml's own code
attention_function choose_attention(const ggml_tensor * node);

} // namespace moeedge
