#include "ram-executor.h"

#include <algorithm>
#include <numeric>

#include "ggml-impl.h"
#include "hybrid-executor.h"
#include "moe-blocks.h"
#include "timing.h"

namespace moeedge {

// Pairs that are computed together, about: their columns take a few ten MiB. An expert's pairs stay together, since its weights
// are read once then.
static constexpr size_t n_pairs_max = 2048;

// A batch that needs as large a share of a layer's experts is taken to need nearly all of every layer.
static constexpr double nearly_all = 0.75;

// Lets the experts of a block be evicted again, however the block ends.
class want_guard : no_copy {
  public:
    want_guard(residency_table & t, int block_layer, const std::vector<int32_t> & still_waiting, const float * shares)
        : table(t), layer(block_layer), waiting(still_waiting) {
        table.want(layer, waiting.data(), (int) waiting.size(), shares);
    }
    ~want_guard() { table.forget(layer, waiting.data(), (int) waiting.size()); }

  private:
    residency_table &            table;
    const int                    layer;
    const std::vector<int32_t> & waiting;
};

ram_executor::ram_executor(std::shared_ptr<expert_cache> c, ggml_backend_t cpu_backend, ggml_backend_dev_t dev)
    : pair_columns(cpu_backend, dev), cache(std::move(c)), own_cpu(cpu_backend), pairs_of((size_t) cache->n_experts()),
      all((size_t) cache->n_experts()) {
    std::iota(all.begin(), all.end(), 0);
}

ram_executor::~ram_executor() = default;

bool ram_executor::place(placed_chain & placed) const {
    return find_pools(*cache, placed.chain, placed.ram_tables) >= 0;
}

void ram_executor::add_pair(int32_t pair) {
    const int32_t expert = experts[(size_t) pair];
    index_list &  pairs  = pairs_of[(size_t) expert];
    if (pairs.empty()) {
        waiting.push_back(expert);
    }
    pairs.push_back(pair);
}

void ram_executor::forget_pairs() {
    waiting.clear();
    for (index_list & pairs : pairs_of) { // an exception may have left some
        pairs.clear();
    }
}

// groups the pairs by expert
void ram_executor::sort_pairs(bool skips_unweighted) {
    forget_pairs();
    for (size_t p = 0; p < experts.size(); p++) {
        if (skips_unweighted && weights[p] == 0.0f) {
            continue;
        }
        add_pair((int32_t) p);
    }
}

// the shares of the waiting experts, where the batch needs nearly all experts
void ram_executor::find_shares(int64_t n_tokens) {
    shares.clear();
    if ((double) waiting.size() + n_device < nearly_all * (double) pairs_of.size()) {
        return;
    }
    for (const int32_t expert : waiting) {
        shares.push_back((float) pairs_of[(size_t) expert].size() / (float) n_tokens);
    }
}

// Computes the pairs of the first n waiting experts in chunks, from their slots or from the mapped file. False: it was stopped.
bool ram_executor::compute_first(const placed_chain & placed, moeedge_block_record & record, size_t n, bool is_mapped) {
    for (size_t i = 0; i < n;) {
        chunk.clear();
        chunk_slots.clear();
        for (; i < n && (chunk.empty() || chunk.size() + pairs_of[(size_t) waiting[i]].size() <= n_pairs_max); i++) {
            const index_list & pairs = pairs_of[(size_t) waiting[i]];
            chunk.insert(chunk.end(), pairs.begin(), pairs.end());
            chunk_slots.insert(chunk_slots.end(), pairs.size(), found[i]);
        }
        const float * columns = is_mapped ? columns_of_cpu(placed, chunk, record.cpu_ns)
                                          : columns_of_slots(placed, chunk, chunk_slots, record.cpu_ns);
        if (columns == nullptr) {
            return false;
        }
        store(placed, columns);
    }
    return true;
}

// Computes the pairs of the waiting experts that are resident by now, and releases these experts; waits until there are some.
// If nothing can be loaded any more, the mapped file has the others. False: an expert cannot be read, or the computation was
// stopped.
bool ram_executor::compute_resident(const placed_chain & placed, moeedge_block_record & record, bool is_first) {
    const int     layer       = placed.chain.layer;
    const int64_t begin_ns    = now_ns();
    const int64_t begin_bytes = cache->bytes_read();
    found.resize(waiting.size());
    const int n_found = is_first ? cache->acquire(layer, waiting.data(), (int) waiting.size(), found.data())
                                 : cache->table().await(layer, waiting.data(), (int) waiting.size(), found.data(), should_stop);
    const bool is_mapped = n_found == residency_table::await_closed && cache->is_lost();
    if (!is_first) {
        record.wait_ns += now_ns() - begin_ns;
        record.wait_bytes += cache->bytes_read() - begin_bytes;
        if (n_found == residency_table::await_stopped) {
            last_status = GGML_STATUS_ABORTED;
            return false;
        }
        if (n_found <= 0 && !is_mapped) {
            GGML_LOG_ERROR("%s\n", n_found == 0 ? cache->load_error().c_str() : "The expert cache is closed.");
            last_status = GGML_STATUS_FAILED;
            return false;
        }
    }
    if (is_mapped) { // no slot is pinned
        found.assign(waiting.size(), expert_cache::not_resident);
    }
    // resident experts first, so that both lists can be cut there
    size_t n = is_mapped ? waiting.size() : 0;
    for (size_t i = n; i < waiting.size(); i++) {
        if (found[i] != expert_cache::not_resident) {
            std::swap(waiting[i], waiting[n]);
            std::swap(found[i], found[n]);
            n++;
        }
    }
    bool ok = true;
    {
        const pin_guard pins(*cache, layer, found);
        ok = compute_first(placed, record, n, is_mapped);
    }
    for (size_t i = 0; i < n; i++) {
        (is_first ? record.pairs_device : record.pairs_cpu) += (int32_t) pairs_of[(size_t) waiting[i]].size();
    }
    cache->table().forget(layer, waiting.data(), (int) n);
    waiting.erase(waiting.begin(), waiting.begin() + (ptrdiff_t) n);
    if (is_first) {
        record.unique_device = (int32_t) n;
        record.unique_cpu    = (int32_t) waiting.size();
    }
    return ok;
}

// keeps the columns of the chunk's pairs where they belong
void ram_executor::store(const placed_chain & placed, const float * columns) {
    if (place_of.empty()) {
        scatter(placed.chain, chunk, columns);
        return;
    }
    const size_t n_out = (size_t) placed.chain.out->ne[0];
    for (size_t i = 0; i < chunk.size(); i++) {
        std::copy_n(columns + i * n_out, n_out, kept_columns.begin() + (ptrdiff_t) ((size_t) place_of[(size_t) chunk[i]] * n_out));
    }
}

// reads the experts of the next layer ahead, except those that the device holds
void ram_executor::read_next(int layer) {
    const int next = cache->table().layer_after(layer);
    if (next <= layer) {
        return;
    }
    ahead = all;
    if (device) {
        found.resize(all.size());
        device->acquire(next, all.data(), (int) all.size(), found.data());
        device->release(next, found.data(), (int) found.size());
        const auto is_there = [this](int32_t expert) { return found[(size_t) expert] != expert_cache::not_resident; };
        ahead.erase(std::remove_if(ahead.begin(), ahead.end(), is_there), ahead.end());
    }
    cache->table().read_ahead(next, ahead.data(), (int) ahead.size());
}

// computes the sorted pairs; false: an expert cannot be loaded, or the backend stopped
bool ram_executor::compute_pairs(const placed_chain & placed, moeedge_block_record & record) {
    find_shares(placed.chain.n_tokens());
    residency_table & table = cache->table();
    const int         layer = placed.chain.layer;
    const want_guard  wants(table, layer, waiting, shares.empty() ? nullptr : shares.data());
    if (!shares.empty()) {
        read_next(layer);
    }
    bool ok = compute_resident(placed, record, /* is_first = */ true);
    while (ok && !waiting.empty()) {
        ok = compute_resident(placed, record, /* is_first = */ false);
    }
    return ok;
}

const float * ram_executor::columns(const placed_chain & placed, const index_list & pairs, const block_inputs & inputs,
                                    moeedge_block_record & record) {
    const int64_t begin_ns = now_ns();
    experts.assign(inputs.experts.begin(), inputs.experts.end());
    input_data  = inputs.input;
    cpu         = inputs.cpu;
    device      = inputs.device;
    n_device    = inputs.n_device;
    last_status = GGML_STATUS_SUCCESS;
    record      = new_record(placed.chain, inputs.phase, MOEEDGE_PREFILL_PATH_RESIDENT);
    forget_pairs();
    place_of.assign(experts.size(), 0);
    for (size_t i = 0; i < pairs.size(); i++) {
        place_of[(size_t) pairs[i]] = (int32_t) i;
        add_pair(pairs[i]);
    }
    kept_columns.resize(pairs.size() * (size_t) placed.chain.out->ne[0]);
    if (!compute_pairs(placed, record)) {
        return nullptr;
    }
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    cache->records.add(record);
    return kept_columns.data();
}

block_outcome ram_executor::compute(const placed_chain & placed, int phase, bool skips_unweighted) {
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    skips_unweighted              = skips_unweighted && placed.sum.is_complete();
    cpu                           = own_cpu;
    device                        = nullptr;
    n_device                      = 0;
    place_of.clear();
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ true);
    if (skips_unweighted) {
        read_weights(placed.sum.weights);
    }
    sort_pairs(skips_unweighted);
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_RESIDENT);
    if (!compute_pairs(placed, record)) {
        return BLOCK_ABORTED;
    }
    if (skips_unweighted) {
        clear_unweighted(chain);
    }
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    cache->records.add(record);
    return BLOCK_DONE;
}

} // namespace moeedge
