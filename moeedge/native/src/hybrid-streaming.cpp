// Streaming prefill: the experts that a large batch needs and that have no slot pass through the staging slots; one half of
// them is computed while the other half is being written.

#include <algorithm>

#include "hybrid-executor.h"
#include "timing.h"

namespace moeedge {

// a batch with so many pairs per expert leaves few experts out
static constexpr size_t likely_pairs = 4;

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
