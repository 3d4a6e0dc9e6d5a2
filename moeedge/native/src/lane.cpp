#include "lane.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "timing.h"

namespace moeedge {

namespace {

// how often a waiting caller looks whether the device is lost
constexpr auto loss_interval = std::chrono::milliseconds(50);
// a device that has not answered by then is taken for lost: the slowest block computes in a fraction of this
constexpr int64_t answer_limit_ns = 120ll * 1000 * 1000 * 1000;
// turns of a short wait (some 40 us) without giving the core away: a thread that sleeps takes as long to wake up
constexpr int n_spins = 1000;

enum class job { idle, submitted, done, failed, stop };

// host memory that grows
class staging {
  public:
    explicit staging(ggml_backend_buffer_type_t type) : buft(type) {}
    ~staging() {
        if (buffer) {
            ggml_backend_buffer_free(buffer);
        }
    }
    void * reserve(size_t bytes) {
        if (buffer == nullptr || ggml_backend_buffer_get_size(buffer) < bytes) {
            if (buffer) {
                ggml_backend_buffer_free(buffer);
            }
            buffer = ggml_backend_buft_alloc_buffer(buft, bytes + bytes / 2);
        }
        return buffer ? ggml_backend_buffer_get_base(buffer) : nullptr;
    }

  private:
    ggml_backend_buffer_type_t buft;
    ggml_backend_buffer_t      buffer = nullptr;
};

} // namespace

struct device_lane::state {
    explicit state(std::shared_ptr<expert_cache> c)
        : cache(std::move(c)), backend(cache->compute_backend()), input(cache->staging_buft()), ids(cache->staging_buft()),
          output(cache->staging_buft()) {}

    std::shared_ptr<expert_cache> cache;
    ggml_backend_t                backend;
    staging                       input, ids, output;

    subgraph * sub         = nullptr;
    void *     input_data  = nullptr;
    void *     ids_data    = nullptr;
    void *     output_data = nullptr;
    int64_t    begin_ns    = 0;
    int64_t    busy_ns     = 0;
    bool       is_awaited  = false; // since it was started

    std::thread             thread; // not joinable for a device that is asynchronous by itself
    std::mutex              mutex;
    std::condition_variable wake_device;
    std::condition_variable wake_caller;
    std::atomic<job>        now{ job::idle };

    bool start() {
        begin_ns   = now_ns();
        is_awaited = false;
        if (!cache->is_host()) {
            ggml_backend_tensor_set_async(backend, sub->input, input_data, 0, ggml_nbytes(sub->input));
            ggml_backend_tensor_set_async(backend, sub->ids, ids_data, 0, ggml_nbytes(sub->ids));
        }
        if (ggml_backend_graph_compute_async(backend, sub->graph) != GGML_STATUS_SUCCESS) {
            return false;
        }
        if (!cache->is_host()) {
            ggml_backend_tensor_get_async(backend, sub->out, output_data, 0, ggml_nbytes(sub->out));
        }
        return true;
    }

    void finish() {
        if (is_awaited) {
            return;
        }
        ggml_backend_synchronize(backend);
        busy_ns    = now_ns() - begin_ns;
        is_awaited = true;
    }

    void set(job next) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            now.store(next, std::memory_order_release);
        }
        (next == job::submitted || next == job::stop ? wake_device : wake_caller).notify_one();
    }

    // the thread's loop
    void serve() {
        while (true) {
            for (int i = 0; i < n_spins && now.load(std::memory_order_acquire) != job::submitted; i++) {
                relax();
            }
            job next;
            {
                std::unique_lock<std::mutex> lock(mutex);
                wake_device.wait(lock, [this] { return now == job::submitted || now == job::stop; });
                next = now;
            }
            if (next == job::stop) {
                return;
            }
            const bool ok = start();
            finish();
            set(ok ? job::done : job::failed);
        }
    }

    bool is_finished() const {
        const job at = now.load(std::memory_order_acquire);
        return at == job::done || at == job::failed;
    }

    // false: the device did not answer
    bool await() {
        for (int i = 0; i < n_spins && !is_finished(); i++) {
            relax();
        }
        std::unique_lock<std::mutex> lock(mutex);
        const int64_t                limit_ns = now_ns() + answer_limit_ns;
        while (!wake_caller.wait_for(lock, loss_interval, [this] { return is_finished(); })) {
            if (now_ns() > limit_ns) {
                cache->mark_lost("it has not answered for two minutes");
            }
            if (cache->lost()) {
                return false;
            }
        }
        return now == job::done;
    }
};

device_lane::device_lane(std::shared_ptr<expert_cache> cache) : self(std::make_shared<state>(std::move(cache))) {
    if (!self->cache->is_async()) {
        self->thread = std::thread([kept = self] { kept->serve(); });
    }
}

device_lane::~device_lane() {
    if (!self->thread.joinable()) {
        return;
    }
    const bool is_stuck = self->cache->lost() && self->now.load() == job::submitted;
    if (is_stuck) {
        self->thread.detach(); // it waits for an answer that never comes, and keeps what it uses alive
        return;
    }
    self->set(job::stop);
    self->thread.join();
}

bool device_lane::prepare(subgraph & sub, float *& input, int32_t *& ids) {
    state & s = *self;
    s.sub     = &sub;
    if (s.cache->is_host()) {
        s.input_data  = sub.input->data;
        s.ids_data    = sub.ids->data;
        s.output_data = sub.out->data;
    } else {
        s.input_data  = s.input.reserve(ggml_nbytes(sub.input));
        s.ids_data    = s.ids.reserve(ggml_nbytes(sub.ids));
        s.output_data = s.output.reserve(ggml_nbytes(sub.out));
    }
    input = (float *) s.input_data;
    ids   = (int32_t *) s.ids_data;
    return s.input_data != nullptr && s.ids_data != nullptr && s.output_data != nullptr;
}

void device_lane::submit() {
    if (self->thread.joinable()) {
        self->set(job::submitted);
        return;
    }
    self->now.store(self->start() ? job::submitted : job::failed);
}

const float * device_lane::wait() {
    state & s = *self;
    if (s.thread.joinable()) {
        if (!s.await()) {
            return nullptr;
        }
    } else {
        s.finish();
        if (s.now == job::failed) {
            return nullptr;
        }
    }
    return (const float *) s.output_data;
}

int64_t device_lane::busy_ns() const {
    return self->busy_ns;
}

} // namespace moeedge
