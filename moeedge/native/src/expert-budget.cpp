// Expert budget: verification with at most B experts per layer (MoE-Spec). llama.cpp computes a layer's router, then calls the
// budget, which rewrites the selected experts in place; llama.cpp's own nodes go on from there. So the weights of substitutes
// are taken and normalised as the model does it, on any device, whichever backend computes the experts.
//
// moeedge/lab/policies/expert_budget.py defines the same in NumPy; the tests compare both.

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "c-calls.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "router-nodes.h"

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

expert_budget::expert_budget(int n, int n_exp, const int32_t * n_used) :
    n_layers(n), n_experts(n_exp), budgets(n, n_exp), layers(n), shortlist(n_exp), scores(n_exp), ranked(n_exp), seen(n_exp) {
    for (int layer = 0; layer < n_layers; layer++) {
        layers[layer].n_used = n_used[layer];
    }
}

int expert_budget::configure(const moeedge_budget_config & config) {
    if (config.ranking < 0 || config.ranking > MOEEDGE_BUDGET_RANKING_PICKS || config.coverage < 0 ||
        config.coverage > MOEEDGE_BUDGET_COVERAGE_TRUNCATION || config.budgets == nullptr) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    for (int layer = 0; layer < n_layers; layer++) {
        if (config.budgets[layer] < layers[layer].n_used) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
    }
    budgets.assign(config.budgets, config.budgets + n_layers);
    ranking  = config.ranking;
    coverage = config.coverage;
    return MOEEDGE_STATUS_OK;
}

void expert_budget::set_active(bool on) {
    is_active     = on;
    knows_weights = true;
    for (layer_state & state : layers) {
        state.sorted = nullptr; // of a decode that failed
        if (on) {
            state.n_tokens = 0;
        }
    }
}

void expert_budget::read(moeedge_budget_layer * out) {
    for (layer_state & state : layers) {
        *out++     = state.sums;
        state.sums = {};
    }
}

bool expert_budget::get_routing(int layer, moeedge_budget_routing & out) const {
    if (layer < 0 || layer >= n_layers) {
        return false;
    }
    const layer_state & state = layers[layer];
    out = { state.n_tokens, state.kind, state.values.data(), state.selection.data(), state.natural_ids.data(), state.ids.data() };
    return true;
}

// the name of the node that computes a tensor: where another backend does, the tensor is a copy named "BACKEND#NAME#NUMBER"
static std::string name_of_source(const ggml_tensor * t) {
    const std::string name  = t->name;
    const size_t      begin = name.find('#');
    const size_t      end   = name.rfind('#');
    return begin == end ? name : name.substr(begin + 1, end - begin - 1);
}

// whether the node has the final weights of a layer whose experts are to be truncated
bool expert_budget::is_awaited(const layer_state & state, const ggml_tensor * node) {
    return state.sorted && state.weights_name == node->name;
}

bool expert_budget::wants(const ggml_tensor * node) {
    if ((!is_active && knows_weights) || !is_router_node(node)) {
        return false;
    }
    int layer = -1;
    if (is_router_node(node, "probs-", n_layers, layer)) {
        layers[layer].probs = node;
        return false;
    }
    if (is_router_node(node, "argsort-", n_layers, layer)) {
        return is_active && node->ne[0] == n_experts && node->ne[1] >= 2 && node->ne[1] <= n_tokens_max && layers[layer].probs;
    }
    // the prompt's graph, before the first verification, shows which node has the final weights
    if (node->op == GGML_OP_MUL && is_router_node(node, "weighted-", n_layers, layer)) {
        layers[layer].weights_name = name_of_source(node->src[1]);
        return false;
    }
    return std::any_of(layers.begin(), layers.end(), [node](const layer_state & state) { return is_awaited(state, node); });
}

void expert_budget::take(ggml_tensor * node) {
    int layer = -1;
    if (is_router_node(node, "argsort-", n_layers, layer)) {
        choose(layer, node);
        return;
    }
    for (layer_state & state : layers) {
        if (is_awaited(state, node)) {
            truncate(state, node);
            return;
        }
    }
}

// rows of n values turned into distributions over the experts
static void normalise(const float * values, int kind, int n_rows, int n, double * out) {
    for (int row = 0; row < n_rows; row++, values += n, out += n) {
        const double largest = kind == MOEEDGE_ROUTER_LOGITS ? *std::max_element(values, values + n) : 0.0;
        double       sum     = 0.0;
        for (int i = 0; i < n; i++) {
            out[i] = kind == MOEEDGE_ROUTER_LOGITS ? std::exp((double) values[i] - largest) : (double) values[i];
            sum += out[i];
        }
        for (int i = 0; i < n && kind != MOEEDGE_ROUTER_SOFTMAX && sum > 0.0; i++) {
            out[i] /= sum;
        }
    }
}

