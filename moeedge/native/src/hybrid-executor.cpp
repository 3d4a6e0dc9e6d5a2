#include "hybrid-executor.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

#include "ggml-impl.h"
#include "moe-blocks.h"
#include "timing.h"

namespace moeedge {

// while timing is on, one block in this many is timed alone; it costs the time in which its two parts would have run at once
static constexpr int64_t n_blocks_per_timing = 11;

// with more pairs a device's matrix-matrix kernels win
static constexpr size_t n_pairs_as_columns = 256;

hybrid_executor::hybrid_executor(std::shared_ptr<expert_cache> c, ggml_backend_t cpu_backend, ggml_backend_dev_t dev)
    : pair_columns(cpu_backend, dev), cache(std::move(c)), worker(std::make_shared<device_worker>(cache)),
      device_graphs(new subgraph_set(ggml_backend_get_device(cache->device().compute), cache->device().buft,
                                     [c = cache.get()](std::function<void()> work) { return c->run_on_device(std::move(work)); })) {
    if (cache->device().n_threads > 0) {
        cpu_part.reset(ggml_backend_dev_init(dev, nullptr));
        cpu = cpu_part.get();
    }
    ahead.reset(new ahead_launch(cache));
    streamed.reset(new streamed_block(cache));
    until_idle = [this] {
        worker->wait_idle();
        ahead->wait_idle();
        streamed->wait_idle();
    };
    all_experts.resize((size_t) cache->n_experts());
    std::iota(all_experts.begin(), all_experts.end(), 0);
    worker->start();
}

hybrid_executor::~hybrid_executor() {
    drop_next();
    worker->stop();
    try {
        // waits for the device to free the graphs' buffers; of a lost worker they are leaked
        cache->run_on_device([graphs = device_graphs.release(), launch = ahead.release(), blocks = streamed.release()] {
            delete graphs;
            delete launch;
            delete blocks;
        }, device_health::free_limit);
    } catch (const std::exception &) { // no memory for the thread that frees
    }
}

void hybrid_executor::set_n_threads(int n_threads) {
    if (cpu_part) {
        moeedge::set_n_threads(cpu_part.get(), std::max(1, n_threads - cache->device().n_threads));
    }
}

// Several tokens as one have an expert twice in a column of ids, and so have absent experts that share the zero slot. The
// matrix-vector kernels of quantized types take that; CUDA has none of those for other types, and its matrix-matrix kernels
// leave the second column unwritten.
static bool takes_experts_twice(const expert_chain & chain) {
    return std::all_of(chain.steps.begin(), chain.steps.end(), [](const chain_step & step) {
        return step.node->op != GGML_OP_MUL_MAT_ID || ggml_is_quantized(step.node->src[0]->type);
    });
}

int find_pools(const expert_cache & cache, const expert_chain & chain, table_list & pools) {
    const int group = chain.is_complete() ? cache.group_of(chain.layer) : -1;
    pools.clear();
    for (size_t i = 0; group >= 0 && i < chain.tables.size(); i++) {
        const expert_table & table = chain.tables[i];
        ggml_tensor *        pool  = cache.pool(group, table.role.c_str());
        const int64_t        width = ggml_nrows(table.tensor) == 1 ? 1 : table.tensor->ne[0]; // one row: a factor per expert
        if (pool == nullptr || pool->type != table.tensor->type || pool->ne[0] != width) {
            pools.clear();
            return -1;
        }
        pools.push_back(pool);
    }
    return group;
}

bool hybrid_executor::place(placed_chain & placed) const {
    placed.group = find_pools(*cache, placed.chain, placed.device_tables);
    if (placed.group < 0) {
        return false;
    }
    for (const expert_table & table : placed.chain.tables) {
        placed.stage_tables.push_back(cache->stage(placed.group, table.role.c_str()));
    }
    placed.takes_twice = takes_experts_twice(placed.chain);
    return true;
}

int hybrid_executor::count_unique(const index_list & pairs) {
    round++;
    int n = 0;
    for (const int32_t p : pairs) {
        const size_t e = experts[p];
        if (e >= seen.size()) {
            seen.resize(e + 1, 0);
        }
        n += seen[e] != round;
        seen[e] = round;
    }
    return n;
}

// columns_of_cpu for experts wherever they are in host memory; the input must have been kept if that is in slots
const float * hybrid_executor::columns_of_host(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record,
                                               const float * gathered) {
    if (!has_ram(placed)) {
        return columns_of_cpu(placed, pairs, record.cpu_ns, gathered);
    }
    moeedge_block_record ram    = {};
    const block_inputs   inputs = { experts, input_data, cpu, record.phase, cache.get(), record.unique_device };
    const float *        found  = from_ram->columns(placed, pairs, inputs, ram);
    last_status                 = from_ram->status();
    record.cpu_ns += ram.cpu_ns;
    load_ns += ram.wait_ns;
    return found;
}

// writes the pairs' columns to the chain's output; false: the backend stopped or failed
bool hybrid_executor::compute_on_cpu(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record,
                                     const float * gathered) {
    const float * found = columns_of_host(placed, pairs, record, gathered);
    if (found) {
        scatter(placed.chain, pairs, found);
    }
    return found != nullptr;
}

// starts the device on pairs whose slots, in `tables`, are pinned; false: it cannot take them
bool hybrid_executor::submit(const placed_chain & placed, const index_list & pairs, const table_list & tables) {
    const expert_chain & chain      = placed.chain;
    const bool           is_columns =
        placed.takes_twice && cache->device_path.load() != MOEEDGE_DEVICE_PATH_PAIRS && pairs.size() <= n_pairs_as_columns;
    const pair_layout    layout     = chain.n_tokens() == 1 ? LAYOUT_TOKEN : is_columns ? LAYOUT_COLUMNS : LAYOUT_PAIRS;
    subgraph *           sub        = device_graphs->get(chain, (int64_t) pairs.size(), layout, tables);
    float *              input      = nullptr;
    int32_t *            ids        = nullptr;
    if (sub == nullptr || !worker->prepare(*sub, input, ids)) {
        return false;
    }
    gather(chain, pairs, *sub, input);
    staged_input = input;
    for (size_t i = 0; i < pairs.size(); i++) {
        ids[i] = slots[pairs[i]];
    }
    worker->submit();
    return true;
}

// waits for the submitted pairs; their columns, null if the device is lost meanwhile
const float * hybrid_executor::columns_of_device(moeedge_block_record & record) {
    const int64_t begin_ns = now_ns();
    const float * found    = worker->wait();
    record.wait_ns += now_ns() - begin_ns;
    if (found == nullptr) {
        cache->mark_lost("it failed to compute");
        return nullptr;
    }
    record.device_ns += worker->busy_ns();
    return found;
}

// writes the submitted pairs' columns to the chain's output; if the device is lost meanwhile, the CPU computes them
bool hybrid_executor::finish(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record) {
    const float * found = columns_of_device(record);
    if (found == nullptr) {
        return compute_on_cpu(placed, pairs, record, staged_input);
    }
    scatter(placed.chain, pairs, found);
    return true;
}

// An asynchronous device is asked whether it is done after the CPU's part, which hides its own time. So calibration has it
// awaited first now and then: the wait of such blocks is the time that the device takes.
bool hybrid_executor::is_timed_alone() {
    return cache->is_timing.load() && cache->device().is_async && n_computed++ % n_blocks_per_timing == 0;
}

// Not stable_sort, here and in plans: GCC 12's calls a deprecated function of its own, which clang 19 warns of.
void hybrid_executor::sort_by_expert(index_list & pairs) const {
    std::sort(pairs.begin(), pairs.end(), [this](int32_t a, int32_t b) { return std::tie(experts[a], a) < std::tie(experts[b], b); });
}

// Sorts pairs that a device does not take at once, so that piece_end can keep an expert's together.
void hybrid_executor::sort_for_pieces(index_list & pairs) const {
    if (pairs.size() > n_pairs_max) {
        sort_by_expert(pairs);
    }
}

// The end of the piece that begins there. The rounding of an expert depends on how many pairs it has in a graph (kernel-choice.h):
// only one with more pairs than a piece is cut, and no part is so small that it is rounded otherwise.
size_t hybrid_executor::piece_end(const index_list & pairs, size_t begin) const {
    static_assert(n_pairs_max >= 2 * n_many_columns, "a cut expert has many columns in both parts");
    const size_t end = begin + n_pairs_max;
    if (end >= pairs.size()) {
        return pairs.size();
    }
    const auto is_same = [&](size_t i) { return i < pairs.size() && experts[pairs[i]] == experts[pairs[end]]; };
    size_t     first   = end; // of the expert's pairs
    while (first > begin && is_same(first - 1)) {
        first--;
    }
    return first > begin ? first : is_same(end + n_many_columns - 1) ? end : end - n_many_columns;
}

// Computes sorted pairs in pieces that a device takes at once; the CPU computes the pieces that it does not take. The input must
// have been kept, since the columns of a piece may overwrite it.
bool hybrid_executor::compute_on_device(const placed_chain & placed, const index_list & pairs, const table_list & tables,
                                        moeedge_block_record & record) {
    bool ok = true;
    for (size_t begin = 0, end = 0; ok && begin < pairs.size(); begin = end) {
        end = piece_end(pairs, begin);
        const index_list piece(pairs.begin() + begin, pairs.begin() + end);
        if (!cache->is_lost() && submit(placed, piece, tables)) {
            ok = finish(placed, piece, record);
            continue;
        }
        if (!cache->is_lost()) {
            cache->records.add_unknown(); // the device cannot compute it, or has no memory for it
        }
        ok = compute_on_cpu(placed, piece, record);
    }
    return ok;
}

// sorts the pairs by whether their expert has a slot, and counts them; skips_unweighted: those without weight are left out
void hybrid_executor::split_pairs(moeedge_block_record & record, bool skips_unweighted) {
    on_device.clear();
    on_cpu.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        if (skips_unweighted && weights[p] == 0.0f) {
            continue;
        }
        (slots[p] == expert_cache::not_resident ? on_cpu : on_device).push_back((int32_t) p);
    }
    record.pairs_device  = (int32_t) on_device.size();
    record.pairs_cpu     = (int32_t) on_cpu.size();
    record.unique_device = count_unique(on_device);
    record.unique_cpu    = count_unique(on_cpu);
}

