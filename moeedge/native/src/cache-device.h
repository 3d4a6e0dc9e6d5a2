// Cache device: the device that holds the slots, and the backend instances that compute and transfer there.
//
// "emulated" is the CPU with memory and threads of its own: it shows everything about a device except its speed on a machine
// without one. "ram" is host memory for a model whose file does not fit it: slots that the CPU itself computes from, and
// experts outside them are loaded on demand.

#pragma once

#include <memory>
#include <string>

#include "device-health.h"
#include "ggml-backend.h"
#include "moeedge-cache.h"
#include "no-copy.h"

namespace moeedge {

class cache_device : public std::enable_shared_from_this<cache_device>, no_copy {
  public:
    ~cache_device();

    // null with the reason in `error`
    static std::shared_ptr<cache_device> open(const moeedge_cache_config & config, std::string & error);

    // backend instances; each has its own stream where the device has streams. They are freed with the device
    ggml_backend_t compute  = nullptr;
    ggml_backend_t transfer = nullptr; // the mover's; null: transfers are plain copies
    ggml_backend_t stream   = nullptr; // for staging slots; null without them, too

    ggml_backend_dev_t         dev          = nullptr;
    ggml_backend_buffer_type_t buft         = nullptr;
    ggml_backend_buffer_type_t staging_buft = nullptr; // pinned where the device offers it, else the CPU's
    bool                       is_emulated  = false;
    bool                       is_ram       = false; // it has no backend instances: the CPU computes
    bool                       is_host      = false; // its buffers are host memory
    bool                       is_async     = false; // graph_compute_async returns before it is done (CUDA, not RPC)
    int                        n_threads    = 0;     // of the host's cores, in use while it computes
    std::string                name;
    std::string                description;

    std::shared_ptr<device_health> health;

    bool        is_remote() const { return health->is_remote; }
    std::string lost_message() const { return "The device " + name + " is lost: " + health->reason() + "."; }

  private:
    bool find(const moeedge_cache_config & config, std::string & error);
    void start(bool has_stage);

    bool is_started = false;
};

// lists the buffer types that a device has beside its usual one; the one of that name, null: there is none
ggml_backend_buffer_type_t extra_buffer_type(ggml_backend_dev_t dev, const char * name);

// of a CPU backend; nothing where it has no such setting
void set_n_threads(ggml_backend_t backend, int n_threads);

bool is_gpu(ggml_backend_dev_t dev);

// of a worker in another process, which reports itself as a GPU
bool is_rpc(ggml_backend_dev_t dev);

} // namespace moeedge
