// Graph compute: runs the graphs that llama.cpp hands to our backend, reads the routing of their MoE blocks, and gives the
// blocks that have experts on a device to the hybrid executor.

#include "backend-instance.h"
#include "ggml-impl.h"
#include "timing.h"

namespace moeedge {

// Where blocks are computed apart (an expert cache, a hook), ids and weights of small batches are read after the graph: the
// allocator then keeps those of all layers, which spreads the activations of a large batch over more memory than the caches hold
// (3.5 % of prefill).
static constexpr int64_t n_tokens_kept = 32;

// a step has two graphs per layer where a GPU computes the rest; llama.cpp keeps few batch sizes at a time
static constexpr size_t n_parsed_max = 1024;

static bool is_small_batch(const std::vector<moe_block> & blocks) {
    return blocks.empty() || blocks.front().ids->ne[1] <= n_tokens_kept;
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
    // llama.cpp reuses the graph, also when a cache was detached and attached again
    self->needs_ids = self->needs_ids || self->hybrid || self->from_ram || self->hook || self->pairs;
    self->keeps_ids = self->needs_ids && self->sensor;
    if (!self->keeps_ids) {
        return;
    }
    std::vector<moe_block> blocks;
    find_blocks(graph, blocks);
    if (!is_small_batch(blocks)) {
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
    const int64_t begin_ns = now_ns();
    self->sensor->observe(block.layer, self->phase, block.ids, block.weights);
    self->n_blocks++;
    self->sense_ns += now_ns() - begin_ns;
}

// the entire graph on the CPU, its blocks read meanwhile
static enum ggml_status compute_whole(instance * self, const parsed_graph & parsed, ggml_cgraph * graph) {
    const routing_reads reads = { parsed.blocks, [self](const moe_block & block) { sense_block(self, block); } };
    return self->matmuls.compute(self->cpu, graph, self->sensor ? &reads : nullptr);
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
static void call_hook(instance * self, const ggml_cgraph * graph, const moe_block * block, const router_input * input) {
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
        about.ids      = self->hook_ids.data();
        self->hooked   = graph;
        self->i_hooked = block->i_first;
    }
    self->hook(self->hook_user, &about);
    self->hooked = nullptr;
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
    bool is_hybrid;        // the device's executor gets the blocks
    bool is_from_ram;      // experts are in slots in host memory
    bool has_hook;         // the hook is called before each block
    bool sense_here;       // ids do not outlive the block
    bool skips_unweighted; // pairs without weight are not computed
};

// whether the experts of a large block pass through the device
static bool is_streamed(const instance * self, const placed_chain & placed) {
    return placed.chain.n_tokens() >= self->cache->prefill_tokens_min.load(std::memory_order_relaxed) &&
           self->cache->prefill_path.load(std::memory_order_relaxed) == MOEEDGE_PREFILL_PATH_STREAM;
}

static bool is_for_device(const instance * self, const placed_chain & placed) {
    return placed.group >= 0 && !self->cache->is_lost() &&
           (is_streamed(self, placed) || self->cache->has_resident(placed.chain.layer));
}

// Computes the block or a part of it on the device; counts it as missed where nothing of it is there.
static block_outcome compute_on_device(instance * self, const placed_chain & placed, bool skips_unweighted) {
    if (is_for_device(self, placed)) {
        return is_streamed(self, placed) ? self->hybrid->compute_streamed(placed, self->phase, skips_unweighted) :
                                           self->hybrid->compute(placed, self->phase, skips_unweighted);
    }
    if (placed.group >= 0) {
        self->hybrid->record_cpu_block(placed.chain, self->phase);
    }
    return BLOCK_NOT_COMPUTED;
}

// Gives a block to the executors in turn until one takes it; BLOCK_ABORTED: `status` says why.
static block_outcome compute_block(instance * self, const placed_chain & placed, const graph_paths & paths, enum ggml_status & status) {
    block_outcome outcome = paths.is_hybrid ? compute_on_device(self, placed, paths.skips_unweighted) : BLOCK_NOT_COMPUTED;
    if (outcome != BLOCK_NOT_COMPUTED) {
        status = self->hybrid->status();
    } else if (paths.is_from_ram && !placed.ram_tables.empty()) {
        outcome = self->from_ram->compute(placed, self->phase, paths.skips_unweighted);
        status  = self->from_ram->status();
    } else if (paths.skips_unweighted && placed.sum.is_complete()) {
        outcome = self->pairs->compute_weighted(placed);
        status  = self->pairs->status();
    }
    return outcome;
}

// whether the graph is to be stopped before the block
static bool needs_stop(const instance * self, const placed_chain * placed, const graph_paths & paths) {
    if (paths.has_hook || paths.sense_here) {
        return true;
    }
    return placed && ((paths.is_hybrid && is_for_device(self, *placed)) || (paths.is_from_ram && !placed->ram_tables.empty()) ||
                      (paths.skips_unweighted && placed->sum.is_complete()));
}

// Stops the graph before the experts of each block that needs it, reads its routing, calls the hook, gives the block to the
// executors and continues after it. The selected experts' ids and the router's input are in host memory there.
static enum ggml_status compute_in_parts(instance * self, const parsed_graph & parsed, const ggml_cgraph * graph,
                                         const graph_paths & paths) {
    int i_from = 0; // the nodes before it are computed
    self->is_counted.assign(parsed.blocks.size(), false);
    for (size_t b = 0; b < parsed.blocks.size(); b++) {
        const moe_block &    block  = parsed.blocks[b];
        const placed_chain * placed = parsed.placed.empty() ? nullptr : &parsed.placed[b];
        if (!needs_stop(self, placed, paths)) {
            continue;
        }
        enum ggml_status status = compute_part(self, graph, i_from, block.i_first);
        if (status != GGML_STATUS_SUCCESS) {
            return status;
        }
        i_from = block.i_first;
        if (paths.sense_here) {
            sense_block(self, block);
        }
        if (paths.has_hook) {
            call_hook(self, graph, &block, input_of(parsed, block));
        }
        if (placed == nullptr) {
            continue;
        }
        self->is_counted[b] = true;
        switch (compute_block(self, *placed, paths, status)) {
            case BLOCK_NOT_COMPUTED: break;
            case BLOCK_DONE:         i_from = placed->chain.i_end; break;
            case BLOCK_SUMMED:       i_from = placed->sum.i_end; break;
            case BLOCK_ABORTED:      return status;
        }
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
    for (int i = 0; i < parsed.blocks.front().i_first; i++) {
        if (!is_view(graph->nodes[i])) {
            return BLOCK_NOT_COMPUTED;
        }
    }
    const block_sources sources = find_sources(self->arriving, placed.chain, placed.sum);
    if (!self->hybrid->can_launch_ahead(placed, sources) || !self->cache->has_resident(placed.chain.layer)) {
        return BLOCK_NOT_COMPUTED;
    }
    self->is_counted.assign(1, true);
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
        call_hook(self, graph, nullptr, &found);
    }
    return compute_part(self, graph, i_from, graph->n_nodes);
}

// counts the blocks before which the graph was not stopped as missed
static void record_cpu_blocks(instance * self, const parsed_graph & parsed) {
    for (size_t b = 0; b < parsed.placed.size(); b++) {
        if (parsed.placed[b].group >= 0 && !self->is_counted[b]) {
            self->hybrid->record_cpu_block(parsed.placed[b].chain, self->phase);
        }
    }
}

static enum ggml_status compute_and_sense(instance * self, ggml_cgraph * graph) {
    int64_t              begin_ns       = now_ns();
    const parsed_graph & parsed         = parse_graph(self, graph);
    const bool           is_small_graph = is_small_batch(parsed.blocks);
    const bool           is_kept        = is_small_graph && self->keeps_ids; // ids outlive their blocks
    const bool           no_device      = !self->hybrid || self->cache->is_lost();
    // prompts of any length take the path that was measured for them; splitting pays off for decoding only
    const bool is_prompt = self->phase == MOEEDGE_PHASE_PREFILL ||
                           (self->hybrid && !parsed.blocks.empty() &&
                            parsed.blocks.front().ids->ne[1] >= self->cache->prefill_tokens_min.load());
    const bool is_hybrid = !no_device && !parsed.blocks.empty() &&
                           (!is_prompt || self->cache->prefill_path.load() != MOEEDGE_PREFILL_PATH_CPU);
    const bool skips_unweighted = self->pairs && self->phase == MOEEDGE_PHASE_VERIFY && is_small_graph && !parsed.blocks.empty();
    const bool has_hook = self->hook && self->phase != MOEEDGE_PHASE_PREFILL && is_small(parsed.inputs);
    self->sense_ns += now_ns() - begin_ns;
    const bool          may_be_ahead = is_hybrid && is_kept && !has_hook;
    const block_outcome ahead        = may_be_ahead ? compute_ahead(self, parsed, graph) : BLOCK_NOT_COMPUTED;
    wait_for_inputs(self); // they are there if the block was computed
    // a forked process has none of the threads that load experts: it computes them from the mapped file
    const bool is_from_ram = self->from_ram && !parsed.blocks.empty() && !self->ram->is_lost();
    const bool is_whole    = !is_hybrid && !is_from_ram && !has_hook && !skips_unweighted;
    // reads the blocks here, or leaves them to be read after the graph
    const graph_paths paths = { is_hybrid, is_from_ram, has_hook, /* .sense_here = */ !is_kept, skips_unweighted };
    enum ggml_status  status;
    if (ahead == BLOCK_ABORTED) {
        status = self->hybrid->status();
    } else if (ahead == BLOCK_SUMMED) {
        status = compute_part(self, graph, parsed.placed.front().sum.i_end, graph->n_nodes);
    } else if (has_hook && parsed.blocks.empty()) {
        status = compute_dense_in_parts(self, parsed, graph);
    } else if (is_whole) {
        status = compute_whole(self, parsed, graph);
    } else {
        status = compute_in_parts(self, parsed, graph, paths);
    }
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    if (is_kept && !is_whole) {
        for (const moe_block & block : parsed.blocks) {
            sense_block(self, block);
        }
    }
    begin_ns = now_ns();
    if (self->capture && is_small(parsed.inputs)) {
        for (const router_input & found : parsed.inputs) {
            self->capture->take(found);
        }
    }
    if (is_hybrid && is_kept) {
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

} // namespace moeedge
