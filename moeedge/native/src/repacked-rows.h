// Repacked rows: the layout of matrices in RAM that ggml's CPU backend computes faster (its buffer type CPU_REPACK), and what
// writes it.
//
// It interleaves the blocks of eight rows (x86), so as many rows take the same bytes at the same offset as in a file, and can be
// written by themselves.

#pragma once

#include <cstddef>

#include "direct-file.h"
#include "ggml-backend.h"
#include "moeedge.h"

namespace moeedge {

// the buffer type for matrices of a type, null: they stay as in the file, or the CPU's backend has none
ggml_backend_buffer_type_t repacked_buffer_type(ggml_backend_dev_t dev, ggml_type type, moeedge_repack choice);

// whether a tensor is in this layout: of a buffer of that type, and ggml has a layout for its shape
bool is_repacked(const ggml_tensor * tensor);

class repacked_rows : public piece_writer {
  public:
    // pool: is_repacked
    explicit repacked_rows(const ggml_tensor * pool);

    size_t unit_bytes() const override { return unit; }
    void   write(char * to, const char * from, size_t size) const override;

  private:
    const ggml_tensor * pool;
    const size_t        unit;
};

} // namespace moeedge
