// Expert dots: products of an expert's rows with several quantized columns at once.
//
// ggml's MUL_MAT_ID computes each (token, expert) pair by itself: the rows of an expert that several tokens share are read and
// unpacked once per token. These kernels unpack a row once for several columns. Sums of integers are exact in any order, and
// sums of floats are made in ggml's order, so the results are equal to ggml's bit by bit (checked at run time: kernel-choice.h).
// For K-quants that are not repacked ggml has two orders: from eight columns of an expert in a batch on it computes tiles, which
// are rounded once per block of 256 values.
//
// A file for each set of instructions of x86.

#pragma once

#include <cstddef>
#include <cstdint>

#include "attention-kernels.h"
#include "ggml-cpu.h"

namespace moeedge {

// out[c][r] = rows[r] * columns[c], for n_rows rows (a multiple of n_rows_together) of n values that take row_bytes each
using dots_function = void (*)(int64_t n, const void * rows, size_t row_bytes, int64_t n_rows, const void * const * columns,
                               int n_columns, float * const * out);

// columns that meet rows in one call, at most
constexpr int n_columns_at_once = 64;

struct dot_kernel {
    const char * instructions; // that it needs, by the name that the compiler has for them
    const char * layout;
    ggml_type    type;        // of the rows
    bool         is_repacked; // rows in groups of eight, as ggml's buffer type CPU_REPACK has them
    ggml_type    column_type; // to which ggml quantizes the columns, in blocks of column_block values
    int64_t      column_block;
    size_t       block_bytes; // of a block as the kernel reads it
    int64_t      n_rows_together;
    int64_t      n_values_together; // of a row
    // writes n_blocks of column_type as the kernel reads them; null: as they are. A column begins at a multiple of 64 bytes
    void (*pack)(const void * quantized, int64_t n_blocks, void * to);
    dots_function few;  // rounds as ggml's product of one row and one column
    dots_function many; // rounds as ggml for n_many_columns of an expert or more; null: `few` does
    // of a dense matrix
    int64_t       n_dense_few;  // columns for `few`, at most
    int64_t       n_dense_many; // columns for `dense`, at least
    dots_function dense;        // rounds as ggml for so many; null: ggml's own code
    // quantizes columns of a dense matrix as ggml does four at a time; a rest is quantized and rounded as few; null: it does not
    ggml_from_float_t quantize_fours;
};

struct dot_kernels {
    const dot_kernel * first;
    int                n;
    // runs the instruction that multiplies the most bytes, n_turns times with registers alone; returns the number of products.
    // null: there are no kernels
    int64_t (*multiply)(int64_t n_turns);
    attention_kernels attention;
};

// all kernels for these instructions, none where the library was compiled for another kind of processor
dot_kernels avx512_kernels();     // AVX-512 with VNNI
dot_kernels avx512bf16_kernels(); // BF16 alone
attention_kernels avx512fp16_attention();
dot_kernels avxvnni_kernels();    // AVX2, FMA and AVX-VNNI
dot_kernels avx2_kernels();       // AVX2 and FMA

} // namespace moeedge
