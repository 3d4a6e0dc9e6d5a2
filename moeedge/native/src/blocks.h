// Blocks: recognises the MoE blocks of a ggml graph by their topology, as llama.cpp's common MoE function builds them
// (router -> ids, weights -> up, gate, activation, down by MUL_MAT_ID -> times weights -> sum).

#pragma once

#include <vector>

struct ggml_cgraph;
struct ggml_tensor;

namespace moeedge {

struct moe_block {
    int           layer;   // from the weight's GGUF name "blk.N.", -1 if it has another
    int           i_first; // index in the graph of the first MUL_MAT_ID
    ggml_tensor * ids;     // [n_used, n_tokens] int32
    ggml_tensor * weights; // [1, n_used, n_tokens] float32; nullptr where not found
};

// fills `blocks` (cleared first) in graph order; weights that are computed behind i_first are left out
void find_blocks(const ggml_cgraph * graph, std::vector<moe_block> & blocks);

// whether a node belongs to a MoE block, seen from the node alone (the scheduler asks without the graph)
bool is_block_node(const ggml_tensor * node);

// tokens that a node of a MoE block works on
long long block_node_tokens(const ggml_tensor * node);

} // namespace moeedge
