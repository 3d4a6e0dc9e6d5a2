#include "hybrid-executor.h"

#include <algorithm>
#include <cstring>
#include <future>

#include "ggml-impl.h"
#include "moe-blocks.h"
#include "timing.h"

namespace moeedge {

// while timing is on, one block in this many is timed alone; it costs the time in which its two parts would have run at once
static constexpr int64_t n_blocks_per_timing = 11;

// Unpins the slots of a block. If an exception passes, it waits for the device first, which may still read them.
class pin_guard {
  public:
    pin_guard(expert_cache & c, device_worker & w, int block_layer, const std::vector<int32_t> & pinned)
        : cache(&c), worker(w), layer(block_layer), slots(pinned) {}
    ~pin_guard() {
        if (cache) {
            worker.wait_idle();
            release();
        }
    }
    pin_guard(const pin_guard &)             = delete;
    pin_guard & operator=(const pin_guard &) = delete;

    void release() {
        cache->release(layer, slots.data(), (int) slots.size());
        cache = nullptr;
    }

  private:
    expert_cache *               cache; // null: released
    device_worker &              worker;
    const int                    layer;
    const std::vector<int32_t> & slots;
};

static moeedge_block_record new_record(const expert_chain & chain, int phase, enum moeedge_prefill_path path) {
    moeedge_block_record record = {};
    record.layer                = chain.layer;
    record.phase                = phase;
    record.path                 = path;
    record.n_tokens             = (int32_t) chain.n_tokens();
    return record;
}

static bool run_here(const std::function<void()> & work) {
    work();
    return true;
}

hybrid_executor::hybrid_executor(std::shared_ptr<expert_cache> c, ggml_backend_t cpu_backend, ggml_backend_dev_t dev)
    : cache(std::move(c)), cpu_dev(dev), cpu(cpu_backend), worker(std::make_shared<device_worker>(cache)),
      cpu_graphs(new subgraph_set(dev, ggml_backend_cpu_buffer_type(), run_here)),
      device_graphs(new subgraph_set(ggml_backend_get_device(cache->device().compute), cache->device().buft,
                                     [c = cache.get()](std::function<void()> work) { return c->run_on_device(std::move(work)); })) {
    if (cache->device().n_threads > 0) {
        cpu_part = ggml_backend_dev_init(cpu_dev, nullptr);
    }
    worker->start();
}

hybrid_executor::~hybrid_executor() {
    worker->stop();
    try {
        // waits for the device to free the graphs' buffer; of a lost device it is leaked
        cache->run_on_device([graphs = device_graphs.release()] { delete graphs; });
    } catch (const std::exception &) { // no memory for the thread that frees
    }
    ggml_backend_free(cpu_part);
}

void hybrid_executor::set_n_threads(int n_threads) {
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_dev),
                                                                                "ggml_backend_set_n_threads");
    if (cpu_part && set) {
        set(cpu_part, std::max(1, n_threads - cache->device().n_threads));
    }
}

