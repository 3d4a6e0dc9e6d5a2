// Device worker: computes one subgraph at a time on the cache's device while the calling thread computes on the CPU.
//
// A device that computes asynchronously by itself (CUDA) is driven from the calling thread. For the others (the emulated
// device, a remote worker) a thread waits for the device, so that a worker that dies blocks only that thread: the caller
// sees that the device is lost and goes on.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

#include "expert-cache.h"
#include "subgraph-set.h"

namespace moeedge {

// host memory that grows
class host_buffer {
  public:
    explicit host_buffer(ggml_backend_buffer_type_t type) : buft(type) {}

    void * reserve(size_t bytes); // null when memory is short

  private:
    ggml_backend_buffer_type_t buft;
    ggml_backend_buffer_ptr    buffer;
};

// the caller and the thread own it together: the thread may outlive the caller when the device is lost
class device_worker : public std::enable_shared_from_this<device_worker> {
  public:
    explicit device_worker(std::shared_ptr<expert_cache> cache);

    void start();
    // ends the thread, or abandons it where it waits for a lost device
    void stop();

    // where the caller writes the inputs of `sub` before submit: host memory, float32 and int32 as sub->input and sub->ids
    // are laid out. False when memory is short.
    bool prepare(subgraph & sub, float *& input, int32_t *& ids);
    void submit();
    // the output [n_out, n pairs] of the submitted subgraph, valid until the next prepare; null if the device failed or is
    // lost
    const float * wait();
    // waits for the submitted subgraph, if there is one
    void wait_idle();
    // how long the device was busy with the last subgraph
    int64_t busy_ns() const { return device_ns; }

  private:
    enum job_state { JOB_IDLE, JOB_SUBMITTED, JOB_DONE, JOB_FAILED, JOB_STOP };

    bool compute();
    bool synchronize();
    void set_state(job_state next);
    void serve(); // the thread's loop
    bool is_finished() const;
    bool wait_for_thread();

    std::shared_ptr<expert_cache> cache;
    ggml_backend_t                backend;
    bool                          is_host;
    host_buffer                   input, ids, output;

    subgraph * sub         = nullptr;
    void *     input_data  = nullptr;
    void *     ids_data    = nullptr;
    void *     output_data = nullptr;
    int64_t    begin_ns    = 0;
    int64_t    device_ns   = 0;
    bool       is_awaited  = false; // since it was started

    std::thread             thread; // not joinable for a device that is asynchronous by itself
    std::mutex              mutex;
    std::condition_variable wake_device;
    std::condition_variable wake_caller;
    std::atomic<job_state>  state{ JOB_IDLE };
};

} // namespace moeedge
