// Prefill through the device: the experts that a large batch needs and that have no slot pass through the staging slots,
// half of them computed while the other half is being written.

#include <algorithm>
#include <future>

#include "hybrid.h"
#include "timing.h"

namespace moeedge {

// pairs whose expert has no slot, by expert and in pieces of half the staging slots
void hybrid_executor::cut_chunks(const placed_chain & placed, std::vector<stream_chunk> & chunks) {
    const int per_chunk = cache->n_stage() / 2;
    index_list missing;
    for (size_t p = 0; p < slots.size(); p++) {
        if (slots[p] == expert_cache::not_resident) {
            missing.push_back((int32_t) p);
        }
    }
    std::stable_sort(missing.begin(), missing.end(), [this](int32_t a, int32_t b) { return experts[a] < experts[b]; });

    for (const int32_t p : missing) {
        const bool is_new = chunks.empty() || chunks.back().experts.back() != experts[p];
        if (is_new && (chunks.empty() || (int) chunks.back().experts.size() == per_chunk)) {
            chunks.emplace_back();
        }
        stream_chunk & chunk = chunks.back();
        if (is_new) {
            const int half = (int) (chunks.size() - 1) % 2;
            const int at   = half * per_chunk + (int) chunk.experts.size();
            chunk.experts.push_back(experts[p]);
            chunk.slots.push_back(cache->first_stage(placed.group) + at);
        }
        chunk.pairs.push_back(p);
        slots[p] = chunk.slots.back();
    }
}

bool hybrid_executor::stream_chunks(const placed_chain & placed, std::vector<stream_chunk> & chunks, moeedge_block_record & record) {
    auto stage = [this, layer = placed.chain.layer](const stream_chunk & chunk) {
        return cache->stage(layer, chunk.experts.data(), (int) chunk.experts.size(), chunk.slots.data());
    };
    std::future<bool> staged;
    if (!chunks.empty()) {
        staged = std::async(std::launch::async, stage, std::cref(chunks[0]));
    }
    bool ok = compute_on_device(placed, on_device, record);
    for (size_t c = 0; c < chunks.size(); c++) {
        const int64_t begin_ns = now_ns();
        const bool    is_there = staged.get();
        record.wait_ns += now_ns() - begin_ns;
        if (c + 1 < chunks.size()) {
            staged = std::async(std::launch::async, stage, std::cref(chunks[c + 1]));
        }
        const index_list & pairs = chunks[c].pairs;
        ok = ok && (is_there ? compute_on_device(placed, pairs, record) : compute_on_cpu(placed, pairs, record));
    }
    return ok;
}

hybrid_executor::outcome hybrid_executor::compute_streamed(const placed_chain & placed, int phase) {
    if (cache->n_stage() < 2 || (!cache->is_async() && !cache->is_host())) {
        return compute(placed, phase); // a remote worker's socket carries one thing at a time: nothing to overlap
    }
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_experts(chain);
    read_input(chain, /* keep = */ true);
    slots.resize(experts.size());
    cache->acquire(chain.layer, experts.data(), (int) experts.size(), slots.data());
    const index_list pinned = slots;
    on_device.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        if (slots[p] != expert_cache::not_resident) {
            on_device.push_back((int32_t) p);
        }
    }
    std::vector<stream_chunk> chunks;
    cut_chunks(placed, chunks);

    moeedge_block_record record = {};
    record.layer                = chain.layer;
    record.phase                = phase;
    record.path                 = MOEEDGE_PREFILL_STREAM;
    record.n_tokens             = (int32_t) chain.n_tokens();
    record.pairs_device         = (int32_t) slots.size();
    const bool ok               = stream_chunks(placed, chunks, record);
    cache->release(chain.layer, pinned.data(), (int) pinned.size());
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    if (!ok) {
        return outcome::aborted;
    }
    cache->record_block(record);
    return outcome::done;
}

} // namespace moeedge