bool hybrid_executor::place(placed_chain & placed) const {
    const expert_chain & chain = placed.chain;
    placed.group               = chain.is_complete() ? cache->group_of(chain.layer) : -1;
    if (placed.group < 0) {
        return false;
    }
    for (const expert_table & table : chain.tables) {
        ggml_tensor * pool = cache->pool(placed.group, table.role.c_str());
        if (pool == nullptr || pool->type != table.tensor->type || pool->ne[0] != table.tensor->ne[0]) {
            placed.group = -1;
            return false;
        }
        placed.host_tables.push_back(table.tensor);
        placed.device_tables.push_back(pool);
        placed.stage_tables.push_back(cache->stage(placed.group, table.role.c_str()));
    }
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

// ggml may give the output the memory of the input, since the graph has read the input when it writes the output
void hybrid_executor::read_input(const expert_chain & chain, bool keep) {
    input_data = (const char *) chain.input->data;
    if (keep) {
        input_copy.assign(input_data, input_data + ggml_nbytes(chain.input));
        input_data = input_copy.data();
    }
}

// copies the pairs' columns of the block's input, one after the other
void hybrid_executor::gather(const expert_chain & chain, const index_list & pairs, const subgraph & sub, float * input) const {
    const ggml_tensor * x      = chain.input;
    const int64_t       n_used = chain.n_used();
    const size_t        bytes  = x->ne[0] * sizeof(float);
    const size_t        stride = x->ne[1] > 1 ? x->nb[1] : 0;
    const int64_t       n      = ggml_nrows(sub.input); // one when all pairs share the token's column
    for (int64_t i = 0; i < n; i++) {
        const int64_t t = pairs[i] / n_used;
        std::memcpy((char *) input + i * bytes, input_data + t * x->nb[2] + pairs[i] % n_used * stride, bytes);
    }
}

void hybrid_executor::scatter(const expert_chain & chain, const index_list & pairs, const float * columns) const {
    const ggml_tensor * out    = chain.out;
    const int64_t       n_used = chain.n_used();
    const size_t        bytes  = out->ne[0] * sizeof(float);
    for (size_t i = 0; i < pairs.size(); i++) {
        const int64_t t = pairs[i] / n_used;
        std::memcpy((char *) out->data + t * out->nb[2] + pairs[i] % n_used * out->nb[1], (const char *) columns + i * bytes, bytes);
    }
}

// false: the backend stopped or failed. Adds to record.cpu_ns. gathered: the pairs' columns, null if not gathered yet.
bool hybrid_executor::compute_on_cpu(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record,
                                     const float * gathered) {
    const expert_chain & chain = placed.chain;
    subgraph *           sub   = cpu_graphs->get(chain, pairs.size(), chain.n_tokens() == 1, placed.host_tables);
    if (sub == nullptr) {
        last_status = GGML_STATUS_ALLOC_FAILED;
        return false;
    }
    if (gathered) {
        std::memcpy(sub->input->data, gathered, ggml_nbytes(sub->input));
    } else {
        gather(chain, pairs, *sub, (float *) sub->input->data);
    }
    int32_t * ids = (int32_t *) sub->ids->data;
    for (size_t i = 0; i < pairs.size(); i++) {
        ids[i] = experts[pairs[i]];
    }
    const int64_t begin_ns = now_ns();
    last_status            = ggml_backend_graph_compute(cpu_part ? cpu_part : cpu, sub->graph);
    record.cpu_ns += now_ns() - begin_ns;
    if (last_status != GGML_STATUS_SUCCESS) {
        return false;
    }
    scatter(chain, pairs, (const float *) sub->out->data);
    return true;
}

// starts the device on pairs whose slots, in `tables`, are pinned; false: it cannot take them
bool hybrid_executor::submit(const placed_chain & placed, const index_list & pairs, const table_list & tables) {
    const expert_chain & chain = placed.chain;
    subgraph *           sub   = device_graphs->get(chain, pairs.size(), chain.n_tokens() == 1, tables);
    float *              input = nullptr;
    int32_t *            ids   = nullptr;
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

// waits for the submitted pairs; if the device is lost meanwhile, the CPU computes them
bool hybrid_executor::finish(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record) {
    const int64_t begin_ns = now_ns();
    const float * columns  = worker->wait();
    record.wait_ns += now_ns() - begin_ns;
    if (columns == nullptr) {
        cache->mark_lost("it failed to compute");
        return compute_on_cpu(placed, pairs, record, staged_input);
    }
    record.device_ns += worker->busy_ns();
    scatter(placed.chain, pairs, columns);
    return true;
}

// An asynchronous device is asked whether it is done after the CPU's part, which hides its own time. So calibration has it
// awaited first now and then: the wait of such blocks is the time that the device takes.
bool hybrid_executor::is_timed_alone() {
    return cache->is_timing.load() && cache->device().is_async && n_computed++ % n_blocks_per_timing == 0;
}

// Computes pairs in pieces that a device takes at once; the CPU computes the pieces that it does not take. The input must
// have been kept, since the columns of a piece may overwrite it.
bool hybrid_executor::compute_on_device(const placed_chain & placed, const index_list & pairs, const table_list & tables,
                                        moeedge_block_record & record) {
    bool ok = true;
    for (size_t begin = 0; ok && begin < pairs.size(); begin += n_pairs_max) {
        const size_t     end = std::min(begin + n_pairs_max, pairs.size());
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

block_outcome hybrid_executor::compute(const placed_chain & placed, int phase) {
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ experts.size() > n_pairs_max);
    slots.resize(experts.size());
    if (cache->acquire(chain.layer, experts.data(), (int) experts.size(), slots.data()) == 0) {
        record_cpu_block(chain, phase);
        return BLOCK_NOT_COMPUTED;
    }
    pin_guard pins(*cache, *worker, chain.layer, slots);
    on_device.clear();
    on_cpu.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        (slots[p] == expert_cache::not_resident ? on_cpu : on_device).push_back((int32_t) p);
    }
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_RESIDENT);
    record.pairs_device         = (int32_t) on_device.size();
    record.pairs_cpu            = (int32_t) on_cpu.size();
    record.unique_device        = count_unique(on_device);
    record.unique_cpu           = count_unique(on_cpu);

    index_list later;
    if (on_device.size() > n_pairs_max) {
        later.assign(on_device.begin() + n_pairs_max, on_device.end());
        on_device.resize(n_pairs_max);
    }
    block_outcome result = BLOCK_NOT_COMPUTED;
    if (submit(placed, on_device, placed.device_tables)) {
        if (is_timed_alone()) {
            const int64_t wait_ns = now_ns();
            worker->wait();
            record.wait_ns += now_ns() - wait_ns;
        }
        const bool cpu_ok    = on_cpu.empty() || compute_on_cpu(placed, on_cpu, record);
        const bool device_ok = finish(placed, on_device, record);
        const bool ok        = cpu_ok && device_ok && compute_on_device(placed, later, placed.device_tables, record);
        result               = ok ? BLOCK_DONE : BLOCK_ABORTED;
    }
    pins.release();
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    if (result == BLOCK_DONE) {
        cache->records.add(record);
    } else if (result == BLOCK_NOT_COMPUTED) {
        cache->records.add_unknown(); // the device cannot compute it, or has no memory for it
        record_cpu_block(chain, phase);
    }
    return result;
}

void hybrid_executor::record_cpu_block(const expert_chain & chain, int phase) {
    read_ids(chain.ids, experts);
    on_cpu.resize(experts.size());
    for (size_t p = 0; p < experts.size(); p++) {
        on_cpu[p] = (int32_t) p;
    }
    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_CPU);
    record.pairs_cpu            = (int32_t) on_cpu.size();
    record.unique_cpu           = count_unique(on_cpu);
    cache->records.add(record);
}

