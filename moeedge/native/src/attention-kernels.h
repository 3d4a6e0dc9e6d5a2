// Kernels of attention, a set for each of x86's instructions (attention-x86.h).

#pragma once

#include <cstddef>
#include <cstdint>

namespace moeedge {

constexpr int n_attention_tokens = 64;  // of a tile, and keys at a time, as in ggml
constexpr int n_attention_rows   = 64;  // of few tokens, at most
constexpr int n_attention_max    = 256; // values of a key, at most

// rows that lie row_bytes apart
struct attention_rows {
    const char * first;
    size_t       row_bytes;
};

// tokens of a head
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

// few tokens' heads, which share their keys
struct few_attention {
    attention_rows   k, v; // [n_kv] of half precision
    int64_t          begin, end; // keys
    int              n_rows, n_key, n_value;
    float            scale;
    const float *    q[n_attention_rows];    // [n_key]
    const uint16_t * mask[n_attention_rows]; // [n_kv] of half precision; null: there is none
    const float *    sink[n_attention_rows]; // null: there is none
    float *          out[n_attention_rows];  // [n_value], or a part
    bool             is_part; // the largest score, the sum of exponentials, and values before the division by it
};

// a head's parts, one after the other
struct attention_parts {
    const float * first;
    int           n_parts, n_value;
    float *       out; // [n_value]
};

struct attention_kernels {
    void (*tile)(const attention_tile &); // null: there is none for prompts
    void (*few)(const few_attention &);   // null: there are no kernels
    void (*merge)(const attention_parts &);
};

} // namespace moeedge
