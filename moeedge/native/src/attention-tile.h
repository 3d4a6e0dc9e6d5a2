// A tile of attention, which a file for each set of instructions of x86 computes (attention-x86.h).

#pragma once

#include <cstddef>
#include <cstdint>

namespace moeedge {

constexpr int n_attention_tokens = 64; // of a tile, and keys at a time, as in ggml
constexpr int n_attention_max    = 256; // values of a key, at most

// rows that lie row_bytes apart
struct attention_rows {
    const char * first;
    size_t       row_bytes;
};

struct attention_tile {
    attention_rows q;    // [n_tokens][n_key] floats
    attention_rows k;    // [n_kv][n_key]
    attention_rows v;    // [n_kv][n_value]
    attention_rows mask; // [n_tokens][n_kv] of half precision; first: null: there is none
    attention_rows out;  // [n_tokens][n_value] floats
    const float *  sink; // null: there is none
    bool           is_half; // k and v have half precision; else floats
    int            n_tokens, n_key, n_value;
    int64_t        n_kv; // a multiple of n_attention_tokens
    float          scale;
};

using attention_function = void (*)(const attention_tile & tile);

} // namespace moeedge
