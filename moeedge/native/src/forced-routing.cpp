// Forced routing: replaces the experts that a model's routers select by given ones, in stock llama.cpp's graph as in ours, for
// measurements under recorded routing. llama.cpp computes a layer's router, then calls the hook, which rewrites the selected
// experts in place; llama.cpp's own nodes go on from there, so that the weights are those of the model's gate for these ids.

#include <algorithm>
#include <cfloat>
#include <vector>

#include "c-calls.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "router-nodes.h"

namespace moeedge {

class forced_routing {
  public:
    forced_routing(int n_layers, int n_experts, const int32_t * n_used, int n_ubatch); // n_used: of each layer

    int  set(const moeedge_routing_batch & batch); // moeedge_status
    void set_capture(bool on) { is_capturing = on; }
    const std::vector<int32_t> * captured(int layer) const;

    // the eval callback's two questions: whether the node is to be stopped at, and what to do there
    bool wants(const ggml_tensor * node);
    void take(ggml_tensor * node);

  private:
    void force(int layer, ggml_tensor * sorted);
    void keep_weights(const ggml_tensor * probs, const int32_t * ids, int n_used, int n_rows);

    const int                            n_layers, n_experts, n_ubatch;
    const std::vector<int32_t>           n_used;
    int                                  n_used_max = 0, n_expert_layers = 0;
    moeedge_routing_batch                now        = {};
    int                                  last_layer = -1; // of the batch that is being computed
    int                                  n_before = 0, n_ubatch_now = 0; // tokens of earlier micro-batches, and of this one
    bool                                 is_capturing = false, is_wrong = false;
    std::vector<const ggml_tensor *>     probs;   // of the graph that is being computed
    std::vector<std::vector<int32_t>>    ids_of;  // [n_layers] what the newest batch used, in the order of its tokens
    std::vector<int32_t>                 sorted_ids;
    std::vector<float>                   values;
};

forced_routing::forced_routing(int n, int n_exp, const int32_t * used, int ubatch) :
    n_layers(n), n_experts(n_exp), n_ubatch(ubatch), n_used(used, used + n), probs(n), ids_of(n) {
    n_used_max      = *std::max_element(n_used.begin(), n_used.end());
    n_expert_layers = (int) std::count_if(n_used.begin(), n_used.end(), [](int32_t k) { return k > 0; });
}

int forced_routing::set(const moeedge_routing_batch & batch) {
    if (batch.mode < MOEEDGE_ROUTING_OFF || batch.mode > MOEEDGE_ROUTING_FORCED || batch.n_tokens < 0 ||
        (batch.mode == MOEEDGE_ROUTING_FORCED && !batch.ids)) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    const size_t n_ids = batch.mode == MOEEDGE_ROUTING_FORCED ? (size_t) batch.n_tokens * n_layers * n_used_max : 0;
    if (!std::all_of(batch.ids, batch.ids + n_ids, [this](int32_t id) { return id >= 0 && id < n_experts; })) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    if (is_wrong) {
        is_wrong = false;
        return MOEEDGE_STATUS_FAILED;
    }
    now        = batch;
    last_layer = -1;
    n_before = n_ubatch_now = 0;
    for (std::vector<int32_t> & ids : ids_of) {
        ids.clear();
    }
    return MOEEDGE_STATUS_OK;
}

const std::vector<int32_t> * forced_routing::captured(int layer) const {
    return layer < 0 || layer >= n_layers ? nullptr : &ids_of[layer];
}

bool forced_routing::wants(const ggml_tensor * node) {
    int layer = -1;
    if (now.mode == MOEEDGE_ROUTING_OFF || !is_router_node(node)) {
        return false;
    }
    if (is_router_node(node, "probs-", n_layers, layer)) {
        probs[layer] = node;
        return false;
    }
    const bool is_sorted = is_router_node(node, "argsort-", n_layers, layer) && node->ne[0] == n_experts;
    return is_sorted || (is_capturing && is_router_node(node, "topk-", n_layers, layer));
}

void forced_routing::take(ggml_tensor * node) {
    int layer = -1;
    if (is_router_node(node, "argsort-", n_layers, layer)) {
        force(layer, node);
    } else if (is_router_node(node, "topk-", n_layers, layer)) {
        for (int64_t row = 0; row < node->ne[1]; row++) {
            sorted_ids.resize(node->ne[0]);
            ggml_backend_tensor_get(node, sorted_ids.data(), row * node->nb[1], node->ne[0] * sizeof(int32_t));
            ids_of[layer].insert(ids_of[layer].end(), sorted_ids.begin(), sorted_ids.end());
        }
    }
}

void forced_routing::force(int layer, ggml_tensor * sorted) {
    const int n_rows = (int) sorted->ne[1], k = n_used[layer];
    if (layer <= last_layer || last_layer < 0) { // another micro-batch, whose tokens all pass its first layer
        n_before += n_ubatch_now;
        n_ubatch_now = n_expert_layers > 1 ? n_rows : std::min(n_ubatch, now.n_tokens - n_before);
    }
    last_layer = layer;
    if (n_rows == 0 || k == 0) {
        return;
    }
    if (n_rows > n_ubatch_now || n_before + n_ubatch_now > now.n_tokens) {
        is_wrong = true;
        return;
    }
    sorted_ids.resize((size_t) n_rows * n_experts);
    ggml_backend_tensor_get(sorted, sorted_ids.data(), 0, sorted_ids.size() * sizeof(int32_t));
    if (now.mode == MOEEDGE_ROUTING_FORCED) {
        // the last layer computes only tokens with logits, which are the last ones
        const int first = n_before + n_ubatch_now - n_rows;
        for (int row = 0; row < n_rows; row++) {
            const int32_t * ids = now.ids + ((size_t) (first + row) * n_layers + layer) * n_used_max;
            std::copy_n(ids, k, sorted_ids.data() + (size_t) row * n_experts);
        }
        keep_weights(probs[layer], sorted_ids.data(), k, n_rows);
    }
    ggml_backend_tensor_set(sorted, sorted_ids.data(), 0, sorted_ids.size() * sizeof(int32_t));
}

// A forced expert's probability may have been rounded to 0, where a kernel could skip it.
void forced_routing::keep_weights(const ggml_tensor * t, const int32_t * ids, int n_first, int n_rows) {
    if (!t || router_kind(t) == MOEEDGE_ROUTER_LOGITS || t->ne[0] != n_experts || t->ne[1] != n_rows) {
        return;
    }
    values.resize((size_t) n_rows * n_experts);
    ggml_backend_tensor_get(t, values.data(), 0, values.size() * sizeof(float));
    bool has_zero = false;
    for (int row = 0; row < n_rows; row++) {
        for (int i = 0; i < n_first; i++) {
            float & value = values[(size_t) row * n_experts + ids[(size_t) row * n_experts + i]];
            if (!(value > 0.0f)) {
                value    = FLT_EPSILON;
                has_zero = true;
            }
        }
    }
    if (has_zero) {
        ggml_backend_tensor_set(const_cast<ggml_tensor *>(t), values.data(), 0, values.size() * sizeof(float));
    }
}

} // namespace moeedge

