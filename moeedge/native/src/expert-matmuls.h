// Expert matmuls: gives a graph to the CPU backend with nodes of our own in place of some of ggml's, which the same threads run.
// Results are equal bit by bit, so a graph may be computed either way at any time.
//
// Matmuls   a MUL_MAT_ID, or the MUL_MAT of a dense matrix (an expert that all use), for which there is a kernel of ours (expert-dots.h).
//           ggml computes the pairs of an expert one after the other, quantizes the input of each matmul anew, for experts with one
//           thread, and cuts the rows of each expert into one piece per thread. Here the rows of an expert meet all its columns
//           while they are in the cache, an input is quantized once by all threads, and threads take pieces of rows as they come.
//           Neighbours that share an input (key and value) are one node; up, gate, their biases and the activation, too.
// Others    what follows down, and the end of the router, are a node each (fused-nodes.h); attention, too (attention-node.h).
// Routing   is read meanwhile: by the first thread in the block's first matmul, or, where that is ggml's, in a node of its own.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "fused-nodes.h"
#include "ggml-backend.h"
#include "kernel-choice.h"
#include "moe-blocks.h"
#include "no-copy.h"
#include "attention-node.h"

struct ggml_cgraph;

namespace moeedge {

// what is read of a graph while it is computed, by the calling thread
struct routing_reads {
    const std::vector<moe_block> &         blocks;
    std::function<void(const moe_block &)> read;
};

class expert_matmuls : no_copy {
  public:
    void set_n_threads(int n) { n_threads = n; }

    // Computes the graph on a CPU backend. reads: null: nothing is read; only: these for all matmuls, null: the kernels that
    // kernel-choice.h allows
    enum ggml_status compute(ggml_backend_t cpu, ggml_cgraph * graph, const routing_reads * reads = nullptr, const chosen_dots * only = nullptr);

  private:
    // the input of one or more matmuls in a row; the threads of the first one write it
    struct prepared_input {
        const dot_kernel &   kernel; // in whose form the columns are
        const ggml_tensor *  matmul; // the first one
        std::vector<char> &  columns;
        std::vector<int32_t> used;  // experts that have pairs
        std::vector<int32_t> begin; // [n_experts + 1] of an expert in `pairs`
        std::vector<int32_t> pairs; // by expert: token * n_used + place
        std::atomic<int>     n_done{ 0 }; // threads that have written their part

        prepared_input(const dot_kernel & k, const ggml_tensor * node, std::vector<char> & all_columns);
        bool   serves(const dot_kernel & other, const ggml_tensor * node) const;
        size_t column_bytes() const;
        char * column_data() const; // of the first column
        void   prepare(int ith, int nth);
        void   quantize(int ith, int nth);
        void   sort_pairs();
    };

    struct matmul {
        chosen_dots         dots;
        const ggml_tensor * node; // ggml's
    };

    // of a block
    struct routing_read {
        const routing_reads * reads = nullptr;
        const moe_block *     block = nullptr;

        void compute(int ith, int nth) const; // by the first thread
    };

    // matmuls of one input
    struct matmul_group {
        prepared_input &     input;
        std::vector<matmul>  matmuls;
        gated_unit           unit;             // of the two matmuls; without i_end: there is none
        routing_read         read;             // without a block: none is read
        weighted_sum *       copied = nullptr; // the sum whose routing is copied
        std::atomic<int64_t> next{ 0 };        // piece of rows

        explicit matmul_group(prepared_input & from) : input(from) {}
        void compute(int ith, int nth);
        void compute_pieces(int nth);
        void compute_rows(const matmul & of, int32_t expert, int64_t r_begin, int64_t r_end) const;
        void compute_unit(int32_t expert, int64_t r_begin, int64_t r_end) const;
    };

    void             replace_nodes(const ggml_cgraph * graph, const chosen_dots * only);
    void             add_node(const ggml_tensor * like, ggml_custom_op_t run, void * data);
    int              add_matmul(const ggml_cgraph * graph, int i, const chosen_dots * only, const moe_block * read);
    int              add_other(const ggml_cgraph * graph, int i);

    // of the current graph
    const routing_reads *      reads = nullptr;
    std::deque<prepared_input> inputs;
    std::deque<matmul_group>   groups;
    std::deque<weighted_sum>   sums;
    std::deque<router_weights> routers;
    std::deque<attention_node> attentions;
    std::deque<routing_read>   own_reads; // in nodes of their own
    std::deque<ggml_tensor>    tensors;   // our nodes
    std::vector<ggml_tensor *> nodes;     // all, in their order
    matmul_group *             newest = nullptr; // if it is the last operation so far
    std::vector<char>          columns; // of the input that was prepared last
    std::vector<float>         head_parts; // of the attention that is computed
    int                        n_threads = 0; // of the CPU backend, 0: unknown
};

} // namespace moeedge
