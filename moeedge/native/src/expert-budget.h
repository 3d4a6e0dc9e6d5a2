// Expert budget: verification with at most B experts per layer (MoE-Spec). llama.cpp computes a layer's router, then calls the
// budget, which rewrites the selected experts in place; llama.cpp's own nodes go on from there. So the weights of substitutes
// are taken and normalised as the model does it, on any device, whichever backend computes the experts.
//
// moeedge/lab/policies/expert_budget.py defines the same in NumPy; the tests compare both.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "moeedge.h"

struct ggml_tensor;

namespace moeedge {

class expert_budget {
  public:
    static constexpr int n_tokens_max = 512; // of a batch that keeps to the budget

    expert_budget(int n_layers, int n_experts, const int32_t * n_used); // of each layer

    int  configure(const moeedge_budget_config & config); // moeedge_status
    void set_active(bool on);
    void set_capture(bool on) { is_capturing = on; }
    void read(moeedge_budget_layer * out);
    bool get_routing(int layer, moeedge_budget_routing & out) const;

    // the eval callback's two questions: whether the node is to be stopped at, and what to do there
    bool wants(const ggml_tensor * node);
    void take(ggml_tensor * node);

  private:
    // a layer's state between its nodes, and what is kept of its newest batch
    struct layer_state {
        const ggml_tensor *  probs = nullptr;  // of the graph that is being computed
        ggml_tensor *        sorted = nullptr; // truncation: where ids are rewritten once the weights are there
        std::string          weights_name;     // of the node with the final weights, learned from the graph
        std::vector<int32_t> natural_ids, ids;
        std::vector<float>   values, selection;
        int                  n_tokens = 0, kind = 0;
        int                  n_used   = 0; // experts per token
        moeedge_budget_layer sums     = {};
    };

    // the batch in hand, read from the graph
    struct batch {
        int                  n_tokens = 0;
        std::vector<int32_t> sorted; // [n_tokens, n_experts]
        std::vector<float>   selection, values;
        std::vector<double>  probabilities;
    };

    static bool is_awaited(const layer_state & state, const ggml_tensor * node);

    void choose(int layer, ggml_tensor * sorted);
    void truncate(layer_state & state, ggml_tensor * weights);
    void read_batch(const layer_state & state, ggml_tensor * sorted);
    void make_shortlist(int layer);
    int  best_other(const layer_state & state, int token, const int32_t * ids, int n) const;
    bool truncates(const layer_state & state) const;
    void replace(layer_state & state, int token);
    void write_ids(const layer_state & state, ggml_tensor * sorted);
    int  count_unique(const std::vector<int32_t> & ids);

    const int                n_layers, n_experts;
    bool                     is_active = false, is_capturing = false;
    bool                     knows_weights = false; // weights_name of the layers, where a graph has them
    int                      ranking   = MOEEDGE_BUDGET_RANKING_ROUTER;
    int                      coverage  = MOEEDGE_BUDGET_COVERAGE_SUBSTITUTION;
    std::vector<int32_t>     budgets;
    std::vector<layer_state> layers;
    batch                    now;
    std::vector<uint8_t>     shortlist; // [n_experts]
    std::vector<double>      scores;
    std::vector<int32_t>     ranked, chosen;
    std::vector<uint8_t>     seen;
};

} // namespace moeedge
