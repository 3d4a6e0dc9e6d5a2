// Expert matmuls: gives a graph to the CPU backend with our kernels (expert-dots.h) in place of ggml's for the experts' matmuls.
//
// A MUL_MAT_ID node, or the MUL_MAT of a dense matrix (an expert that all use), is replaced by a node of our own, which the CPU backend's threads run; number and order of the nodes stay.
// Results are equal bit by bit, so a graph may be computed either way at any time.
//
// ggml  computes the pairs of an expert one after the other, quantizes up's input with one thread and again for gate, and cuts
//       the rows of each expert into one piece per thread.
// Here  the rows of an expert meet all its columns while they are in the cache, an input is quantized once by all threads, and
//       threads take pieces of rows as they come, so that none waits for a thread on a busy processor.
//
// The product of the experts' outputs and their weights, one number per (token, expert) pair, is replaced as well: ggml looks the
// weight up anew for each element, with a division of the index.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <vector>

#include "ggml-backend.h"
#include "kernel-choice.h"
#include "no-copy.h"

struct ggml_cgraph;

namespace moeedge {

class expert_matmuls : no_copy {
  public:

    // computes the graph on a CPU backend, with the kernels that kernel-choice.h allows
    enum ggml_status compute(ggml_backend_t cpu, ggml_cgraph * graph);
    // the same with these for all matmuls
    enum ggml_status compute_with(ggml_backend_t cpu, ggml_cgraph * graph, const chosen_dots & dots);

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
        void   prepare(int ith, int nth);
        void   quantize(int ith, int nth);
        void   sort_pairs();
    };

    struct expert_matmul {
        expert_matmuls &     owner;
        prepared_input &     input;
        const chosen_dots    dots;
        const ggml_tensor *  node; // ggml's
        std::atomic<int64_t> next{ 0 }; // piece of rows

        expert_matmul(expert_matmuls & all, prepared_input & from, const chosen_dots & d, const ggml_tensor * n)
            : owner(all), input(from), dots(d), node(n) {}
        void compute(int nth);
        void compute_rows(int32_t expert, int64_t r_begin, int64_t r_end) const;
    };

    enum ggml_status compute_replaced(ggml_backend_t cpu, ggml_cgraph * graph, const chosen_dots * only);
    ggml_tensor *    replace(const chosen_dots & dots, const ggml_tensor * node);
    static void      run(ggml_tensor * dst, int ith, int nth, void * data);
    ggml_tensor *    replace_weighting(const ggml_tensor * node);
    ggml_tensor *    replace_with(const ggml_tensor * node, ggml_custom_op_t run_node, void * data);
    static void      run_weighting(ggml_tensor * dst, int ith, int nth, void * data);

    // of the current graph
    std::deque<prepared_input> inputs;
    std::deque<expert_matmul>  matmuls;
    std::vector<ggml_tensor>   tensors; // our nodes
    std::vector<ggml_tensor *> nodes;
    std::vector<char>          columns; // of the input that was prepared last
    std::atomic<int>           n_runs{ 0 }; // orders the threads for sanitizers, which do not see the barrier between nodes
};

} // namespace moeedge