// the C interface

struct moeedge_routing : moeedge::forced_routing {
    using forced_routing::forced_routing;
};

using moeedge::fail;
using moeedge::guarded;

extern "C" {

moeedge_routing * moeedge_routing_create(int n_layers, int n_experts, const int32_t * n_used, int n_ubatch) {
    return n_ubatch <= 0 ? nullptr : moeedge::make_hook<moeedge_routing>(n_layers, n_experts, n_used, n_ubatch);
}

void moeedge_routing_destroy(moeedge_routing * routing) {
    delete routing;
}

bool moeedge_routing_on_node(ggml_tensor * node, bool ask, void * routing) {
    return moeedge::call_hook<moeedge_routing>(node, ask, routing);
}

int moeedge_routing_set(moeedge_routing * routing, const moeedge_routing_batch * batch) {
    return guarded([&]() -> int {
        const int status = routing && batch ? routing->set(*batch) : MOEEDGE_STATUS_BAD_ARGUMENT;
        if (status == MOEEDGE_STATUS_FAILED) {
            return fail(status, "The tokens of the last batch's micro-batches are not known: their routing was the model's own.");
        }
        return status == MOEEDGE_STATUS_OK ? status : fail(status, "The forced routing does not fit this model.");
    });
}

int moeedge_routing_set_capture(moeedge_routing * routing, int on) {
    return guarded([&] { routing->set_capture(on != 0); });
}

int64_t moeedge_routing_captured(moeedge_routing * routing, int layer, int32_t * out, int64_t n_max) {
    const std::vector<int32_t> * ids = routing->captured(layer);
    if (!ids || (int64_t) ids->size() > n_max) {
        return -1;
    }
    std::copy(ids->begin(), ids->end(), out);
    return (int64_t) ids->size();
}

} // extern "C"
