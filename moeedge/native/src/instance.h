// Instance: our backend's state for one llama.cpp context. The backend's device is private to the instance, because
// ggml's scheduler asks a device, not a backend, what it supports: so each context has its own claims.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "blocks.h"
#include "cache.h"
#include "capture.h"
#include "ggml-backend-impl.h"
#include "hybrid.h"
#include "inputs.h"
#include "sensor.h"

namespace moeedge {

// what was found in one of llama.cpp's graphs
struct parsed_graph {
    std::vector<moe_block>    blocks;
    std::vector<placed_chain> placed; // one per block while a cache is attached
    std::vector<block_input>  inputs; // while somebody wants to know
};

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

    std::unique_ptr<input_capture> capture; // null: nothing is kept
    moeedge_block_hook             hook      = nullptr;
    void *                         hook_user = nullptr;

    std::shared_ptr<expert_cache>    cache;  // null: everything on the CPU
    std::unique_ptr<hybrid_executor> hybrid; // of the cache

    std::unordered_map<uint64_t, parsed_graph> parsed;   // by ggml's id of the graph
    std::vector<bool>                          is_split; // per block of the graph at hand: given to the executor

    // scratch for graphs that are sensed from inside, kept to avoid allocations
    struct probe {
        instance *        self;
        const moe_block * block;
    };
    std::vector<probe>         probes; // user data of the sensor's nodes
    std::vector<ggml_tensor *> nodes;
    std::vector<uint8_t>       arena; // the sensor's nodes
    std::vector<int32_t>       hook_ids;
    std::vector<float>         hook_input;
};

// live instances, guarded by a mutex; the only global state
int64_t registry_add(instance * self);
void    registry_remove(instance * self);
instance * registry_find(int64_t id);
int64_t registry_newest_of(std::thread::id creator);
int     registry_size();
void    registry_detach(const expert_cache * cache); // from all instances; none of them may compute
int     registry_default_claims();
void    registry_set_default_claims(int claims);

ggml_backend_reg_t backend_reg();

} // namespace moeedge