// Streaming prefill: the experts that a large batch needs and that have no slot pass through the staging slots; one half of
// them is computed while the other half is being written.

// cuts the pairs whose expert has no slot into chunks of half the staging slots, by expert
void hybrid_executor::cut_chunks(std::vector<stream_chunk> & chunks) {
    const int per_chunk = cache->n_stage / 2;
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
            chunk.slots.push_back(at);
        }
        chunk.pairs.push_back(p);
        slots[p] = chunk.slots.back();
    }
}

bool hybrid_executor::stream_chunks(const placed_chain & placed, std::vector<stream_chunk> & chunks, moeedge_block_record & record) {
    const auto stage = [this, layer = placed.chain.layer](const stream_chunk & chunk) {
        return std::async(std::launch::async, [this, layer, &chunk] {
            return cache->stage(layer, chunk.experts.data(), (int) chunk.experts.size(), chunk.slots.data());
        });
    };
    std::future<bool> staged;
    if (!chunks.empty()) {
        staged = stage(chunks[0]);
    }
    bool ok = compute_on_device(placed, on_device, placed.device_tables, record);
    for (size_t c = 0; c < chunks.size(); c++) {
        const int64_t begin_ns = now_ns();
        const bool    is_there = staged.get();
        record.wait_ns += now_ns() - begin_ns;
        if (c + 1 < chunks.size()) {
            staged = stage(chunks[c + 1]);
        }
        const index_list & pairs = chunks[c].pairs;
        ok = ok && (is_there ? compute_on_device(placed, pairs, placed.stage_tables, record) : compute_on_cpu(placed, pairs, record));
    }
    return ok;
}

block_outcome hybrid_executor::compute_streamed(const placed_chain & placed, int phase) {
    if (cache->n_stage < 2 || (!cache->device().is_async && !cache->device().is_host)) {
        return compute(placed, phase); // a remote worker's socket carries one transfer at a time: no overlap
    }
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ true);
    slots.resize(experts.size());
    index_list pinned(experts.size());
    cache->acquire(chain.layer, experts.data(), (int) experts.size(), pinned.data());
    pin_guard pins(*cache, *worker, chain.layer, pinned);
    slots = pinned; // cut_chunks adds the staging slots
    on_device.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        if (slots[p] != expert_cache::not_resident) {
            on_device.push_back((int32_t) p);
        }
    }
    std::vector<stream_chunk> chunks;
    cut_chunks(chunks);

    moeedge_block_record record = new_record(chain, phase, MOEEDGE_PREFILL_PATH_STREAM);
    record.pairs_device         = (int32_t) slots.size();
    const bool ok               = stream_chunks(placed, chunks, record);
    pins.release();
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    if (!ok) {
        return BLOCK_ABORTED;
    }
    cache->records.add(record);
    return BLOCK_DONE;
}

} // namespace moeedge
