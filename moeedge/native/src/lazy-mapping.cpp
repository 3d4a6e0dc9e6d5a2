// Lets llama.cpp map a model file without reading it.
//
// llama.cpp maps a file with MAP_POPULATE, which reads all of it, unless the CPU's registry says that the machine has several
// NUMA nodes (llama_model_loader::init_mappings). While a thread loads a model lazily, the registry says so to this thread.
// Kernels ask ggml_is_numa themselves and do not notice.

#include <cstring>
#include <mutex>

#include "c-calls.h"

namespace moeedge {

using get_proc_address_f = void * (*) (ggml_backend_reg_t reg, const char * name);

static std::mutex         mutex;
static int                n_threads; // that load lazily
static get_proc_address_f original;
static thread_local bool  is_lazy;

static bool several_numa_nodes() {
    return true;
}

static void * get_proc_address(ggml_backend_reg_t reg, const char * name) {
    if (is_lazy && std::strcmp(name, "ggml_backend_cpu_is_numa") == 0) {
        return (void *) several_numa_nodes;
    }
    return original(reg, name);
}

static void set_lazy_mapping(bool on) {
    if (on == is_lazy) {
        return;
    }
    std::lock_guard<std::mutex> lock(mutex);
    ggml_backend_dev_t          cpu   = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_i &        iface = ggml_backend_dev_backend_reg(cpu)->iface;
    if (on && n_threads == 0) {
        original               = iface.get_proc_address;
        iface.get_proc_address = get_proc_address;
    }
    is_lazy = on;
    n_threads += on ? 1 : -1;
    if (n_threads == 0) {
        iface.get_proc_address = original;
    }
}

} // namespace moeedge

int moeedge_set_lazy_mapping(int on) {
    return moeedge::guarded([on] { moeedge::set_lazy_mapping(on != 0); });
}
