#include "device-worker.h"

#include <chrono>
#include <exception>

#include "timing.h"

namespace moeedge {

// how often a waiting caller checks whether the device is lost
static constexpr auto lost_check_interval = std::chrono::milliseconds(50);
// turns of a short wait (some 40 us) that keeps the core: a thread that sleeps takes as long to wake up
static constexpr int n_spins = 1000;

void * host_buffer::reserve(size_t bytes) {
    if (!buffer || ggml_backend_buffer_get_size(buffer.get()) < bytes) {
        buffer.reset();
        buffer.reset(ggml_backend_buft_alloc_buffer(buft, bytes + bytes / 2));
    }
    return buffer ? ggml_backend_buffer_get_base(buffer.get()) : nullptr;
}

device_worker::device_worker(std::shared_ptr<expert_cache> c)
    : cache(std::move(c)), backend(cache->device().compute), is_host(cache->device().is_host),
      input(cache->device().staging_buft), ids(cache->device().staging_buft), output(cache->device().staging_buft) {}

void device_worker::start() {
    if (!cache->device().is_async) {
        thread = std::thread([self = shared_from_this()] { self->serve(); });
    }
}

void device_worker::stop() {
    if (!thread.joinable()) {
        return;
    }
    if (cache->is_lost() && state.load() == JOB_SUBMITTED) {
        thread.detach(); // it waits for an answer that never comes, and keeps the memory that it uses alive
        return;
    }
    set_state(JOB_STOP);
    thread.join();
}

bool device_worker::prepare(subgraph & next, float *& input_out, int32_t *& ids_out) {
    sub         = &next;
    input_data  = is_host ? sub->input->data : input.reserve(ggml_nbytes(sub->input));
    ids_data    = is_host ? sub->ids->data : ids.reserve(ggml_nbytes(sub->ids));
    output_data = is_host ? sub->out->data : output.reserve(ggml_nbytes(sub->out));
    input_out   = (float *) input_data;
    ids_out     = (int32_t *) ids_data;
    return input_data != nullptr && ids_data != nullptr && output_data != nullptr;
}

// false: the backend failed; some backends report that by an exception
bool device_worker::compute() try {
    begin_ns   = now_ns();
    is_awaited = false;
    if (!is_host) {
        ggml_backend_tensor_set_async(backend, sub->input, input_data, 0, ggml_nbytes(sub->input));
        ggml_backend_tensor_set_async(backend, sub->ids, ids_data, 0, ggml_nbytes(sub->ids));
    }
    if (ggml_backend_graph_compute_async(backend, sub->graph) != GGML_STATUS_SUCCESS) {
        return false;
    }
    if (!is_host) {
        ggml_backend_tensor_get_async(backend, sub->out, output_data, 0, ggml_nbytes(sub->out));
    }
    return true;
} catch (const std::exception &) {
    return false;
}

// false: the backend failed. The thread's state is set by its caller: with the lock, and not over a JOB_STOP
bool device_worker::synchronize() try {
    if (!is_awaited) {
        is_awaited = true;
        ggml_backend_synchronize(backend);
        device_ns = now_ns() - begin_ns;
    }
    return true;
} catch (const std::exception &) {
    return false;
}

void device_worker::set_state(job_state next) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        state.store(next, std::memory_order_release);
    }
    (next == JOB_SUBMITTED || next == JOB_STOP ? wake_device : wake_caller).notify_one();
}

void device_worker::serve() {
    while (true) {
        for (int i = 0; i < n_spins && state.load(std::memory_order_acquire) != JOB_SUBMITTED; i++) {
            relax();
        }
        {
            std::unique_lock<std::mutex> lock(mutex);
            wake_device.wait(lock, [this] { return state == JOB_SUBMITTED || state == JOB_STOP; });
            if (state == JOB_STOP) {
                return;
            }
        }
        const bool is_started = compute();
        set_state(synchronize() && is_started ? JOB_DONE : JOB_FAILED);
    }
}

bool device_worker::is_finished() const {
    const job_state current = state.load(std::memory_order_acquire);
    return current == JOB_DONE || current == JOB_FAILED;
}

// false: the device failed or did not answer
bool device_worker::wait_for_thread() {
    for (int i = 0; i < n_spins && !is_finished(); i++) {
        relax();
    }
    std::unique_lock<std::mutex> lock(mutex);
    const int64_t                limit_ns = now_ns() + std::chrono::nanoseconds(device_health::answer_limit).count();
    while (!wake_caller.wait_for(lock, lost_check_interval, [this] { return is_finished(); })) {
        if (now_ns() > limit_ns) {
            cache->mark_lost("it has not answered for two minutes");
        }
        if (cache->is_lost()) {
            return false;
        }
    }
    return state == JOB_DONE;
}

void device_worker::submit() {
    if (thread.joinable()) {
        set_state(JOB_SUBMITTED);
    } else {
        state.store(compute() ? JOB_SUBMITTED : JOB_FAILED);
    }
}

const float * device_worker::wait() {
    bool is_done;
    if (thread.joinable()) {
        is_done = wait_for_thread();
    } else {
        if (!synchronize()) {
            state.store(JOB_FAILED);
        }
        is_done = state != JOB_FAILED;
    }
    return is_done ? (const float *) output_data : nullptr;
}

void device_worker::wait_idle() {
    if (state == JOB_SUBMITTED) {
        wait();
    }
}

} // namespace moeedge
