#include "streamed-block.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "ggml-alloc.h"

namespace moeedge {

enum index_part { PART_TOKEN, PART_SLOT, PART_COLUMN, n_parts };

// Vulkan's kernels want the ids of experts on such a boundary
static constexpr size_t n_aligned = 64;

streamed_block::streamed_block(std::shared_ptr<expert_cache> c)
    : cache(std::move(c)), backend(cache->device().compute), allocator(ggml_gallocr_new(cache->device().buft)),
      output(new host_buffer(cache->device().staging_buft)) {}

streamed_block::~streamed_block() {
    if (cache->is_lost()) {
        // their memory may still be in use
        output.release();
        allocator.release();
        buffer.release();
        ctx.release();
        return;
    }
    wait();
}

bool streamed_block::takes(const placed_chain & placed) {
    return placed.sum.is_complete() && placed.chain.input->ne[1] == 1;
}

// int32 [n] of the pairs from `begin` on
ggml_tensor * streamed_block::pick(ggml_context * of, int part, size_t begin, size_t n) const {
    return ggml_view_1d(of, indices, (int64_t) n, sizeof(int32_t) * ((size_t) (indices->ne[0] / n_parts) * (size_t) part + begin));
}

streamed_block::graph_ptr streamed_block::build_piece(const placed_chain & placed, const table_list & tables, size_t begin,
                                                      size_t n) const {
    graph_ptr                        built = std::make_unique<graph_memory>(chain_tensors_max(placed.chain) + 12);
    ggml_context *                   c     = built->ctx.get();
    std::vector<subgraph::table_use> uses;
    ggml_tensor * ids    = ggml_reshape_2d(c, pick(built->ctx.get(), PART_SLOT, begin, n), 1, (int64_t) n);
    ggml_tensor * tokens = ggml_get_rows(c, input, pick(built->ctx.get(), PART_TOKEN, begin, n));
    ggml_tensor * found  = build_chain(c, placed.chain, tables, ggml_reshape_3d(c, tokens, tokens->ne[0], 1, (int64_t) n), ids, uses);
    found                = ggml_reshape_2d(c, found, found->ne[0], (int64_t) n);
    ggml_build_forward_expand(built->graph, ggml_set_rows(c, columns, found, pick(built->ctx.get(), PART_COLUMN, begin, n)));
    return built;
}

streamed_block::graph_ptr streamed_block::build_sum(ggml_tensor *& sum) const {
    graph_ptr built = std::make_unique<graph_memory>(4 + 2 * (size_t) weights->ne[1]);
    sum             = build_weighted_sum(built->ctx.get(), built->graph, columns, weights);
    return built;
}

// room for the pairs with each piece aligned: there are at most as many as experts, and those that are cut
static size_t n_indices(int64_t n_pairs, size_t n_piece, int n_experts) {
    const size_t n_pieces = (size_t) n_experts + 2 * (size_t) n_pairs / n_piece + 2;
    return GGML_PAD((size_t) n_pairs, n_aligned) + n_pieces * n_aligned;
}

// false without memory, and after a failure of the device, which is lost then
bool streamed_block::guarded(const std::function<bool()> & work) try {
    return work();
} catch (const std::bad_alloc &) {
    return false;
} catch (const std::exception & error) { // a backend that throws
    cache->mark_lost(error.what());
    return false;
}

// room for the graphs of a chain of that shape
bool streamed_block::reserve(const placed_chain & placed, size_t n_piece) {
    const auto found = known.find(placed.chain.shape);
    if (found != known.end()) {
        return found->second;
    }
    const graph_ptr    piece  = build_piece(placed, placed.stage_tables, 0, n_piece);
    ggml_tensor *      sum    = nullptr;
    const graph_ptr    summed = build_sum(sum);
    ggml_backend_dev_t dev    = ggml_backend_get_device(backend);
    const bool         takes  = supports_graph(dev, piece->graph) && supports_graph(dev, summed->graph);
    if (takes && !(ggml_gallocr_reserve(allocator.get(), summed->graph) && ggml_gallocr_reserve(allocator.get(), piece->graph))) {
        return false; // memory may be free at the next call
    }
    return known[placed.chain.shape] = takes;
}

// memory for a block of these sizes; kept for the next one of the same
bool streamed_block::allocate(const placed_chain & placed, size_t n_piece) {
    const expert_chain &       chain   = placed.chain;
    const int64_t              n_pairs = chain.n_used() * chain.n_tokens();
    const std::vector<int64_t> wanted  = { chain.input->ne[0], chain.out->ne[0], chain.n_used(), chain.n_tokens(), (int64_t) n_piece };
    wait_idle();
    if (sizes_of == wanted) {
        return reserve(placed, n_piece);
    }
    sizes_of.clear();
    known.clear();
    buffer.reset();
    ctx.reset(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_context * c = ctx.get();
    input   = ggml_new_tensor_2d(c, GGML_TYPE_F32, chain.input->ne[0], chain.n_tokens());
    columns = ggml_new_tensor_2d(c, GGML_TYPE_F32, chain.out->ne[0], n_pairs);
    weights = ggml_new_tensor_3d(c, GGML_TYPE_F32, 1, chain.n_used(), chain.n_tokens());
    indices = ggml_new_tensor_1d(c, GGML_TYPE_I32, n_parts * (int64_t) n_indices(n_pairs, n_piece, cache->n_experts()));
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(c, cache->device().buft));
    if (!buffer) {
        return false;
    }
    sizes_of = wanted;
    return reserve(placed, n_piece);
}

void streamed_block::send(ggml_tensor * to, const void * data) {
    ggml_backend_tensor_set_async(backend, to, data, 0, ggml_nbytes(to));
}

bool streamed_block::start(const placed_chain & placed, const char * from, const pieces & all, const std::vector<int32_t> & slots,
                           const std::vector<float> & of_pairs) {
    return guarded([&] { return send_all(placed, from, all, slots, of_pairs); });
}

bool streamed_block::send_all(const placed_chain & placed, const char * from, const pieces & all, const std::vector<int32_t> & slots,
                              const std::vector<float> & of_pairs) {
    const expert_chain & chain = placed.chain;
    if (!allocate(placed, std::min(slots.size(), n_pairs_max))) {
        return false;
    }
    const size_t n = (size_t) indices->ne[0] / n_parts;
    sent_indices.assign(n_parts * n, 0);
    begins.clear();
    sizes.clear();
    n_computed = 0;
    size_t at  = 0;
    for (const std::vector<int32_t> & piece : all) {
        if (at + piece.size() > n) {
            return false;
        }
        begins.push_back(at);
        sizes.push_back(piece.size());
        for (size_t i = 0; i < piece.size(); i++) {
            sent_indices[PART_TOKEN * n + at + i]  = piece[i] / (int32_t) chain.n_used();
            sent_indices[PART_SLOT * n + at + i]   = slots[(size_t) piece[i]];
            sent_indices[PART_COLUMN * n + at + i] = piece[i];
        }
        at += GGML_PAD(piece.size(), n_aligned);
    }
    if (chain.input->nb[2] != input->nb[1]) {
        sent_input.resize(ggml_nbytes(input));
        for (int64_t t = 0; t < chain.n_tokens(); t++) {
            std::memcpy(sent_input.data() + (size_t) t * input->nb[1], from + (size_t) t * chain.input->nb[2], input->nb[1]);
        }
        from = sent_input.data();
    }
    send(input, from);
    send(indices, sent_indices.data());
    send(weights, of_pairs.data());
    return true;
}

bool streamed_block::queue(graph_ptr built) {
    if (!ggml_gallocr_alloc_graph(allocator.get(), built->graph)) {
        return false;
    }
    queued.push_back(std::move(built));
    if (ggml_backend_graph_compute_async(backend, queued.back()->graph) == GGML_STATUS_SUCCESS) {
        return true;
    }
    cache->mark_lost("it failed to compute");
    return false;
}

bool streamed_block::compute(const placed_chain & placed, const table_list & tables) {
    const size_t k = n_computed++;
    return guarded([&] { return queue(build_piece(placed, tables, begins[k], sizes[k])); });
}

bool streamed_block::wait() {
    return guarded([&] {
        ggml_backend_synchronize(backend);
        queued.clear();
        return !cache->is_lost();
    });
}

bool streamed_block::finish(const placed_chain & placed, bool is_complete) {
    const bool is_written = is_complete && guarded([&] { return write_sum(placed); });
    wait_idle();
    return is_written;
}

bool streamed_block::write_sum(const placed_chain & placed) {
    ggml_tensor * sum   = nullptr;
    graph_ptr     built = build_sum(sum);
    ggml_tensor * out   = placed.sum.out;
    void *        data  = output->reserve(ggml_nbytes(sum));
    if (data == nullptr || !queue(std::move(built))) {
        return false;
    }
    const size_t row_bytes = sum->nb[1];
    ggml_backend_tensor_get_async(backend, sum, data, 0, ggml_nbytes(sum));
    if (!wait()) { // frees the graph
        return false;
    }
    for (int64_t t = 0; t < out->ne[1]; t++) {
        std::memcpy((char *) out->data + (size_t) t * out->nb[1], (const char *) data + (size_t) t * row_bytes, row_bytes);
    }
    return true;
}

} // namespace moeedge
