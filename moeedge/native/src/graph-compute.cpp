#include "graph-compute.h"

#include <algorithm>

#include "backend-instance.h"
#include "ggml-impl.h"
#include "timing.h"

namespace moeedge {

// Small batches are read after the graph is done: no thread waits. The allocator must then keep ids and weights of all
// layers, which spreads the activations of a large batch over more memory than the caches hold (3.5 % of prefill). So large
// batches are read from inside the graph, by one node per block; the cost of its barrier is negligible there.
static constexpr int64_t n_tokens_read_after = 32;

// a step has two graphs per layer where a GPU computes the rest; llama.cpp keeps few batch sizes at a time
static constexpr size_t n_parsed_max = 1024;

static bool is_read_after(const std::vector<moe_block> & blocks) {
    return blocks.empty() || blocks.front().ids->ne[1] <= n_tokens_read_after;
}

static bool reads_inputs(const instance * self) {
    return self->capture || self->hook;
}

static bool is_small(const std::vector<router_input> & inputs) {
    return !inputs.empty() && inputs.front().n_tokens <= activation_capture::n_tokens_max;
}

void optimize_graph(instance * self, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    if (graph->n_nodes == 0) {
        return;
    }
    ggml_tensor * last = graph->nodes[graph->n_nodes - 1];
    if (reads_inputs(self)) {
        std::vector<router_input> inputs;
        find_router_inputs(graph, inputs);
        for (const router_input & found : is_small(inputs) ? inputs : std::vector<router_input>()) {
            params->add_alloc_dep(params->user_data, found.input, last);
            if (found.probs) {
                params->add_alloc_dep(params->user_data, found.probs, last);
            }
        }
    }
    std::vector<moe_block> blocks;
    if (self->sensor) {
        find_blocks(graph, blocks);
    }
    if (!is_read_after(blocks)) {
        return;
    }
    for (const moe_block & block : blocks) {
        params->add_alloc_dep(params->user_data, block.ids, last);
        if (block.weights) {
            params->add_alloc_dep(params->user_data, block.weights, last);
        }
    }
}

static void sense_block(instance * self, const moe_block & block) {
    if (!self->sensor) {
        return;
    }
    self->sensor->observe(block.layer, self->phase, block.ids, block.weights);
    self->n_blocks++;
}

// computed by the CPU backend's threads like any operation; the bytes are few enough for one thread
static void sense_block_node(ggml_tensor * dst, int ith, int nth, void * userdata) {
    if (ith == 0) {
        const int64_t           begin_ns = now_ns();
        const instance::probe * probe    = (const instance::probe *) userdata;
        sense_block(probe->self, *probe->block);
        probe->self->sense_ns += now_ns() - begin_ns;
    }
    GGML_UNUSED(dst);
    GGML_UNUSED(nth);
}

// a copy of the graph with a sensor node before each block's first expert matmul; uses and hashes stay the original's,
// so that the CPU backend fuses what it fuses in stock
static ggml_cgraph extend_graph(instance * self, const std::vector<moe_block> & blocks, const ggml_cgraph * graph) {
    const size_t n_blocks = blocks.size();
    self->arena.resize(std::max(self->arena.size(), (n_blocks + 1) * (ggml_tensor_overhead() + GGML_MEM_ALIGN)));
    ggml_context * ctx = ggml_init({ self->arena.size(), self->arena.data(), /* .no_alloc = */ true });

    self->probes.resize(n_blocks); // sized before pointers into it are taken
    self->nodes.clear();
    int i_from = 0;
    for (size_t b = 0; b < n_blocks; b++) {
        const moe_block & block = blocks[b];
        self->nodes.insert(self->nodes.end(), graph->nodes + i_from, graph->nodes + block.i_first);
        i_from = block.i_first;

        self->probes[b]      = { self, &block };
        ggml_tensor * args[] = { block.ids };
        ggml_tensor * node   = ggml_custom_4d(ctx, GGML_TYPE_I32, 1, 1, 1, 1, args, 1, sense_block_node, /* n_tasks = */ 1,
                                              &self->probes[b]);
        node->flags |= GGML_TENSOR_FLAG_COMPUTE;
        self->nodes.push_back(node);
    }
    self->nodes.insert(self->nodes.end(), graph->nodes + i_from, graph->nodes + graph->n_nodes);
    ggml_free(ctx); // frees the bookkeeping only: the nodes live in the arena

    ggml_cgraph extended = *graph;
    extended.nodes       = self->nodes.data();
    extended.n_nodes     = (int) self->nodes.size();
    extended.size        = extended.n_nodes;
    extended.uid         = 0;
    return extended;
}

// llama.cpp reuses graphs, so findings are kept by ggml's id of the graph (0: it has none)
static const parsed_graph & parse_graph(instance * self, const ggml_cgraph * graph) {
    const auto known = self->parsed.find(graph->uid);
    if (known != self->parsed.end() && graph->uid != 0) {
        return known->second;
    }
    parsed_graph found;
    find_blocks(graph, found.blocks);
    if (reads_inputs(self)) {
        find_router_inputs(graph, found.inputs);
    }
    if (self->hybrid || self->from_ram || self->pairs) {
        for (const moe_block & block : found.blocks) {
            placed_chain placed;
            placed.chain = find_chain(graph, block.i_first);
            placed.sum   = find_sum(graph, placed.chain);
            if (placed.sum.weights != block.weights) { // they are not computed before the block
                placed.sum = {};
            }
            for (const expert_table & table : placed.chain.tables) {
                placed.host_tables.push_back(table.tensor);
            }
            found.placed.push_back(std::move(placed));
            if (self->hybrid && !self->hybrid->place(found.placed.back())) {
                self->cache->records.add_unknown();
            }
            if (self->from_ram && !self->from_ram->place(found.placed.back())) {
                self->ram->records.add_unknown();
            }
        }
    }
    if (self->parsed.size() > n_parsed_max) {
        self->parsed.clear();
    }
    return self->parsed[graph->uid] = std::move(found);
}

// waits for the inputs whose copies are queued on a GPU
static void wait_for_inputs(instance * self) {
    ggml_backend_t waited = nullptr;
    for (const arriving_tensor & each : self->arriving) {
        if (each.from != waited) {
            ggml_backend_synchronize(each.from);
            waited = each.from;
        }
    }
    self->arriving.clear();
}

// nodes [begin, end) of the graph on the CPU
static enum ggml_status compute_part(instance * self, const ggml_cgraph * graph, int begin, int end) {
    if (begin == end) {
        return GGML_STATUS_SUCCESS;
    }
    ggml_cgraph part = *graph;
    part.nodes += begin;
    part.n_nodes = end - begin;
    part.uid     = 0;
    return self->matmuls.compute(self->cpu, &part);
}

// Calls the hook for the block (of a dense layer, if `block` is null) whose experts are computed next.
static void call_hook(instance * self, const moe_block * block, const router_input * input) {
    moeedge_block about = {};
    about.phase         = self->phase;
    about.layer         = block ? block->layer : input->layer;
    if (input) {
        about.n_tokens = (int32_t) input->n_tokens;
        about.n_embd   = (int32_t) input->input->ne[0];
        self->hook_input.resize(ggml_nelements(input->input));
        read_rows(input->input, input->n_tokens, input->stride, self->hook_input.data());
        about.input = self->hook_input.data();
    }
    if (block) {
        about.n_used   = (int32_t) block->ids->ne[0];
        about.n_tokens = (int32_t) block->ids->ne[1];
        read_ids(block->ids, self->hook_ids);
        about.ids = self->hook_ids.data();
    }
    self->hook(self->hook_user, &about);
}

static const router_input * input_of(const parsed_graph & parsed, const moe_block & block) {
    for (const router_input & found : parsed.inputs) {
        if (found.layer == block.layer && found.n_tokens == block.ids->ne[1]) {
            return &found;
        }
    }
    return nullptr;
}

// how a graph is computed
struct graph_paths {
    bool is_hybrid;  // the executor gets the blocks
    bool has_hook;   // the hook is called before each block
    bool sense_here; // ids do not outlive the block
    bool skips_unweighted; // pairs without weight are not computed
};

// Stops the graph before the experts of each block that needs it, calls the hook, gives the block to the executor and
// continues after it. The selected experts' ids and the router's input are in host memory there.
static enum ggml_status compute_in_parts(instance * self, const parsed_graph & parsed, const ggml_cgraph * graph,
                                         const graph_paths & paths) {
    hybrid_executor * hybrid    = paths.is_hybrid ? self->hybrid.get() : nullptr;
    const int         n_min     = hybrid ? self->cache->prefill_tokens_min.load(std::memory_order_relaxed) : 0;
    const bool        is_stream = hybrid && self->cache->prefill_path.load(std::memory_order_relaxed) == MOEEDGE_PREFILL_PATH_STREAM;
    int               i_from    = 0; // the nodes before it are computed
    self->is_split.assign(parsed.blocks.size(), false);
    for (size_t b = 0; b < parsed.blocks.size(); b++) {
        const moe_block &    block  = parsed.blocks[b];
        const placed_chain * placed = hybrid && parsed.placed[b].group >= 0 ? &parsed.placed[b] : nullptr;
        enum ggml_status     status = GGML_STATUS_SUCCESS;
        if (paths.has_hook) {
            status = compute_part(self, graph, i_from, block.i_first);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            i_from = block.i_first;
            self->hooked   = graph;
            self->i_hooked = block.i_first;
            call_hook(self, &block, input_of(parsed, block));
            self->hooked = nullptr;
        }
        const bool is_streamed = is_stream && placed && block.ids->ne[1] >= n_min;
        const bool is_split    = is_streamed || (placed && self->cache->has_resident(block.layer));
        self->is_split[b]      = is_split;
        if (!is_split && paths.skips_unweighted && parsed.placed[b].sum.is_complete()) {
            status = compute_part(self, graph, i_from, block.i_first);
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            i_from = block.i_first;
            switch (self->pairs->compute_weighted(parsed.placed[b])) {
                case BLOCK_DONE:    i_from = parsed.placed[b].chain.i_end; break;
                case BLOCK_ABORTED: return self->pairs->status();
                default:            break;
            }
            continue;
        }
        if (!is_split && !paths.sense_here) {
            continue;
        }
        status = compute_part(self, graph, i_from, block.i_first);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        i_from = block.i_first;
        if (paths.sense_here) {
            const int64_t begin_ns = now_ns();
            sense_block(self, block);
            if (!is_split && placed) {
                hybrid->record_cpu_block(placed->chain, self->phase); // its ids do not outlive the graph
            }
            self->sense_ns += now_ns() - begin_ns;
        }
        if (!is_split || self->cache->is_lost()) {
            continue;
        }
        switch (is_streamed ? hybrid->compute_streamed(*placed, self->phase) : hybrid->compute(*placed, self->phase)) {
            case BLOCK_NOT_COMPUTED: break;
            case BLOCK_DONE:         i_from = placed->chain.i_end; break;
            case BLOCK_SUMMED:       i_from = placed->sum.i_end; break;
            case BLOCK_ABORTED:      return hybrid->status();
        }
    }
    return compute_part(self, graph, i_from, graph->n_nodes);
}

// Computes what the executor of another device takes of a block, in front of the slots in host memory.
static block_outcome compute_on_device(instance * self, const placed_chain & placed, bool is_hybrid) {
    if (!is_hybrid || placed.group < 0 || self->cache->is_lost()) {
        return BLOCK_NOT_COMPUTED;
    }
    const bool is_large = placed.chain.n_tokens() >= self->cache->prefill_tokens_min.load(std::memory_order_relaxed);
    if (is_large && self->cache->prefill_path.load(std::memory_order_relaxed) == MOEEDGE_PREFILL_PATH_STREAM) {
        return self->hybrid->compute_streamed(placed, self->phase);
    }
    if (self->cache->has_resident(placed.chain.layer)) {
        return self->hybrid->compute(placed, self->phase);
    }
    self->hybrid->record_cpu_block(placed.chain, self->phase);
    return BLOCK_NOT_COMPUTED;
}

// Computes the graph with the experts of its blocks from slots in host memory, and from those of a device if there is one.
static enum ggml_status compute_from_ram(instance * self, const parsed_graph & parsed, const ggml_cgraph * graph, const graph_paths & paths) {
    int i_from = 0;
    self->is_split.assign(parsed.blocks.size(), true); // all are counted here
    for (size_t b = 0; b < parsed.blocks.size(); b++) {
        const moe_block &      block  = parsed.blocks[b];
        const placed_chain &   placed = parsed.placed[b];
        const enum ggml_status status = compute_part(self, graph, i_from, block.i_first);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        i_from = block.i_first;
        if (paths.sense_here) {
            const int64_t begin_ns = now_ns();
            sense_block(self, block);
            self->sense_ns += now_ns() - begin_ns;
        }
        if (paths.has_hook) {
            self->hooked   = graph;
            self->i_hooked = block.i_first;
            call_hook(self, &block, input_of(parsed, block));
            self->hooked = nullptr;
        }
        switch (compute_on_device(self, placed, paths.is_hybrid)) {
            case BLOCK_NOT_COMPUTED: break;
            case BLOCK_DONE:         i_from = placed.chain.i_end; continue;
            case BLOCK_SUMMED:       i_from = placed.sum.i_end; continue;
            case BLOCK_ABORTED:      return self->hybrid->status();
        }
        if (placed.ram_tables.empty()) {
            continue;
        }
        if (self->from_ram->compute(placed, self->phase, paths.skips_unweighted) == BLOCK_ABORTED) {
            return self->from_ram->status();
        }
        i_from = placed.chain.i_end;
    }
    return compute_part(self, graph, i_from, graph->n_nodes);
}

static bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

// Gives the executor a graph that consists of one block, while the block's inputs are on their way from the GPU that computed
// them. BLOCK_NOT_COMPUTED: the graph is not of that kind, or the executor does not take it.
static block_outcome compute_ahead(instance * self, const parsed_graph & parsed, const ggml_cgraph * graph) {
    if (self->arriving.empty() || parsed.blocks.size() != 1 || parsed.placed.front().group < 0 ||
        !parsed.placed.front().sum.is_complete()) {
        return BLOCK_NOT_COMPUTED;
    }
    const placed_chain & placed = parsed.placed.front();
    if (!placed.sum.is_complete()) {
        return BLOCK_NOT_COMPUTED;
    }
    for (int i = 0; i < parsed.blocks.front().i_first; i++) {
        if (!is_view(graph->nodes[i])) {
            return BLOCK_NOT_COMPUTED;
        }
    }
    const block_sources sources = find_sources(self->arriving, placed.chain, placed.sum);
    if (!self->hybrid->can_launch_ahead(placed, sources) || !self->cache->has_resident(placed.chain.layer)) {
        return BLOCK_NOT_COMPUTED;
    }
    self->is_split.assign(1, true);
    return self->hybrid->compute_ahead(placed, sources, self->phase);
}

// stops a dense model's graph before each FFN to call the hook
static enum ggml_status compute_dense_in_parts(instance * self, const parsed_graph & parsed, const ggml_cgraph * graph) {
    int i_from = 0;
    for (const router_input & found : parsed.inputs) {
        const enum ggml_status status = compute_part(self, graph, i_from, found.i_node);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        i_from = found.i_node;
        call_hook(self, nullptr, &found);
    }
    return compute_part(self, graph, i_from, graph->n_nodes);
}

// counts blocks that were not given to the executor as misses
static void record_cpu_blocks(instance * self, const parsed_graph & parsed) {
    for (size_t b = 0; b < parsed.placed.size(); b++) {
        if (parsed.placed[b].group >= 0 && !self->is_split[b]) {
            self->hybrid->record_cpu_block(parsed.placed[b].chain, self->phase);
        }
    }
}

static enum ggml_status compute_and_sense(instance * self, ggml_cgraph * graph) {
    int64_t              begin_ns  = now_ns();
    const parsed_graph & parsed    = parse_graph(self, graph);
    const bool           is_after  = is_read_after(parsed.blocks);
    const bool           no_device = !self->hybrid || self->cache->is_lost();
    // prompts of any length take the path that was measured for them; splitting pays off for decoding only
    const bool is_prompt = self->phase == MOEEDGE_PHASE_PREFILL ||
                           (self->hybrid && !parsed.blocks.empty() &&
                            parsed.blocks.front().ids->ne[1] >= self->cache->prefill_tokens_min.load());
    const bool is_hybrid = !no_device && !parsed.blocks.empty() &&
                           (!is_prompt || self->cache->prefill_path.load() != MOEEDGE_PREFILL_PATH_CPU);
    const bool skips_unweighted = self->pairs && self->phase == MOEEDGE_PHASE_VERIFY && is_after && !parsed.blocks.empty();
    const bool has_hook = self->hook && self->phase != MOEEDGE_PHASE_PREFILL && is_small(parsed.inputs);
    self->sense_ns += now_ns() - begin_ns;
    const bool          may_be_ahead = is_hybrid && is_after && !has_hook;
    const block_outcome ahead        = may_be_ahead ? compute_ahead(self, parsed, graph) : BLOCK_NOT_COMPUTED;
    wait_for_inputs(self); // they are there if the block was computed
    // a forked process has none of the threads that load experts: it computes them from the mapped file
    const bool is_from_ram = self->from_ram && !parsed.blocks.empty() && !self->ram->is_lost();
    if (!is_after && !is_hybrid && !is_from_ram) {
        ggml_cgraph extended = extend_graph(self, parsed.blocks, graph);
        return self->matmuls.compute(self->cpu, &extended);
    }
    enum ggml_status status;
    if (ahead == BLOCK_ABORTED) {
        status = self->hybrid->status();
    } else if (ahead == BLOCK_SUMMED) {
        status = compute_part(self, graph, parsed.placed.front().sum.i_end, graph->n_nodes);
    } else if (is_from_ram) {
        status = compute_from_ram(self, parsed, graph, { is_hybrid, has_hook, /* .sense_here = */ !is_after, skips_unweighted });
    } else if (has_hook && parsed.blocks.empty()) {
        status = compute_dense_in_parts(self, parsed, graph);
    } else if (has_hook || is_hybrid || skips_unweighted) {
        status = compute_in_parts(self, parsed, graph, { is_hybrid, has_hook, /* .sense_here = */ !is_after, skips_unweighted });
    } else {
        status = self->matmuls.compute(self->cpu, graph);
    }
    if (status != GGML_STATUS_SUCCESS || !is_after) {
        return status;
    }
    begin_ns = now_ns();
    for (const moe_block & block : parsed.blocks) {
        sense_block(self, block);
    }
    if (self->capture && is_small(parsed.inputs)) {
        for (const router_input & found : parsed.inputs) {
            self->capture->take(found);
        }
    }
    if (is_hybrid) {
        record_cpu_blocks(self, parsed);
    }
    self->sense_ns += now_ns() - begin_ns;
    return status;
}

enum ggml_status compute_graph(instance * self, ggml_cgraph * graph) {
    const int64_t    begin_ns = now_ns();
    enum ggml_status status;
    if (self->sensor || reads_inputs(self)) {
        status = compute_and_sense(self, graph);
    } else {
        wait_for_inputs(self);
        status = self->matmuls.compute(self->cpu, graph);
    }
    self->n_graphs++;
    self->compute_ns += now_ns() - begin_ns;
    return status;
}

static void set_ram(instance * self, std::shared_ptr<expert_cache> cache) {
    if (self->hybrid) {
        self->hybrid->set_ram(nullptr);
    }
    self->from_ram.reset();
    self->ram = std::move(cache);
    if (self->ram) {
        self->from_ram.reset(new ram_executor(self->ram, self->cpu, self->cpu_dev));
        self->from_ram->should_stop = [self] { return self->abort && self->abort(self->abort_data); };
    }
    if (self->hybrid) {
        self->hybrid->set_ram(self->from_ram.get());
    }
}

static void set_device_cache(instance * self, std::shared_ptr<expert_cache> cache) {
    if (self->cache && self->cache->is_foreign()) {
        self->hybrid.release(); // its threads and its device stayed in the process that forked this one
    }
    self->hybrid.reset();
    self->cache = std::move(cache);
    if (self->cache) {
        self->hybrid.reset(new hybrid_executor(self->cache, self->cpu, self->cpu_dev));
        self->hybrid->set_n_threads(self->n_threads);
        self->hybrid->set_ram(self->from_ram.get());
    }
}

void set_cache(instance * self, std::shared_ptr<expert_cache> cache) {
    self->parsed.clear(); // they name the old cache's pools
    cache->device().is_ram ? set_ram(self, std::move(cache)) : set_device_cache(self, std::move(cache));
}

void remove_cache(instance * self, const expert_cache * cache) {
    self->parsed.clear();
    if (cache && self->ram.get() == cache) {
        set_ram(self, nullptr);
    } else if (cache && self->cache.get() == cache) {
        set_device_cache(self, nullptr);
    }
}

} // namespace moeedge
