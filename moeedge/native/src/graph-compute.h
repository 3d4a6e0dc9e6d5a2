// Graph compute: runs the graphs that llama.cpp hands to our backend, reads the routing of their MoE blocks, and gives the
// blocks that have experts on a device to the hybrid executor.

#pragma once

#include <memory>

#include "ggml-backend-impl.h"

namespace moeedge {

struct instance;
class expert_cache;

// asks ggml's allocator to keep the tensors that the sensor reads after the graph
void optimize_graph(instance * self, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

enum ggml_status compute_graph(instance * self, ggml_cgraph * graph);

// From the next graph on. An instance has a cache of the device "ram", one of another device, or both; a cache replaces one of
// its kind. Never while the instance computes.
void set_cache(instance * self, std::shared_ptr<expert_cache> cache);
// detaches that one, if it is attached
void remove_cache(instance * self, const expert_cache * cache);

} // namespace moeedge
