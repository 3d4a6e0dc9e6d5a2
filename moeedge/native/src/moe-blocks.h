// MoE blocks: recognises the MoE blocks of a ggml graph by their topology, as llama.cpp's common MoE function builds them
// (router -> ids, weights -> up, gate, activation, down by MUL_MAT_ID -> times weights -> sum).

#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

struct ggml_cgraph;

namespace moeedge {

struct moe_block {
    int           layer;   // from the weight's GGUF name "blk.N.", -1 if it has another
    int           i_first; // index in the graph of the first MUL_MAT_ID
    ggml_tensor * ids;     // [n_used, n_tokens] int32
    ggml_tensor * weights; // [1, n_used, n_tokens] float32; nullptr where not found
    int           i_routed     = 0;     // index of the node before which ids and weights are complete; blocks have them in their order
    bool          weighs_input = false; // nothing uses the weights from i_first on
};

// fills `blocks` (cleared first) in graph order, one per layer; weights that are computed after i_first are left out
void find_blocks(const ggml_cgraph * graph, std::vector<moe_block> & blocks);

// whether a node belongs to a MoE block, judged by the node alone (the scheduler asks without the graph)
bool is_block_node(const ggml_tensor * node);

// whether an operation gives each pair's column from the same columns of its operands
bool is_column_op(enum ggml_op op);

// tokens that a node of a MoE block works on
int64_t block_node_tokens(const ggml_tensor * node);

// copies a block's ids, whose rows may be strided, to out [n_tokens * n_used]
void read_ids(const ggml_tensor * ids, std::vector<int32_t> & out);

// layer of a GGUF name, -1 if it has none; role: "ffn_up_exps.weight" of "blk.12.ffn_up_exps.weight"
int parse_weight_name(const char * name, const char *& role);

} // namespace moeedge
