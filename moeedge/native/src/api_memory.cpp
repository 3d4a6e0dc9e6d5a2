// What a context of llama.cpp takes of each kind of memory, in bytes: llama.cpp's own account of it.

#include <cstdio>
#include <map>

#include "imagined.h"
#include "moeedge.h"

namespace {

// as llama.cpp returns it; its header for this is none that is installed
struct breakdown_data {
    size_t model, context, compute;
};

using breakdown   = std::map<ggml_backend_buffer_type_t, breakdown_data>;
using breakdown_f = breakdown (*)(const void * context);

bool is_gpu(ggml_backend_dev_t dev) {
    return dev != nullptr && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU &&
           ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

// backends that share the CPU's buffer type; each of them counts the one compute buffer as its own when nothing is allocated
size_t n_cpu_sharers(const breakdown & found) {
    size_t n = 1; // the CPU, unless it computes in a GPU's host buffers
    for (const auto & entry : found) {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(entry.first);
        if (is_gpu(dev) && ggml_backend_dev_host_buffer_type(dev) != nullptr) {
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

} // namespace

extern "C" {

void * moeedge_imagined_gpu(void) {
    return moeedge::imagined_gpu();
}

int moeedge_memory_uses(void * get_breakdown, const void * context, int simulated, moeedge_memory_use * out, int n_max) {
    if (get_breakdown == nullptr || context == nullptr || out == nullptr) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    const breakdown found     = ((breakdown_f) get_breakdown)(context);
    const size_t    n_sharers = simulated ? n_cpu_sharers(found) : 1;
    int             n         = 0;
    for (const auto & entry : found) {
        if (n == n_max) {
            return MOEEDGE_BAD_ARGUMENT;
        }
        moeedge_memory_use & use = out[n++];
        ggml_backend_dev_t   dev = ggml_backend_buft_get_device(entry.first);
        std::snprintf(use.buffer_type, sizeof(use.buffer_type), "%s", ggml_backend_buft_name(entry.first));
        std::snprintf(use.device, sizeof(use.device), "%s", is_gpu(dev) ? ggml_backend_dev_name(dev) : "");
        // a GPU's host buffers are the machine's memory
        use.on_gpu  = is_gpu(dev) && !ggml_backend_buft_is_host(entry.first);
        use.weights = (int64_t) entry.second.model;
        use.memory  = (int64_t) entry.second.context;
        use.compute = (int64_t) entry.second.compute;
        if (entry.first == ggml_backend_cpu_buffer_type() && n_sharers > 1) {
            use.compute /= (int64_t) n_sharers;
        }
    }
    return n;
}

} // extern "C"
