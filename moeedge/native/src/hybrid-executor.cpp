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

// a batch with so many pairs per expert leaves few experts out
static constexpr size_t likely_pairs = 4;

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

// Streaming prefill: the experts that a large batch needs and that have no slot pass through the staging slots; one half of
// them is computed while the other half is being written.

void hybrid_executor::add_expert(stream_chunk & chunk, int32_t expert) const {
    chunk.slots.push_back(chunk.half * (cache->n_stage / 2) + (int) chunk.experts.size());
    chunk.experts.push_back(expert);
}

// Cuts the pairs whose expert has no slot into chunks of half the staging slots, by expert. The first chunk is the one that is
// being staged already.
void hybrid_executor::cut_chunks(std::vector<stream_chunk> & chunks) {
    const size_t per_chunk = (size_t) cache->n_stage / 2;
    index_list   missing;
    if (next.layer >= 0) {
        chunks.push_back(std::move(next.chunk));
    }
    for (size_t p = 0; p < slots.size(); p++) {
        if (slots[p] != expert_cache::not_resident) {
            continue;
        }
        const auto begun = chunks.empty() ? index_list::const_iterator() : std::find(chunks[0].experts.begin(), chunks[0].experts.end(), experts[p]);
        if (!chunks.empty() && begun != chunks[0].experts.end()) {
            slots[p] = chunks[0].slots[begun - chunks[0].experts.begin()];
            chunks[0].pairs.push_back((int32_t) p);
        } else {
            missing.push_back((int32_t) p);
        }
    }
    sort_by_expert(missing);
    if (!chunks.empty()) {
        sort_by_expert(chunks[0].pairs);
    }
    int32_t last = -1; // expert
    for (const int32_t p : missing) {
        if (experts[p] != last) {
            if (last < 0 || chunks.back().experts.size() == per_chunk) {
                const int half = chunks.empty() ? 0 : 1 - chunks.back().half;
                chunks.emplace_back();
                chunks.back().half = half;
            }
            add_expert(chunks.back(), experts[p]);
            last = experts[p];
        }
        chunks.back().pairs.push_back(p);
        slots[p] = chunks.back().slots.back();
    }
}

std::future<bool> hybrid_executor::stage(int layer, const stream_chunk & chunk, const stop_flag & stops) {
    return std::async(std::launch::async | std::launch::deferred, [this, layer, stops, asked = chunk] {
        return cache->stage(layer, asked.experts, asked.slots, stops);
    });
}

// Starts to stage experts of a layer that has not begun: a large batch needs almost all of them.
void hybrid_executor::stage_next(int layer, int half) {
    next.layer = -1;
    if (cache->group_of(layer) < 0 || experts.size() < likely_pairs * all_experts.size()) {
        return;
    }
    all_slots.resize(all_experts.size());
    cache->acquire(layer, all_experts.data(), (int) all_experts.size(), all_slots.data());
    cache->release(layer, all_slots.data(), (int) all_slots.size());
    next.chunk      = {};
    next.chunk.half = half;
    for (size_t e = 0; e < all_experts.size() && (int) next.chunk.experts.size() < cache->n_stage / 2; e++) {
        if (all_slots[e] == expert_cache::not_resident) {
            add_expert(next.chunk, (int32_t) e);
        }
    }
    if (!next.chunk.experts.empty()) {
        next.layer  = layer;
        next.stops  = std::make_shared<std::atomic<bool>>(false);
        next.staged = stage(layer, next.chunk, next.stops);
    }
}

// waits for experts that are being staged; false: they are not, or the computation is to stop
bool hybrid_executor::wait_staged(std::future<bool> & staged, const stop_flag & stops) {
    while (!*stops && staged.wait_for(residency_table::stop_interval) == std::future_status::timeout) {
        *stops = from_ram && from_ram->should_stop && from_ram->should_stop();
    }
    return staged.get();
}

// appends sorted pairs in pieces that the device takes at once; returns how many pieces
size_t hybrid_executor::cut_pieces(const index_list & pairs, streamed_block::pieces & all) const {
    const size_t n_before = all.size();
    for (size_t from = 0, to = 0; from < pairs.size(); from = to) {
        to = piece_end(pairs, from);
        all.emplace_back(pairs.begin() + (ptrdiff_t) from, pairs.begin() + (ptrdiff_t) to);
    }
    return all.size() - n_before;
}

bool hybrid_executor::stream_pieces(const placed_chain & placed, const table_list & tables, size_t n) {
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++) {
        ok = streamed->compute(placed, tables);
    }
    return ok;
}