block_outcome hybrid_executor::compute(const placed_chain & placed, int phase, bool skips_unweighted) {
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ experts.size() > n_pairs_max || has_ram(placed));
    load_ns = 0;
    slots.resize(experts.size());
    if (cache->acquire(chain.layer, experts.data(), (int) experts.size(), slots.data()) == 0) {
        record_cpu_block(chain, phase);
        return BLOCK_NOT_COMPUTED;
    }
    pin_guard            pins(*cache, chain.layer, slots, until_idle);
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_RESIDENT);
    skips_unweighted            = skips_unweighted && placed.sum.is_complete();
    if (skips_unweighted) {
        read_weights(placed.sum.weights);
    }
    split_pairs(record, skips_unweighted);
    if (on_device.empty()) { // none of the resident experts has weight
        pins.release();
        cache->records.add(record);
        return has_ram(placed) ? BLOCK_NOT_COMPUTED : compute_weighted(placed);
    }

    index_list later;
    sort_for_pieces(on_device);
    const size_t first_end = piece_end(on_device, 0);
    later.assign(on_device.begin() + (ptrdiff_t) first_end, on_device.end());
    on_device.resize(first_end);
    block_outcome result = BLOCK_NOT_COMPUTED;
    if (submit(placed, on_device, placed.device_tables)) {
        if (is_timed_alone()) {
            const int64_t wait_ns = now_ns();
            worker->wait();
            record.wait_ns += now_ns() - wait_ns;
        }
        const float * cpu_columns    = on_cpu.empty() ? nullptr : columns_of_host(placed, on_cpu, record);
        const float * device_columns = columns_of_device(record);
        bool          ok             = on_cpu.empty() || cpu_columns;
        if (ok && device_columns && later.empty() && sums_here(placed)) {
            column_of.assign(slots.size(), nullptr);
            name_columns(on_cpu, cpu_columns, chain.out->ne[0]);
            name_columns(on_device, device_columns, chain.out->ne[0]);
            if (!skips_unweighted) {
                read_weights(placed.sum.weights);
            }
            sum_columns(placed, nullptr);
            result = BLOCK_SUMMED;
        } else {
            if (skips_unweighted) {
                clear_unweighted(chain);
            }
            if (cpu_columns) {
                scatter(chain, on_cpu, cpu_columns);
            }
            if (device_columns) {
                scatter(chain, on_device, device_columns);
            } else {
                ok = ok && compute_on_cpu(placed, on_device, record, staged_input);
            }
            ok     = ok && compute_on_device(placed, later, placed.device_tables, record);
            result = ok ? BLOCK_DONE : BLOCK_ABORTED;
        }
    }
    pins.release();
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns - load_ns;
    if (result == BLOCK_DONE || result == BLOCK_SUMMED) {
        cache->records.add(record);
    } else if (result == BLOCK_NOT_COMPUTED) {
        cache->records.add_unknown(); // the device cannot compute it, or has no memory for it
        record_cpu_block(chain, phase);
    }
    return result;
}

