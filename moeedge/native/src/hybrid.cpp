#include "hybrid.h"

#include <algorithm>
#include <cstring>

#include "ggml-impl.h"
#include "timing.h"

namespace moeedge {

// each such block costs the time in which its two parts would have run at once
static constexpr int64_t n_blocks_per_timing = 11;

static bool run_here(const std::function<void()> & work) {
    work();
    return true;
}

hybrid_executor::hybrid_executor(std::shared_ptr<expert_cache> c, ggml_backend_t cpu_backend, ggml_backend_dev_t dev)
    : cache(std::move(c)), cpu_dev(dev), cpu(cpu_backend), lane(new device_lane(cache)),
      cpu_graphs(new subgraph_set(dev, ggml_backend_cpu_buffer_type(), run_here)),
      device_graphs(new subgraph_set(ggml_backend_get_device(cache->compute_backend()), cache->compute_buft(),
                                     [c = cache.get()](std::function<void()> work) { return c->run_on_device(std::move(work)); })) {
    if (cache->host_threads() > 0) {
        cpu_part = ggml_backend_dev_init(cpu_dev, nullptr);
    }
}

hybrid_executor::~hybrid_executor() {
    lane.reset();
    // freeing its buffer waits for the device: never, if it is lost
    cache->run_on_device([graphs = device_graphs.release()] { delete graphs; });
    if (cpu_part) {
        ggml_backend_free(cpu_part);
    }
}

void hybrid_executor::set_n_threads(int n_threads) {
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu_dev),
                                                                                "ggml_backend_set_n_threads");
    if (cpu_part && set) {
        set(cpu_part, std::max(1, n_threads - cache->host_threads()));
    }
}

bool hybrid_executor::place(placed_chain & placed) const {
    const expert_chain & chain = placed.chain;
    placed.group               = chain.understood() ? cache->group_of(chain.layer) : -1;
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
    }
    return true;
}

void hybrid_executor::read_experts(const expert_chain & chain) {
    const ggml_tensor * ids    = chain.ids;
    const int64_t       n_used = chain.n_used();
    experts.resize(n_used * chain.n_tokens());
    for (int64_t t = 0; t < chain.n_tokens(); t++) {
        const char * row = (const char *) ids->data + t * ids->nb[1];
        for (int64_t i = 0; i < n_used; i++) {
            experts[t * n_used + i] = *(const int32_t *) (row + i * ids->nb[0]);
        }
    }
}

int hybrid_executor::count_unique(const int32_t * of_pair, const index_list & pairs) {
    round++;
    int n = 0;
    for (const int32_t p : pairs) {
        const size_t e = of_pair[p];
        if (e >= seen.size()) {
            seen.resize(e + 1, 0);
        }
        n += seen[e] != round;
        seen[e] = round;
    }
    return n;
}

// ggml may have given the output the input's memory, since the graph is done with the one when it writes the other
void hybrid_executor::read_input(const expert_chain & chain, bool keep) {
    input_data = (const char *) chain.input->data;
    if (keep) {
        input_copy.assign(input_data, input_data + ggml_nbytes(chain.input));
        input_data = input_copy.data();
    }
}

// the pairs' columns of the block's input, one behind the other
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

// false: the backend stopped or failed. Adds to record.cpu_ns. `gathered`: the pairs' columns, if they are there already.
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

// starts the device on pairs whose slots are pinned; false: it cannot take them
bool hybrid_executor::submit(const placed_chain & placed, const index_list & pairs) {
    const expert_chain & chain = placed.chain;
    subgraph *           sub   = device_graphs->get(chain, pairs.size(), chain.n_tokens() == 1, placed.device_tables);
    float *              input = nullptr;
    int32_t *            ids   = nullptr;
    if (sub == nullptr || !lane->prepare(*sub, input, ids)) {
        return false;
    }
    gather(chain, pairs, *sub, input);
    staged_input = input;
    for (size_t i = 0; i < pairs.size(); i++) {
        ids[i] = slots[pairs[i]];
    }
    lane->submit();
    return true;
}

// waits for what was submitted; a device that is lost meanwhile leaves its pairs to the CPU
bool hybrid_executor::finish(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record) {
    const int64_t begin_ns = now_ns();
    const float * columns  = lane->wait();
    record.wait_ns += now_ns() - begin_ns;
    if (columns == nullptr) {
        cache->mark_lost("it failed to compute");
        return compute_on_cpu(placed, pairs, record, staged_input);
    }
    record.device_ns += lane->busy_ns();
    scatter(placed.chain, pairs, columns);
    return true;
}

