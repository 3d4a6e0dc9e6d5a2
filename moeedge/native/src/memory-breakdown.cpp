// Bytes that a llama.cpp context has in each kind of memory, as llama.cpp itself accounts for them.

#include <cstdio>
#include <map>

#include "c-calls.h"

namespace moeedge {

// as llama.cpp returns it; no installed header declares it
struct memory_breakdown_data {
    size_t model, context, compute;
};

using memory_breakdown   = std::map<ggml_backend_buffer_type_t, memory_breakdown_data>;
using memory_breakdown_f = memory_breakdown (*)(const void * context);

// one, or several as one (META)
static bool is_any_gpu(ggml_backend_dev_t dev) {
    return dev != nullptr && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU &&
           ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// backends that share the CPU's buffer type: without allocation each of them counts the one compute buffer as its own
static size_t count_cpu_sharers(const memory_breakdown & breakdown) {
    size_t n = 1; // the CPU, unless it computes in a GPU's host buffers
    for (const auto & entry : breakdown) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(entry.first);
        if (is_any_gpu(dev) && ggml_backend_dev_host_buffer_type(dev) != nullptr) {
            n = 0;
        }
    }
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        n += ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_ACCEL &&
             ggml_backend_dev_buffer_type(dev) == ggml_backend_cpu_buffer_type();
    }
    return n;
}

static int read_memory_uses(void * get_breakdown, const void * context, bool is_simulated, moeedge_memory_use * out, int n_max) {
    const memory_breakdown breakdown = ((memory_breakdown_f) get_breakdown)(context);
    const size_t           n_sharers = is_simulated ? count_cpu_sharers(breakdown) : 1;
    int                    n         = 0;
    for (const auto & [buft, data] : breakdown) {
        if (n == n_max) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        moeedge_memory_use & use = out[n++];
        ggml_backend_dev_t   dev = ggml_backend_buft_get_device(buft);
        std::snprintf(use.buffer_type, sizeof(use.buffer_type), "%s", ggml_backend_buft_name(buft));
        std::snprintf(use.device, sizeof(use.device), "%s", is_any_gpu(dev) ? ggml_backend_dev_name(dev) : "");
        use.on_gpu        = is_any_gpu(dev) && !ggml_backend_buft_is_host(buft); // a GPU's host buffers are host memory
        use.weights_bytes = (int64_t) data.model;
        use.memory_bytes  = (int64_t) data.context;
        use.compute_bytes = (int64_t) data.compute;
        if (buft == ggml_backend_cpu_buffer_type() && n_sharers > 1) {
            use.compute_bytes /= (int64_t) n_sharers;
        }
    }
    return n;
}

} // namespace moeedge

int moeedge_memory_uses(void * get_breakdown, const void * context, int simulated, moeedge_memory_use * out, int n_max) {
    if (get_breakdown == nullptr || context == nullptr || out == nullptr) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return moeedge::guarded([&] { return moeedge::read_memory_uses(get_breakdown, context, simulated != 0, out, n_max); });
}