// forgets experts that are being staged for a block that did not come
void hybrid_executor::drop_next() {
    if (next.staged.valid()) {
        *next.stops = true;
        next.staged.wait();
        next.staged = {};
    }
    next.layer = -1;
}

// Computes the chunks while the next one is being staged; false: the device or the file failed, or the computation is to stop
bool hybrid_executor::stream_chunks(const placed_chain & placed, const std::vector<stream_chunk> & chunks,
                                    const std::vector<size_t> & n_pieces, moeedge_block_record & record) {
    const int         layer    = placed.chain.layer;
    const bool        is_begun = next.staged.valid(); // the first chunk's staging
    const stop_flag   stops    = is_begun ? next.stops : std::make_shared<std::atomic<bool>>(false);
    std::future<bool> staged;
    if (!chunks.empty()) {
        staged = is_begun ? std::move(next.staged) : stage(layer, chunks[0], stops);
    }
    next.layer = -1;
    bool ok    = stream_pieces(placed, placed.device_tables, n_pieces[0]);
    for (size_t c = 0; ok && c < chunks.size(); c++) {
        const int64_t begin_ns = now_ns();
        ok                     = wait_staged(staged, stops) && streamed->wait(); // the other half's slots are free now
        record.wait_ns += now_ns() - begin_ns;
        if (*stops || !ok) {
            break;
        }
        if (c + 1 < chunks.size()) {
            staged = stage(layer, chunks[c + 1], stops);
        } else {
            stage_next(layer + 1, 1 - chunks[c].half);
        }
        ok = stream_pieces(placed, placed.stage_tables, n_pieces[c + 1]);
    }
    if (*stops) {
        last_status = GGML_STATUS_ABORTED;
        ok          = false;
    } else if (ok && chunks.empty()) {
        stage_next(layer + 1, 0);
    }
    *stops = true; // after a failure the next chunk is being staged, which is waited for
    const int64_t begin_ns = now_ns();
    ok                     = streamed->finish(placed, ok) && ok;
    record.device_ns += now_ns() - begin_ns;
    return ok;
}

// BLOCK_NOT_COMPUTED: its graph's own nodes compute it, on the CPU
block_outcome hybrid_executor::compute_streamed(const placed_chain & placed, int phase, bool skips_unweighted) {
    const bool is_staged = cache->n_stage >= 2 && !cache->device().is_remote(); // a worker's socket carries one transfer at a time
    if (!is_staged || skips_unweighted || !streamed_block::takes(placed)) {
        return compute(placed, phase, skips_unweighted);
    }
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ false);
    read_weights(placed.sum.weights);
    last_status = GGML_STATUS_SUCCESS;
    slots.resize(experts.size());
    index_list pinned(experts.size());
    cache->acquire(chain.layer, experts.data(), (int) experts.size(), pinned.data());
    pin_guard pins(*cache, chain.layer, pinned, until_idle);
    slots = pinned; // cut_chunks adds the staging slots
    on_device.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        if (slots[p] != expert_cache::not_resident) {
            on_device.push_back((int32_t) p);
        }
    }
    sort_by_expert(on_device);
    if (next.layer != chain.layer) {
        drop_next(); // of a batch that was stopped
    }
    std::vector<stream_chunk> chunks;
    cut_chunks(chunks);
    streamed_block::pieces pieces;
    std::vector<size_t>    n_pieces = { cut_pieces(on_device, pieces) }; // of the experts with slots, and of each chunk
    for (const stream_chunk & chunk : chunks) {
        n_pieces.push_back(cut_pieces(chunk.pairs, pieces));
    }
    if (!streamed->start(placed, input_data, pieces, slots, weights)) {
        cache->records.add_unknown(); // the device cannot stream it, or has no memory for it
        drop_next();
        pins.release();
        return compute(placed, phase, skips_unweighted);
    }
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_STREAM);
    record.pairs_device         = (int32_t) slots.size();
    const bool ok               = stream_chunks(placed, chunks, n_pieces, record);
    pins.release();
    record.partition_ns = now_ns() - begin_ns - record.device_ns - record.wait_ns;
    if (!ok) {
        drop_next();
        record_cpu_block(chain, phase);
        return last_status == GGML_STATUS_ABORTED ? BLOCK_ABORTED : BLOCK_NOT_COMPUTED;
    }
    cache->records.add(record);
    return BLOCK_SUMMED;
}

} // namespace moeedge
