// Instance: our backend's state for one llama.cpp context. The backend's device is private to the instance, because
// ggml's scheduler asks a device, not a backend, what it supports: so each context has its own claims.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "blocks.h"
#include "ggml-backend-impl.h"
#include "sensor.h"

namespace moeedge {

struct instance {
    int64_t             id = 0;
    std::thread::id     creator;
    ggml_backend_device device; // private copy of the registered device; its context is this instance
    ggml_backend_t      cpu     = nullptr;
    ggml_backend_dev_t  cpu_dev = nullptr;
    bool                has_gpu = false; // some device of the process may offload big batches by itself

    std::atomic<int> claims{ MOEEDGE_CLAIMS_BLOCK };
    int              phase     = MOEEDGE_PHASE_AUTO;
    int              n_threads = 0;

    std::unique_ptr<sensor> sense; // null until configured
    moeedge_stats           stats = {};

    std::vector<moe_block> blocks;         // of the graph computed last
    uint64_t               blocks_uid = 0; // ggml's id of that graph

    // scratch for graphs that are sensed from inside, kept to avoid allocations
    struct probe {
        instance *        self;
        const moe_block * block;
    };
    std::vector<probe>         probes; // user data of the sensor's nodes
    std::vector<ggml_tensor *> nodes;
    std::vector<uint8_t>       arena; // the sensor's nodes
};

// live instances, guarded by a mutex; the only global state
int64_t registry_add(instance * self);
void    registry_remove(instance * self);
instance * registry_find(int64_t id);
int64_t registry_newest_of(std::thread::id creator);
int     registry_size();
int     registry_default_claims();
void    registry_set_default_claims(int claims);

ggml_backend_reg_t backend_reg();

} // namespace moeedge