bool hybrid_executor::can_launch_ahead(const placed_chain & placed, const block_sources & sources) const {
    return cache->device_path.load() == MOEEDGE_DEVICE_PATH_AHEAD && sources.is_complete() && placed.sum.is_complete() && placed.takes_twice &&
           placed.chain.input->ne[1] == 1 && placed.chain.n_tokens() <= ahead_launch::n_tokens_max &&
           ggml_backend_get_device(sources.backend) == cache->device().dev;
}

block_outcome hybrid_executor::compute_ahead(const placed_chain & placed, const block_sources & sources, int phase) {
    int64_t              begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    all_slots.resize(all_experts.size());
    if (cache->acquire(chain.layer, all_experts.data(), (int) all_experts.size(), all_slots.data()) == 0) {
        return BLOCK_NOT_COMPUTED;
    }
    pin_guard pins(*cache, chain.layer, all_slots, until_idle);
    if (!ahead->start(chain, placed.sum, placed.device_tables, placed.group, sources, all_slots)) {
        return BLOCK_NOT_COMPUTED;
    }
    int64_t started_ns = now_ns();
    ahead->wait_inputs();
    const int64_t arrived_ns = now_ns();

    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_RESIDENT);
    read_ids(chain.ids, experts);
    slots.resize(experts.size());
    for (size_t p = 0; p < experts.size(); p++) {
        slots[p] = all_slots[(size_t) experts[p]];
    }
    column_of.assign(slots.size(), nullptr);
    read_weights(placed.sum.weights);
    split_pairs(record, /* skips_unweighted = */ false);
    read_input(chain, /* keep = */ false);
    load_ns                   = 0;
    const float * cpu_columns = on_cpu.empty() ? nullptr : columns_of_host(placed, on_cpu, record);
    const int64_t wait_ns     = now_ns();
    const float * device_sum  = ahead->wait_sum();
    record.wait_ns            = now_ns() - wait_ns;
    record.device_ns          = ahead->busy_ns();
    pins.release();
    if (!on_cpu.empty() && cpu_columns == nullptr) {
        return BLOCK_ABORTED;
    }
    if (cpu_columns) {
        name_columns(on_cpu, cpu_columns, chain.out->ne[0]);
    }
    sum_columns(placed, device_sum);
    // the wait for the router is not ours: the host would wait for it in any case
    begin_ns += arrived_ns - started_ns;
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns - load_ns;
    cache->records.add(record);
    return BLOCK_SUMMED;
}

void hybrid_executor::record_cpu_block(const expert_chain & chain, int phase) {
    read_ids(chain.ids, experts);
    on_cpu.resize(experts.size());
    std::iota(on_cpu.begin(), on_cpu.end(), 0);
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_CPU);
    record.pairs_cpu            = (int32_t) on_cpu.size();
    record.unique_cpu           = count_unique(on_cpu);
    cache->records.add(record);
}

} // namespace moeedge
