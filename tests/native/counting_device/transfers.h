// Transfers between host and device: described once, for blocking and asynchronous calls.
#pragma once

#include "device-queue.h"
#include "ggml-backend-impl.h"
#include "ledger.h"

namespace counting {

// n pieces of `size` bytes; strides are between the starts of pieces
struct transfer {
    const ggml_tensor * tensor;
    void *              data; // the host's side; only read by a set
    size_t              offset, size, n = 1, stride_tensor = 0, stride_data = 0;

    size_t bytes() const { return size * n; }
};

operation make_set(const transfer & t);
operation make_get(const transfer & t);
operation make_copy(const ggml_tensor * src, const ggml_tensor * dst);
operation make_fill(const char * name, void * address, void * real, uint8_t value, size_t size);
// executes it on behalf of the host, which waits: no queue orders it
void run_blocking(operation op);

} // namespace counting
