// Kernel choice: which of our kernels (expert-dots.h) are used instead of ggml's.
//
// Before its first use, a kernel computes a small matmul that ggml computes, too. It is used only if all results have the same
// bits, and, by itself, only where it was faster: one column per expert, several, many and dense matrices are timed apart. So neither another build of
// ggml, nor a CPU on which ggml's kernels are better, changes an answer or slows it down.

#pragma once

#include <vector>

#include "expert-dots.h"
#include "ggml-backend.h"
#include "moeedge.h"

namespace moeedge {

// How a node is computed. ggml decides by the columns of each expert in the batch, so a batch that is cut must not cut an expert's.
struct chosen_dots {
    const dot_kernel * kernel = nullptr; // null: ggml's own code
    dots_function      few    = nullptr; // for experts with less columns than n_many_columns, and for a dense matrix with few
    dots_function      many   = nullptr; // for the others; null: the node has none
};

constexpr int64_t n_many_columns = 8;

// whether nodes of ggml's may be replaced at all
bool may_replace();

// the kernels that this processor runs, the newest instructions first
const std::vector<dot_kernels> & runnable_sets();
// whether those of these instructions may be used
bool is_allowed(const char * instructions);
// ggml's time over theirs must be more
double least_speed();

// whether a dense matrix has so many columns that `many` computes it
bool has_many_dense(const dot_kernel & kernel, const ggml_tensor * node);

// for a MUL_MAT_ID node, or a MUL_MAT of a dense matrix
chosen_dots choose_dots(const ggml_tensor * node);

// multiplies bytes as fast as this processor can with the instructions that kernels of ours use (expert-dots.h); null: it has none
using multiply_function = int64_t (*)(int64_t n_turns);
multiply_function fastest_multiply();

// ggml's function that quantizes to a type, null: this process has another CPU backend than ggml's usual one
ggml_from_float_t quantizer(ggml_type type);

} // namespace moeedge
