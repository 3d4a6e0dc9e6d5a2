#include "pair-columns.h"

#include <cstring>

#include "moe-blocks.h"
#include "timing.h"

namespace moeedge {

// Up to this many values of all pairs' columns, one thread sums them faster than the CPU backend's threads start.
static constexpr int64_t n_values_summed_here = 32 * 1024;
static bool run_here(const std::function<void()> & work) {
    work();
    return true;
}

pair_columns::pair_columns(ggml_backend_t cpu_backend, ggml_backend_dev_t dev)
    : cpu(cpu_backend), cpu_graphs(dev, ggml_backend_cpu_buffer_type(), run_here) {}

moeedge_block_record pair_columns::new_record(const expert_chain & chain, int phase, enum moeedge_prefill_path path) {
    moeedge_block_record record = {};
    record.layer                = chain.layer;
    record.phase                = phase;
    record.path                 = path;
    record.n_tokens             = (int32_t) chain.n_tokens();
    return record;
}

// ggml may give the output the memory of the input, since the graph has read the input when it writes the output
void pair_columns::read_input(const expert_chain & chain, bool keep) {
    input_data = (const char *) chain.input->data;
    if (keep) {
        input_copy.assign(input_data, input_data + ggml_nbytes(chain.input));
        input_data = input_copy.data();
    }
}

// copies the pairs' columns of the block's input, one after the other
void pair_columns::gather(const expert_chain & chain, const index_list & pairs, const subgraph & sub, float * input) const {
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

void pair_columns::scatter(const expert_chain & chain, const index_list & pairs, const float * columns) const {
    const ggml_tensor * out    = chain.out;
    const int64_t       n_used = chain.n_used();
    const size_t        bytes  = out->ne[0] * sizeof(float);
    for (size_t i = 0; i < pairs.size(); i++) {
        const int64_t t = pairs[i] / n_used;
        std::memcpy((char *) out->data + t * out->nb[2] + pairs[i] % n_used * out->nb[1], (const char *) columns + i * bytes, bytes);
    }
}

// A block with few values is summed by the calling thread, which spares the CPU backend's threads a second start.
bool pair_columns::sums_here(const placed_chain & placed) const {
    return placed.sum.is_complete() && ggml_nelements(placed.chain.out) <= n_values_summed_here;
}

// notes where the pairs' columns [n_out, n pairs] are
void pair_columns::name_columns(const index_list & pairs, const float * first, int64_t n_out) {
    for (size_t i = 0; i < pairs.size(); i++) {
        column_of[pairs[i]] = first + (int64_t) i * n_out;
    }
}

// Writes the weighted sum of the named columns in the order of the places, as ggml's nodes compute it; a product is rounded
// before it is added, as theirs is. start: added first; null: nothing.
void pair_columns::sum_columns(const placed_chain & placed, const float * start) {
    const int64_t n_used = placed.chain.n_used();
    const int64_t n_out  = placed.chain.out->ne[0];
    for (int64_t t = 0; t < placed.chain.n_tokens(); t++) {
        float * out      = (float *) ((char *) placed.sum.out->data + t * placed.sum.out->nb[1]);
        bool    is_empty = start == nullptr;
        if (start) {
            std::memcpy(out, start + t * n_out, (size_t) n_out * sizeof(float));
        }
        for (int64_t p = t * n_used; p < (t + 1) * n_used; p++) {
            const float * column = column_of[(size_t) p];
            const float   weight = weights[(size_t) p];
            for (int64_t i = 0; column && is_empty && i < n_out; i++) {
                out[i] = column[i] * weight;
            }
            for (int64_t i = 0; column && !is_empty && i < n_out; i++) {
                const float product = column[i] * weight;
                out[i] += product;
            }
            is_empty = is_empty && column == nullptr;
        }
        if (is_empty) { // none of the token's experts has weight
            std::memset(out, 0, (size_t) n_out * sizeof(float));
        }
    }
}

// The pairs' columns, valid until the next call; null: the backend stopped or failed. Adds to cpu_ns. gathered: the
// pairs' input columns, null if not gathered yet.
const float * pair_columns::columns_of_cpu(const placed_chain & placed, const index_list & pairs, int64_t & cpu_ns,
                                           const float * gathered) {
    expert_ids.clear();
    for (const int32_t p : pairs) {
        expert_ids.push_back(experts[(size_t) p]);
    }
    return columns_of_tables(placed.chain, placed.host_tables, pairs, expert_ids, cpu_ns, gathered);
}

// The same for pairs whose experts are in slots of host memory; pair_slots [n pairs]
const float * pair_columns::columns_of_slots(const placed_chain & placed, const index_list & pairs, const index_list & pair_slots,
                                             int64_t & cpu_ns) {
    return columns_of_tables(placed.chain, placed.ram_tables, pairs, pair_slots, cpu_ns, nullptr);
}

// ids [n pairs]: the experts' indices in `tables`
const float * pair_columns::columns_of_tables(const expert_chain & chain, const table_list & tables, const index_list & pairs,
                                              const index_list & ids, int64_t & cpu_ns, const float * gathered) {
    const pair_layout layout = chain.n_tokens() == 1 ? LAYOUT_TOKEN : LAYOUT_PAIRS;
    subgraph *        sub    = cpu_graphs.get(chain, (int64_t) pairs.size(), layout, tables);
    if (sub == nullptr) {
        last_status = GGML_STATUS_ALLOC_FAILED;
        return nullptr;
    }
    if (gathered) {
        std::memcpy(sub->input->data, gathered, ggml_nbytes(sub->input));
    } else {
        gather(chain, pairs, *sub, (float *) sub->input->data);
    }
    std::memcpy(sub->ids->data, ids.data(), ids.size() * sizeof(int32_t));
    const int64_t begin_ns = now_ns();
    last_status            = matmuls.compute(cpu, sub->graph);
    cpu_ns += now_ns() - begin_ns;
    return last_status == GGML_STATUS_SUCCESS ? (const float *) sub->out->data : nullptr;
}

// weights of all pairs; the sum's output may get their memory
void pair_columns::read_weights(const ggml_tensor * t) {
    weights.resize((size_t) (t->ne[1] * t->ne[2]));
    for (int64_t i = 0; i < (int64_t) weights.size(); i++) {
        weights[(size_t) i] = *(const float *) ((const char *) t->data + i / t->ne[1] * t->nb[2] + i % t->ne[1] * t->nb[1]);
    }
}

// zeros instead of the columns of pairs without weight, which are not computed
void pair_columns::clear_unweighted(const expert_chain & chain) {
    const int64_t n_used = chain.n_used();
    for (int64_t p = 0; p < (int64_t) weights.size(); p++) {
        if (weights[(size_t) p] == 0.0f) {
            char * column = (char *) chain.out->data + p / n_used * chain.out->nb[2] + p % n_used * chain.out->nb[1];
            std::memset(column, 0, (size_t) chain.out->ne[0] * sizeof(float));
        }
    }
}

block_outcome pair_columns::compute_weighted(const placed_chain & placed) {
    const expert_chain & chain = placed.chain;
    if (!placed.sum.is_complete()) {
        return BLOCK_NOT_COMPUTED;
    }
    read_weights(placed.sum.weights);
    weighted.clear();
    for (size_t p = 0; p < weights.size(); p++) {
        if (weights[p] != 0.0f) {
            weighted.push_back((int32_t) p);
        }
    }
    if (weighted.size() == weights.size()) {
        return BLOCK_NOT_COMPUTED;
    }
    read_ids(chain.ids, experts);
    read_input(chain, /* keep = */ false);
    int64_t       cpu_ns = 0;
    const float * found  = weighted.empty() ? nullptr : columns_of_cpu(placed, weighted, cpu_ns);
    if (!weighted.empty() && found == nullptr) {
        return BLOCK_ABORTED;
    }
    clear_unweighted(chain);
    if (found) {
        scatter(chain, weighted, found);
    }
    return BLOCK_DONE;
}

} // namespace moeedge
