// Expert chain: the nodes of a MoE block from its experts' first matmul to the last (up, gate, activation, down), read from
// the graph, so that they can be built again for some of the block's (token, expert) pairs.
//
// The order and number of nodes are not assumed: from `down` every operand is followed back to the block's input, to the ids
// or to a tensor of the experts. A graph that does not fit (a LoRA, a value that is used elsewhere, an operation whose
// meaning depends on the entire batch) gives no chain, and the block stays on the CPU as it is.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace moeedge {

// where an operand of a chain's node comes from
enum operand_kind {
    OPERAND_NONE,
    OPERAND_STEP,  // an earlier node of the chain: `index`
    OPERAND_INPUT, // the block's input, one column per pair
    OPERAND_IDS,   // the experts, one per pair
    OPERAND_TABLE, // a tensor of the experts: `index` into tables
    OPERAND_SCALE, // one factor per expert, picked by id: `index` into tables
};

struct operand {
    operand_kind kind  = OPERAND_NONE;
    int          index = 0;
};

struct chain_step {
    const ggml_tensor * node; // the original
    operand             src[3];
};

// a tensor that has a slice per expert
struct expert_table {
    ggml_tensor * tensor; // the original; its slices are along the last used dimension
    std::string   role;   // its GGUF name without "blk.N."
};

struct expert_chain {
    int layer = -1;
    int i_end = 0; // index of the graph's next node

    ggml_tensor * input = nullptr; // float32 [n_in, 1 or n_used, n_tokens]
    ggml_tensor * ids   = nullptr; // int32 [n_used, n_tokens], rows may be strided
    ggml_tensor * out   = nullptr; // float32 [n_out, n_used, n_tokens]

    std::vector<chain_step>   steps; // in graph order; the last gives `out`
    std::vector<expert_table> tables;
    std::string               shape; // equal for chains that differ only in their tables' data and in the batch
    bool                      has_scales = false; // some operand is of kind scale

    bool    is_complete() const { return out != nullptr; }
    int64_t n_used() const { return ids->ne[0]; }
    int64_t n_tokens() const { return ids->ne[1]; }
};

// the chain of the block whose first matmul is node i_first; not is_complete() where the graph does not fit
expert_chain find_chain(const ggml_cgraph * graph, int i_first);

// The nodes after a chain: its columns times the router's weights, summed over each token's experts from the first place to
// the last.
struct expert_sum {
    int           i_end   = 0;       // index of the graph's next node
    ggml_tensor * weights = nullptr; // float32 [1, n_used, n_tokens]
    ggml_tensor * out     = nullptr; // float32 [n_out, n_tokens]

    bool is_complete() const { return out != nullptr; }
};

// of these columns, float32 [n_out, n_used, n_tokens], from node i on; not is_complete() where the graph sums in another way or uses
// a column elsewhere
expert_sum find_sum(const ggml_cgraph * graph, const ggml_tensor * columns, int i);
expert_sum find_sum(const ggml_cgraph * graph, const expert_chain & chain);

// how many nodes of llama.cpp's graph use a value; -1: not known
int count_uses(const ggml_cgraph * graph, const ggml_tensor * t);

} // namespace moeedge
