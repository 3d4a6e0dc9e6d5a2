#include "ahead-launch.h"

#include <cstring>
#include <exception>

#include "ggml-alloc.h"
#include "timing.h"

namespace moeedge {

static const arriving_tensor * find_arriving(const std::vector<arriving_tensor> & arriving, const ggml_tensor * t) {
    for (auto found = arriving.rbegin(); found != arriving.rend(); ++found) {
        if (found->copy == t || found->copy == t->view_src) {
            return &*found;
        }
    }
    return nullptr;
}

block_sources find_sources(const std::vector<arriving_tensor> & arriving, const expert_chain & chain, const expert_sum & sum) {
    block_sources         sources;
    const ggml_tensor *   wanted[3] = { chain.input, chain.ids, sum.weights };
    block_sources::place * places[3] = { &sources.input, &sources.ids, &sources.weights };
    ggml_backend_t        from      = nullptr;
    for (int i = 0; i < 3; i++) {
        const arriving_tensor * found = find_arriving(arriving, wanted[i]);
        if (found == nullptr || (from != nullptr && found->from != from)) {
            return {};
        }
        from                = found->from;
        const size_t offset = (const char *) wanted[i]->data - (const char *) found->copy->data;
        *places[i]          = { (char *) found->source->data + offset, found->source->buffer };
        if (places[i]->buffer == nullptr && found->source->view_src) {
            places[i]->buffer = found->source->view_src->buffer;
        }
    }
    sources.backend = from;
    return sources;
}

ahead_launch::ahead_launch(std::shared_ptr<expert_cache> c)
    : cache(std::move(c)), n_experts(cache->n_experts()), staging(cache->device().staging_buft), output(cache->device().staging_buft) {}

ahead_launch::~ahead_launch() {
    wait_idle();
}

// The map, and behind it as many rows as a graph has tokens: the graphs read a layer's row through a view that repeats it for
// each token with a stride of zero, and ggml wants room for a view as if it had no such stride.
bool ahead_launch::allocate_map() {
    if (map != nullptr || is_refused) {
        return map != nullptr;
    }
    is_refused           = true;
    const int64_t n_rows = cache->n_layers() + n_tokens_max;
    arrived.reset(ggml_backend_event_new(cache->device().dev));
    sent_map             = (int32_t *) staging.reserve(sizeof(int32_t) * (size_t) (cache->n_layers() * n_experts + 1));
    map_ctx.reset(ggml_init({ ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    if (arrived == nullptr || sent_map == nullptr || map_ctx == nullptr) {
        return false;
    }
    ggml_tensor * rows = ggml_new_tensor_1d(map_ctx.get(), GGML_TYPE_I32, n_rows * n_experts);
    map_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(map_ctx.get(), cache->device().buft));
    if (map_buffer == nullptr) {
        return false;
    }
    std::memset(sent_map, 0xff, sizeof(int32_t) * (size_t) (cache->n_layers() * n_experts)); // nothing is sent yet
    map        = rows;
    is_refused = false;
    return true;
}

// a tensor with the layout of `like` in memory of llama.cpp's graph
static ggml_tensor * external(ggml_context * ctx, const ggml_tensor * like, const block_sources::place & at) {
    ggml_tensor * t = ggml_new_tensor(ctx, like->type, GGML_MAX_DIMS, like->ne);
    std::memcpy(t->nb, like->nb, sizeof(t->nb));
    t->data   = at.data;
    t->buffer = at.buffer;
    return t;
}

std::unique_ptr<ahead_launch::block_graph> ahead_launch::build(const expert_chain & chain, const expert_sum & sum,
                                                               const table_list & tables, const block_sources & sources) const {
    const int64_t n_used   = chain.n_used();
    const int64_t n_tokens = chain.n_tokens();
    const int64_t n_pairs  = n_used * n_tokens;
    // beside the chain: three sources, map, slots and their reshape, repeated input and its reshape, the columns' reshape,
    // the weighted ones, a view and an addition per place
    const size_t  n_tensors = chain_tensors_max(chain) + 12 + 2 * (size_t) n_used;

    auto built     = std::make_unique<block_graph>(n_tensors);
    built->input   = sources.input;
    built->ids     = sources.ids;
    built->weights = sources.weights;
    ggml_context * ctx     = built->ctx.get();
    ggml_tensor *  input   = external(ctx, chain.input, sources.input);
    ggml_tensor *  ids     = external(ctx, chain.ids, sources.ids);
    ggml_tensor *  weights = external(ctx, sum.weights, sources.weights);

    const size_t  row   = sizeof(int32_t) * (size_t) n_experts;
    ggml_tensor * table = ggml_view_3d(ctx, map, 1, n_experts, n_tokens, sizeof(int32_t), /* nb2 = */ 0, row * (size_t) chain.layer);
    ggml_tensor * slots = ggml_reshape_2d(ctx, ggml_get_rows(ctx, table, ids), n_pairs, 1);
    if (n_tokens > 1) {
        ggml_tensor * repeated = ggml_repeat_4d(ctx, input, input->ne[0], n_used, n_tokens, 1);
        input                  = ggml_reshape_3d(ctx, repeated, input->ne[0], n_pairs, 1);
    }
    std::vector<subgraph::table_use> uses;
    ggml_tensor * columns = build_chain(ctx, chain, tables, input, slots, uses);
    built->out            = build_weighted_sum(ctx, built->graph, columns, weights);
    built->is_supported   = supports_graph(cache->device().dev, built->graph);
    return built;
}

static bool is_same(const block_sources::place & a, const block_sources::place & b) {
    return a.data == b.data && a.buffer == b.buffer;
}

ahead_launch::block_graph * ahead_launch::get(const expert_chain & chain, const expert_sum & sum, const table_list & tables,
                                              const block_sources & sources) {
    const std::pair<int, int64_t> key   = { chain.layer, chain.n_tokens() };
    const auto                    known = graphs.find(key);
    // llama.cpp's graphs of one size keep their addresses, so that a graph is built once
    if (known != graphs.end() && is_same(known->second->input, sources.input) && is_same(known->second->ids, sources.ids) &&
        is_same(known->second->weights, sources.weights)) {
        return known->second.get();
    }
    std::unique_ptr<block_graph> built = build(chain, sum, tables, sources);
    // none of those in the old buffer runs, since the last one was awaited
    if (built->is_supported && !place_tensors(built->ctx.get(), buffer, cache->device().buft, [this] { graphs.clear(); })) {
        return nullptr;
    }
    return (graphs[key] = std::move(built)).get();
}

// sends the slots of a layer's experts if they differ from what the device has
void ahead_launch::send_map(int layer, int group, const std::vector<int32_t> & slots, ggml_backend_t to) {
    const int32_t zero_slot  = cache->zero_slot(group);
    int32_t *     row        = sent_map + (size_t) layer * (size_t) n_experts;
    bool          is_changed = false;
    for (int e = 0; e < n_experts; e++) {
        const int32_t slot = slots[(size_t) e] == expert_cache::not_resident ? zero_slot : slots[(size_t) e];
        is_changed |= row[e] != slot;
        row[e] = slot;
    }
    if (is_changed) {
        const size_t bytes = sizeof(int32_t) * (size_t) n_experts;
        ggml_backend_tensor_set_async(to, map, row, bytes * (size_t) layer, bytes);
        // Vulkan orders a copy to the device only behind what came before it; reading a value back orders what follows
        int32_t * unused = sent_map + (size_t) cache->n_layers() * (size_t) n_experts;
        ggml_backend_tensor_get_async(to, map, unused, bytes * (size_t) layer, sizeof(int32_t));
    }
}

bool ahead_launch::start(const expert_chain & chain, const expert_sum & sum, const table_list & tables, int group,
                         const block_sources & sources, const std::vector<int32_t> & slots) {
    if (!allocate_map()) {
        return false;
    }
    block_graph * built = get(chain, sum, tables, sources);
    if (built == nullptr || !built->is_supported) {
        return false;
    }
    output_data = output.reserve(ggml_nbytes(built->out));
    if (output_data == nullptr) {
        return false;
    }
    backend = sources.backend;
    ggml_backend_event_record(arrived.get(), backend);
    send_map(chain.layer, group, slots, backend);
    begin_ns   = now_ns();
    is_running = true;
    if (ggml_backend_graph_compute_async(backend, built->graph) != GGML_STATUS_SUCCESS) {
        wait_idle();
        return false;
    }
    ggml_backend_tensor_get_async(backend, built->out, output_data, 0, ggml_nbytes(built->out));
    return true;
}

void ahead_launch::wait_inputs() {
    ggml_backend_event_synchronize(arrived.get());
}

void ahead_launch::wait_idle() {
    if (!is_running) {
        return;
    }
    is_running = false;
    try {
        ggml_backend_synchronize(backend);
    } catch (const std::exception &) { // the device is lost: nothing runs on it any more
    }
}

const float * ahead_launch::wait_sum() {
    is_running = false;
    ggml_backend_synchronize(backend);
    device_ns = now_ns() - begin_ns;
    return (const float *) output_data;
}

} // namespace moeedge
