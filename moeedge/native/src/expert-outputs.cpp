// Expert outputs: what each expert of a MoE block would give for each token of the batch, selected or not, before the router's
// weights. For analyses of small batches (moeedge profile), not for decoding.

#include <cstring>

#include "c-calls.h"
#include "expert-chain.h"
#include "ggml-impl.h"
#include "subgraph-set.h"

namespace moeedge {

// one column per token, the same for all of its experts
static bool is_shared_input(const ggml_tensor * input) {
    return input->ne[1] == 1 && input->op != GGML_OP_MUL;
}

static void fill(const expert_chain & chain, int64_t n_experts, ggml_tensor * input, ggml_tensor * ids) {
    for (int64_t t = 0; t < chain.n_tokens(); t++) {
        std::memcpy((char *) input->data + t * input->nb[2], (const char *) chain.input->data + t * chain.input->nb[2],
                    chain.input->ne[0] * sizeof(float));
        int32_t * row = (int32_t *) ((char *) ids->data + t * ids->nb[1]);
        for (int64_t e = 0; e < n_experts; e++) {
            row[e] = (int32_t) e;
        }
    }
}

// Computes the block whose first expert matmul is node i_first, whose input is computed and whose experts' tensors are in host
// memory, once more for all experts, on a CPU backend that computes nothing else meanwhile. Returns a moeedge_status
static int compute_expert_outputs(const ggml_cgraph * graph, int i_first, ggml_backend_t cpu, float * out, int64_t n_values) {
    static const char cannot[] = "The block cannot be computed for all experts.";
    const expert_chain chain = find_chain(graph, i_first);
    if (!chain.is_complete() || !is_shared_input(chain.input)) {
        return fail(MOEEDGE_STATUS_FAILED, cannot);
    }
    const int64_t n_experts = chain.steps.front().node->src[0]->ne[2]; // a matmul begins the chain
    const int64_t n_tokens  = chain.n_tokens();
    if (n_values != chain.out->ne[0] * n_experts * n_tokens) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "The block has other dimensions.");
    }
    const graph_memory all(chain_tensors_max(chain) + 2); // with input and ids
    ggml_context *     ctx   = all.ctx.get();
    ggml_tensor *      input = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, chain.input->ne[0], 1, n_tokens);
    ggml_tensor *      ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, n_experts, n_tokens);
    table_list         tables;
    for (const expert_table & table : chain.tables) {
        tables.push_back(table.tensor);
    }
    std::vector<subgraph::table_use> uses; // of the originals, which stay
    ggml_tensor * last = build_chain(ctx, chain, tables, input, ids, uses);
    ggml_build_forward_expand(all.graph, last);

    ggml_backend_buffer_ptr buffer;
    if (!place_tensors(ctx, buffer, ggml_backend_cpu_buffer_type(), [] {})) {
        throw std::bad_alloc();
    }
    fill(chain, n_experts, input, ids);
    if (ggml_backend_graph_compute(cpu, all.graph) != GGML_STATUS_SUCCESS) {
        return fail(MOEEDGE_STATUS_FAILED, cannot);
    }
    const int64_t n_out = last->ne[0];
    for (int64_t pair = 0; pair < n_experts * n_tokens; pair++) {
        std::memcpy(out + pair * n_out, (const char *) last->data + pair % n_experts * last->nb[1] + pair / n_experts * last->nb[2],
                    n_out * sizeof(float));
    }
    return MOEEDGE_STATUS_OK;
}

} // namespace moeedge

int moeedge_instance_expert_outputs(int64_t id, float * out, int64_t n_values) {
    return moeedge::with_instance(id, [&](moeedge::instance & self) -> int {
        if (self.hooked == nullptr) {
            return moeedge::fail(MOEEDGE_STATUS_NOT_CONFIGURED, "Outputs of experts are computed during the hook's call for a MoE block.");
        }
        return moeedge::compute_expert_outputs(self.hooked, self.i_hooked, self.cpu, out, n_values);
    });
}