// A device that computes by itself says that it is done when it is asked, which is after the CPU's part. So now and then it
// is waited for first: the calibration learns from those blocks what it takes (their wait is all of its time).
bool hybrid_executor::is_timed_alone() {
    return cache->is_async() && n_computed++ % n_blocks_per_timing == 0;
}

// pairs in pieces that a device takes at once; the CPU computes what it does not take. The block's input must have been
// kept, since the columns of a piece may be written over it.
bool hybrid_executor::compute_on_device(const placed_chain & placed, const index_list & pairs, moeedge_block_record & record) {
    bool ok = true;
    for (size_t begin = 0; ok && begin < pairs.size(); begin += n_pairs_max) {
        const size_t     end = std::min(begin + n_pairs_max, pairs.size());
        const index_list piece(pairs.begin() + begin, pairs.begin() + end);
        if (!cache->lost() && submit(placed, piece)) {
            ok = finish(placed, piece, record);
            continue;
        }
        if (!cache->lost()) {
            cache->count_unknown_block(); // the device cannot compute it, or has no memory for it
        }
        ok = compute_on_cpu(placed, piece, record);
    }
    return ok;
}

hybrid_executor::outcome hybrid_executor::compute(const placed_chain & placed, int phase) {
    const int64_t        begin_ns = now_ns();
    const expert_chain & chain    = placed.chain;
    read_experts(chain);
    read_input(chain, /* keep = */ experts.size() > n_pairs_max);
    slots.resize(experts.size());
    if (cache->acquire(chain.layer, experts.data(), (int) experts.size(), slots.data()) == 0) {
        record_whole(chain, phase);
        return outcome::whole;
    }
    on_device.clear();
    on_cpu.clear();
    for (size_t p = 0; p < slots.size(); p++) {
        (slots[p] == expert_cache::not_resident ? on_cpu : on_device).push_back((int32_t) p);
    }
    moeedge_block_record record = {};
    record.layer                = chain.layer;
    record.phase                = phase;
    record.path                 = MOEEDGE_PREFILL_RESIDENT;
    record.n_tokens             = (int32_t) chain.n_tokens();
    record.pairs_device         = (int32_t) on_device.size();
    record.pairs_cpu            = (int32_t) on_cpu.size();
    record.unique_device        = count_unique(experts.data(), on_device);
    record.unique_cpu           = count_unique(experts.data(), on_cpu);

    index_list later;
    if (on_device.size() > n_pairs_max) {
        later.assign(on_device.begin() + n_pairs_max, on_device.end());
        on_device.resize(n_pairs_max);
    }
    outcome result = outcome::whole;
    if (submit(placed, on_device)) {
        if (is_timed_alone()) {
            const int64_t wait_ns = now_ns();
            lane->wait();
            record.wait_ns += now_ns() - wait_ns;
        }
        const bool cpu_ok    = on_cpu.empty() || compute_on_cpu(placed, on_cpu, record);
        const bool device_ok = finish(placed, on_device, record);
        const bool ok        = cpu_ok && device_ok && compute_on_device(placed, later, record);
        result               = ok ? outcome::done : outcome::aborted;
    }
    cache->release(chain.layer, slots.data(), (int) slots.size());
    record.partition_ns = now_ns() - begin_ns - record.cpu_ns - record.wait_ns;
    if (result == outcome::done) {
        cache->record_block(record);
    } else if (result == outcome::whole) {
        cache->count_unknown_block(); // the device cannot compute it, or has no memory for it
        record_whole(chain, phase);
    }
    return result;
}

void hybrid_executor::record_whole(const expert_chain & chain, int phase) {
    read_experts(chain);
    on_cpu.resize(experts.size());
    for (size_t p = 0; p < experts.size(); p++) {
        on_cpu[p] = (int32_t) p;
    }
    moeedge_block_record record = {};
    record.layer                = chain.layer;
    record.phase                = phase;
    record.path                 = MOEEDGE_PREFILL_CPU;
    record.n_tokens             = (int32_t) chain.n_tokens();
    record.pairs_cpu            = (int32_t) on_cpu.size();
    record.unique_cpu           = count_unique(experts.data(), on_cpu);
    cache->record_block(record);
}

} // namespace moeedge
