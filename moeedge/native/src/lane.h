// Lane: computes one subgraph at a time on the cache's device while the calling thread computes on the CPU.
//
// A device that computes asynchronously by itself (CUDA) is driven from the calling thread. For the others (the emulated
// device, a remote worker) a thread of the lane waits for the device, so that a worker that dies leaves only that thread
// waiting: the caller sees the loss and goes on.

#pragma once

#include <cstdint>
#include <memory>

#include "cache.h"
#include "subgraph.h"

namespace moeedge {

class device_lane {
  public:
    explicit device_lane(std::shared_ptr<expert_cache> cache);
    ~device_lane();
    device_lane(const device_lane &)             = delete;
    device_lane & operator=(const device_lane &) = delete;

    // where the caller writes the inputs of `sub` before submit: host memory, float32 and int32 as sub->input and sub->ids
    // are laid out. False when memory is short.
    bool prepare(subgraph & sub, float *& input, int32_t *& ids);
    void submit();
    // the output [n_out, n pairs] of what was submitted, valid until the next prepare; null if the device failed or is lost
    const float * wait();
    // how long the device was busy with the last one
    int64_t busy_ns() const;

  private:
    struct state; // shared with the thread, which may outlive the lane when the device is lost
    std::shared_ptr<state> self;
};

} // namespace moeedge
