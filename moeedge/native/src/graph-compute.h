// Graph compute: runs the graphs that llama.cpp hands to our backend, reads the routing of their MoE blocks, and gives the
// blocks that have experts on a device to the hybrid executor.

#pragma once

#include "ggml-backend-impl.h"

namespace moeedge {

struct instance;

// asks ggml's allocator to keep the tensors that the sensor reads after the graph
void optimize_graph(instance * self, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

enum ggml_status compute_graph(instance * self, ggml_cgraph * graph);

} // namespace moeedge
