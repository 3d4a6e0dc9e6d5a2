// Device: where the slots are, and the backend instances that compute and transfer there.
//
// "emulated" is the CPU once more: memory and threads of its own, so that everything about a device but its speed can be
// seen on a machine without one.

#pragma once

#include <memory>
#include <string>

#include "ggml-backend.h"
#include "loss.h"
#include "moeedge.h"

namespace moeedge {

// whose memory is the host's own, and whose transfers are copies
constexpr char emulated_name[] = "emulated";

class cache_device : public std::enable_shared_from_this<cache_device> {
  public:
    cache_device() = default;
    ~cache_device();
    cache_device(const cache_device &)             = delete;
    cache_device & operator=(const cache_device &) = delete;

    // null with the reason in `error`
    static std::shared_ptr<cache_device> open(const moeedge_cache_config & config, std::string & error);

    // an instance has its own stream where the device has streams; they are freed with the device
    ggml_backend_t compute  = nullptr;
    ggml_backend_t transfer = nullptr; // the mover's; null: transfers are plain copies
    ggml_backend_t stream   = nullptr; // for staging slots; null without those, too

    ggml_backend_dev_t         dev          = nullptr;
    ggml_backend_buffer_type_t buft         = nullptr;
    ggml_backend_buffer_type_t staging_buft = nullptr; // pinned where the device offers it, else the CPU's
    bool                       is_emulated  = false;
    bool                       is_remote    = false;
    bool                       is_host      = false; // its buffers are host memory
    bool                       is_async     = false; // computes and copies in streams of its own
    int                        n_threads    = 0;     // of the host's cores, in use while it computes
    std::string                name;
    std::string                description;

    std::shared_ptr<device_loss> loss;

  private:
    bool find(const moeedge_cache_config & config, std::string & error);
    void start(bool has_stage);

    bool is_started = false;
};

// of a worker in another process, which calls itself a GPU
bool is_rpc(ggml_backend_dev_t dev);

} // namespace moeedge
