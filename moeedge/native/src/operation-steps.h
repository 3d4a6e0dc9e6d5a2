// Operation steps: when a block's ids and weights can be read in the middle of a graph, counted in calls of the CPU backend's
// abort callback.
//
// Thread 0 calls it after its part of each operation; the operations before that one are then complete. Reading there takes no
// operation of our own, whose barrier costs as much as a small operation, and the allocator need not keep anything: the graph has
// stock's memory, which was reserved with the context. A graph with other dependencies is placed anew at each change between
// them and none.
// What is counted follows ggml_graph_compute_thread (ggml-cpu.c): which nodes it skips and which it fuses. The number of calls
// of an entire graph tells whether that is still so.

#pragma once

#include <vector>

#include "moe-blocks.h"

namespace moeedge {

struct operation_steps {
    std::vector<int> read_at; // per block: ids and weights are complete and intact at this call; 0: before the first
    int              n_calls; // of the graph
};

operation_steps find_steps(const ggml_cgraph * graph, const std::vector<moe_block> & blocks);

} // namespace moeedge