void expert_budget::read_batch(const layer_state & state, ggml_tensor * sorted) {
    const ggml_tensor * selection = sorted->src[0];
    const size_t        n         = (size_t) n_experts * sorted->ne[1];
    now.n_tokens = (int) sorted->ne[1];
    now.sorted.resize(n);
    now.selection.resize(n);
    ggml_backend_tensor_get(sorted, now.sorted.data(), 0, n * sizeof(int32_t));
    ggml_backend_tensor_get(selection, now.selection.data(), 0, n * sizeof(float));
    if (state.probs->data == selection->data) {
        now.values = now.selection;
    } else {
        now.values.resize(n);
        ggml_backend_tensor_get(state.probs, now.values.data(), 0, n * sizeof(float));
    }
    now.probabilities.resize(n);
    normalise(now.values.data(), router_kind(state.probs), now.n_tokens, n_experts, now.probabilities.data());
}

// the best `budget` experts of the layer for the batch in hand; the lower id wins a tie
void expert_budget::make_shortlist(int layer) {
    const int n_used = layers[layer].n_used;
    std::fill(scores.begin(), scores.end(), 0.0);
    for (int token = 0; token < now.n_tokens; token++) {
        const double * row = now.probabilities.data() + (size_t) token * n_experts;
        if (ranking == MOEEDGE_BUDGET_RANKING_PICKS) {
            const int32_t * ids = now.sorted.data() + (size_t) token * n_experts;
            const double    sum = std::accumulate(ids, ids + n_used, 0.0, [row](double a, int32_t id) { return a + row[id]; });
            for (int i = 0; i < n_used && sum > 0.0; i++) {
                scores[ids[i]] += row[ids[i]] / sum;
            }
            continue;
        }
        for (int i = 0; i < n_experts; i++) {
            scores[i] += row[i];
        }
    }
    for (double & score : scores) { // a model whose activations overflow must not break the order
        score = std::isfinite(score) ? score : -1.0;
    }
    std::iota(ranked.begin(), ranked.end(), 0);
    const int n_kept = std::min(budgets[layer], (int32_t) n_experts);
    std::partial_sort(ranked.begin(), ranked.begin() + n_kept, ranked.end(), [this](int32_t a, int32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
    });
    std::fill(shortlist.begin(), shortlist.end(), 0);
    for (int i = 0; i < n_kept; i++) {
        shortlist[ranked[i]] = 1;
    }
}

// whether the layer's weights can be zeroed; a graph whose weights were not found gets substitutes instead
bool expert_budget::truncates(const layer_state & state) const {
    return coverage == MOEEDGE_BUDGET_COVERAGE_TRUNCATION && !state.weights_name.empty();
}

// The best expert of the shortlist that is not among ids [n]. Substitution: by what the router sorts, and where the model's
// groups exclude the rest, by probability. Truncation: by probability, which does not matter for the result.
int expert_budget::best_other(const layer_state & state, int token, const int32_t * ids, int n) const {
    const float *  selection     = now.selection.data() + (size_t) token * n_experts;
    const double * probabilities = now.probabilities.data() + (size_t) token * n_experts;
    const auto     is_open       = [&](int expert) { return !truncates(state) && std::isfinite(selection[expert]); };
    const auto     is_better     = [&](int a, int b) {
        if (is_open(a) != is_open(b)) {
            return is_open(a);
        }
        return is_open(a) ? selection[a] > selection[b] : probabilities[a] > probabilities[b];
    };
    int best = -1;
    for (int expert = 0; expert < n_experts; expert++) {
        if (shortlist[expert] && std::find(ids, ids + n, expert) == ids + n && (best < 0 || is_better(expert, best))) {
            best = expert;
        }
    }
    return best;
}

// Replaces a token's experts outside the shortlist. Substitution: those inside keep their order, as the router would sort them.
// Truncation: all keep their places, since their weights are known by place.
void expert_budget::replace(layer_state & state, int token) {
    const int       n_used  = state.n_used;
    const int32_t * natural = state.natural_ids.data() + (size_t) token * n_used;
    int32_t *       ids     = state.ids.data() + (size_t) token * n_used;
    chosen.clear();
    std::copy_if(natural, natural + n_used, std::back_inserter(chosen), [this](int32_t id) { return shortlist[id] != 0; });
    size_t i_other = chosen.size();
    while ((int) chosen.size() < n_used) {
        chosen.push_back(best_other(state, token, chosen.data(), (int) chosen.size()));
    }
    if (!truncates(state)) {
        std::copy(chosen.begin(), chosen.end(), ids);
        return;
    }
    for (int i = 0; i < n_used; i++) {
        ids[i] = shortlist[natural[i]] ? natural[i] : chosen[i_other++];
    }
}

int expert_budget::count_unique(const std::vector<int32_t> & ids) {
    std::fill(seen.begin(), seen.end(), 0);
    int n = 0;
    for (const int32_t id : ids) {
        n += !seen[id];
        seen[id] = 1;
    }
    return n;
}

