// Expert outputs: what each expert of a MoE block would give for each token of the batch, selected or not, before the router's
// weights. For analyses of small batches (moeedge profile), not for decoding.

#pragma once

#include <cstdint>

#include "ggml-backend.h"

struct ggml_cgraph;

namespace moeedge {

// Computes the block whose first expert matmul is node i_first, whose input is computed and whose experts' tensors are in host
// memory, once more for all experts, on a CPU backend that computes nothing else meanwhile. out: float32 [n_tokens, n_experts,
// n_out], n_values in all. Returns a moeedge_status: BAD_ARGUMENT where the block has other dimensions, FAILED where its nodes
// cannot be built again (expert-chain.h) or the router's weights are applied before the experts
int compute_expert_outputs(const ggml_cgraph * graph, int i_first, ggml_backend_t cpu, float * out, int64_t n_values);

} // namespace moeedge
