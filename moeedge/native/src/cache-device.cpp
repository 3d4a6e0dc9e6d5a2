#include "cache-device.h"

#include <algorithm>
#include <cstring>

#include "ggml-cpu.h"

namespace moeedge {

static const char emulated_name[] = "emulated";
static const char ram_name[]      = "ram";

cache_device::~cache_device() {
    if (health && health->is_lost()) {
        return; // it would never answer
    }
    for (ggml_backend_t backend : { compute, transfer, stream }) {
        ggml_backend_free(backend);
    }
}

bool is_gpu(ggml_backend_dev_t dev) {
    const enum ggml_backend_dev_type type = ggml_backend_dev_type(dev);
    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

static std::string known_devices() {
    std::string names = emulated_name;
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_dev_t dev = ggml_backend_dev_get(i);
        if (is_gpu(dev)) {
            names += std::string(", ") + ggml_backend_dev_name(dev);
        }
    }
    return names;
}

bool is_rpc(ggml_backend_dev_t dev) {
    return std::strncmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC", 3) == 0;
}

bool cache_device::find(const moeedge_cache_config & config, std::string & error) {
    is_emulated = std::strcmp(config.device, emulated_name) == 0;
    is_ram      = std::strcmp(config.device, ram_name) == 0;
    const bool is_cpu = is_emulated || is_ram;
    dev = is_cpu ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : ggml_backend_dev_by_name(config.device);
    if (dev == nullptr || (!is_cpu && !is_gpu(dev))) {
        error = "Unknown device " + std::string(config.device) + ". Available: " + known_devices() + ".";
        return false;
    }
    n_threads   = is_cpu ? std::max(config.emulated_threads, 1) : 0;
    name        = config.device;
    description = ggml_backend_dev_description(dev);
    health      = device_health::create(dev, is_rpc(dev));
    return true;
}

ggml_backend_buffer_type_t extra_buffer_type(ggml_backend_dev_t dev, const char * name) {
    void * get = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t * types = get ? ((ggml_backend_dev_get_extra_bufts_t) get)(dev) : nullptr;
    while (types && *types && std::strcmp(ggml_backend_buft_name(*types), name) != 0) {
        types++;
    }
    return types ? *types : nullptr;
}

void set_n_threads(ggml_backend_t backend, int n_threads) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads");
    if (set) {
        set(backend, n_threads);
    }
}

static ggml_backend_t start_instance(ggml_backend_dev_t dev, int n_threads) {
    ggml_backend_t backend = ggml_backend_dev_init(dev, nullptr);
    if (backend && n_threads > 0) {
        set_n_threads(backend, n_threads);
    }
    return backend;
}

void cache_device::start(bool has_stage) {
    if (is_ram) {
        buft = staging_buft = ggml_backend_cpu_buffer_type();
        is_host = is_started = true;
        return;
    }
    buft     = is_emulated ? ggml_backend_cpu_buffer_type() : ggml_backend_dev_buffer_type(dev);
    is_host  = ggml_backend_buft_is_host(buft);
    compute  = start_instance(dev, n_threads);
    transfer = is_host ? nullptr : start_instance(dev, n_threads);
    stream   = is_host || !has_stage ? nullptr : start_instance(dev, n_threads);
    if (compute == nullptr || (!is_host && transfer == nullptr) || (!is_host && has_stage && stream == nullptr)) {
        return;
    }

    ggml_backend_dev_props props;
    ggml_backend_dev_get_props(dev, &props);
    // a remote worker's queue is a socket whose answers are awaited
    is_async     = props.caps.async && !is_remote() && !is_host;
    staging_buft = is_host ? nullptr : ggml_backend_dev_host_buffer_type(dev);
    if (staging_buft == nullptr) {
        staging_buft = ggml_backend_cpu_buffer_type();
    }
    is_started = true;
}

std::shared_ptr<cache_device> cache_device::open(const moeedge_cache_config & config, std::string & error) {
    auto self = std::make_shared<cache_device>();
    if (!self->find(config, error)) {
        return nullptr;
    }
    if (!self->health->run([self, has_stage = config.n_stage > 0] { self->start(has_stage); })) {
        error = "The device " + self->name + " is lost: " + self->health->reason() + ".";
        return nullptr;
    }
    if (!self->is_started) {
        error = "The device " + self->name + " did not start.";
        return nullptr;
    }
    return self;
}

} // namespace moeedge