void expert_budget::choose(int layer, ggml_tensor * sorted) {
    layer_state & state  = layers[layer];
    const int     n_used = state.n_used;
    read_batch(state, sorted);
    state.natural_ids.resize((size_t) now.n_tokens * n_used);
    for (int token = 0; token < now.n_tokens; token++) {
        std::copy_n(now.sorted.begin() + (size_t) token * n_experts, n_used, state.natural_ids.begin() + (size_t) token * n_used);
    }
    state.ids      = state.natural_ids;
    state.n_tokens = now.n_tokens;
    state.kind     = router_kind(state.probs);

    const int  n_natural = count_unique(state.natural_ids);
    const bool is_over   = n_natural > budgets[layer];
    int64_t    n_outside = 0;
    double     all = 0.0, kept = 0.0; // probability of the selected experts
    if (is_over) {
        make_shortlist(layer);
        for (int token = 0; token < now.n_tokens; token++) {
            const int32_t * ids           = state.natural_ids.data() + (size_t) token * n_used;
            const double *  probabilities = now.probabilities.data() + (size_t) token * n_experts;
            int             n_missing     = 0;
            for (int i = 0; i < n_used; i++) {
                all += probabilities[ids[i]];
                kept += shortlist[ids[i]] ? probabilities[ids[i]] : 0.0;
                n_missing += !shortlist[ids[i]];
            }
            n_outside += n_missing;
            if (n_missing > 0) {
                replace(state, token);
            }
        }
    }
    moeedge_budget_layer & sums = state.sums;
    sums.batches++;
    sums.unique_natural += n_natural;
    const int64_t n_unique = is_over ? count_unique(state.ids) : n_natural;
    sums.unique += n_unique;
    sums.kept += all > 0.0 ? kept / all : 1.0;
    sums.unique_max = std::max(sums.unique_max, n_unique);
    if (is_capturing) {
        state.values    = now.values;
        state.selection = now.selection;
    }
    if (n_outside == 0) {
        return;
    }
    if (truncates(state)) {
        state.sorted = sorted; // the weights of the natural experts are computed first
        return;
    }
    sums.substituted += coverage == MOEEDGE_BUDGET_COVERAGE_TRUNCATION;
    write_ids(state, sorted);
}

// The final weights of the selected experts are there: those outside the shortlist get weight 0, and experts of the shortlist
// that the token does not use stand in for them, so that none outside is loaded.
void expert_budget::truncate(layer_state & state, ggml_tensor * weights) {
    ggml_tensor * sorted = state.sorted;
    state.sorted         = nullptr;
    if (ggml_nelements(weights) != (int64_t) state.ids.size()) {
        return;
    }
    std::vector<float> values(state.ids.size());
    ggml_backend_tensor_get(weights, values.data(), 0, values.size() * sizeof(float));
    for (size_t i = 0; i < values.size(); i++) {
        if (state.ids[i] != state.natural_ids[i]) {
            values[i] = 0.0f;
        }
    }
    ggml_backend_tensor_set(weights, values.data(), 0, values.size() * sizeof(float));
    write_ids(state, sorted);
}

void expert_budget::write_ids(const layer_state & state, ggml_tensor * sorted) {
    const int n_used = state.n_used;
    for (int token = 0; token < now.n_tokens; token++) {
        std::copy_n(state.ids.begin() + (size_t) token * n_used, n_used, now.sorted.begin() + (size_t) token * n_experts);
    }
    ggml_backend_tensor_set(sorted, now.sorted.data(), 0, now.sorted.size() * sizeof(int32_t));
}

} // namespace moeedge

// the C interface

struct moeedge_budget : moeedge::expert_budget {
    using expert_budget::expert_budget;
};

using moeedge::fail;
using moeedge::guarded;

extern "C" {

moeedge_budget * moeedge_budget_create(int n_layers, int n_experts, const int32_t * n_used) {
    return moeedge::make_hook<moeedge_budget>(n_layers, n_experts, n_used);
}

void moeedge_budget_destroy(moeedge_budget * budget) {
    delete budget;
}

bool moeedge_budget_on_node(ggml_tensor * node, bool ask, void * budget) {
    return moeedge::call_hook<moeedge_budget>(node, ask, budget);
}

int moeedge_budget_configure(moeedge_budget * budget, const moeedge_budget_config * config) {
    return guarded([&]() -> int {
        const int status = budget && config ? budget->configure(*config) : MOEEDGE_STATUS_BAD_ARGUMENT;
        return status == MOEEDGE_STATUS_OK ? status : fail(status, "The expert budget is not valid for this model.");
    });
}

int moeedge_budget_set_active(moeedge_budget * budget, int on) {
    return guarded([&] { budget->set_active(on != 0); });
}

int moeedge_budget_read(moeedge_budget * budget, moeedge_budget_layer * out) {
    return guarded([&] { budget->read(out); });
}

int moeedge_budget_set_capture(moeedge_budget * budget, int on) {
    return guarded([&] { budget->set_capture(on != 0); });
}

int moeedge_budget_get_routing(moeedge_budget * budget, int layer, moeedge_budget_routing * out) {
    return guarded([&]() -> int { return budget->get_routing(layer, *out) ? MOEEDGE_STATUS_OK : MOEEDGE_STATUS_BAD_ARGUMENT; });
}

} // extern "C"
