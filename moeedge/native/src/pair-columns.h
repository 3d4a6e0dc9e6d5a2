// Pair columns: the outputs of a block's experts, computed on the CPU for some of the block's (token, expert) pairs, and their
// weighted sums.

#pragma once

#include <cstdint>
#include <vector>

#include "expert-chain.h"
#include "expert-matmuls.h"
#include "ggml-backend.h"
#include "moeedge-cache.h"
#include "subgraph-set.h"

namespace moeedge {

// a chain and the tensors that replace its tables
struct placed_chain {
    expert_chain chain;
    expert_sum   sum;           // complete: the executor may compute it, too
    int          group = -1;    // of the cache; -1: its experts stay on the CPU
    table_list   host_tables;   // as the graph has them
    table_list   device_tables; // slot pools
    bool         takes_twice = false; // kernels may be given an expert twice in a column of ids
    table_list   stage_tables;  // staging slots, null without any
    table_list   ram_tables;    // slot pools in host memory; empty: experts are computed from host_tables
};

enum block_outcome {
    BLOCK_NOT_COMPUTED, // the graph's own nodes have to compute it
    BLOCK_DONE,         // the chain's output is computed
    BLOCK_SUMMED,       // the sum's output is computed, the chain's is not
    BLOCK_ABORTED,      // the CPU backend was told to stop, or failed
};

class pair_columns {
  public:
    // cpu: the CPU backend that computes, of device `dev`
    pair_columns(ggml_backend_t cpu, ggml_backend_dev_t dev);

    // Computes the pairs whose weight is not zero, and leaves zeros for the others: a truncated expert is neither loaded nor
    // computed. Input, ids and weights are in host memory. BLOCK_NOT_COMPUTED: no weight is zero
    block_outcome    compute_weighted(const placed_chain & placed);
    // why the last compute was aborted
    enum ggml_status status() const { return last_status; }

  protected:
    using index_list = std::vector<int32_t>; // of pairs: token * n_used + place

    static moeedge_block_record new_record(const expert_chain & chain, int phase, enum moeedge_prefill_path path);

    void          read_input(const expert_chain & chain, bool keep);
    void          read_weights(const ggml_tensor * t);
    void          gather(const expert_chain & chain, const index_list & pairs, const subgraph & sub, float * input) const;
    void          scatter(const expert_chain & chain, const index_list & pairs, const float * columns) const;
    void          clear_unweighted(const expert_chain & chain);
    bool          sums_here(const placed_chain & placed) const;
    void          name_columns(const index_list & pairs, const float * columns, int64_t n_out);
    void          sum_columns(const placed_chain & placed, const float * start);
    const float * columns_of_cpu(const placed_chain & placed, const index_list & pairs, int64_t & cpu_ns,
                                 const float * gathered = nullptr);
    const float * columns_of_slots(const placed_chain & placed, const index_list & pairs, const index_list & pair_slots,
                                   int64_t & cpu_ns);

    ggml_backend_t             cpu;
    index_list                 experts;   // per pair
    std::vector<const float *> column_of; // per pair, null: none
    std::vector<float>         weights;   // per pair
    const char *               input_data = nullptr; // the chain's input
    std::vector<char>          input_copy;           // of it, where the output is written before all of it is read
    enum ggml_status           last_status = GGML_STATUS_SUCCESS;

  private:
    const float * columns_of_tables(const expert_chain & chain, const table_list & tables, const index_list & pairs,
                                    const index_list & ids, int64_t & cpu_ns, const float * gathered);

    expert_matmuls matmuls;
    subgraph_set   cpu_graphs;
    index_list     expert_ids; // of the pairs that are computed
    index_list     weighted;
};

} // namespace moeedge
