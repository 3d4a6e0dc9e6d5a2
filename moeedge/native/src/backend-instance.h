// Instance: the backend's context struct, one per llama.cpp context. It holds a private copy of the backend's device, because
// ggml's scheduler asks a device, not a backend, which operations it supports: so each context has its own offload scope.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "expert-cache.h"
#include "expert-matmuls.h"
#include "ggml-backend-impl.h"
#include "hybrid-executor.h"
#include "moe-blocks.h"
#include "ram-executor.h"
#include "router-inputs.h"
#include "routing-sensor.h"

namespace moeedge {

// findings of one of llama.cpp's graphs
struct parsed_graph {
    std::vector<moe_block>    blocks;
    std::vector<placed_chain> placed; // one per block while a cache is attached or pairs without weight are left out
    std::vector<router_input> inputs; // while activations are captured or a hook is set
};

struct instance {
    int64_t             id = 0;
    std::thread::id     creator;
    ggml_backend_device device; // copy of the registered device; its context is this instance
    ggml_backend_t      cpu     = nullptr;
    ggml_backend_dev_t  cpu_dev = nullptr;
    bool                has_gpu = false; // another device of the process may offload large batches

    // of the activations that the backend computes on: the CPU's, or pinned memory that a GPU copies to and from
    ggml_backend_buffer_type_t buft = nullptr;

    std::atomic<int> offload_scope{ MOEEDGE_OFFLOAD_SCOPE_MOE };
    int              phase     = MOEEDGE_PHASE_AUTO;
    int              n_threads = 0;

    ggml_abort_callback abort      = nullptr; // whether to stop computing; null: never
    void *              abort_data = nullptr;
    // of the CPU backend; null: it has none
    ggml_backend_set_abort_callback_t set_cpu_abort = nullptr;

    std::unique_ptr<routing_sensor> sensor; // null until configured
    expert_matmuls                  matmuls; // what the CPU computes of graphs
    bool                            needs_ids  = false; // blocks were computed apart, and may be again
    bool                            keeps_ids  = false; // the graph that llama.cpp planned last has ids and weights at its end
    int64_t                         n_graphs   = 0;
    int64_t                         n_blocks   = 0;
    int64_t                         sense_ns   = 0;
    int64_t                         compute_ns = 0;

    std::unique_ptr<activation_capture> capture; // null: no activations are captured
    moeedge_block_hook                  hook      = nullptr;
    void *                              hook_user = nullptr;
    const ggml_cgraph *                 hooked    = nullptr; // during a call of the hook: the graph, and
    int                                 i_hooked  = 0;       // its first node of the block that is computed next

    std::shared_ptr<expert_cache>    cache;  // null: all experts on the CPU
    std::unique_ptr<hybrid_executor> hybrid; // of the cache
    std::shared_ptr<expert_cache>    ram;    // slots in host memory; null: experts are computed from the mapped file
    std::unique_ptr<ram_executor>    from_ram; // of these slots
    std::unique_ptr<pair_columns>    pairs;  // null: pairs without weight are computed as well

    // inputs of the next graph whose copies from a GPU are under way
    std::vector<arriving_tensor> arriving;

    std::unordered_map<uint64_t, parsed_graph> parsed;     // by ggml's id of the graph
    std::vector<bool>                          is_counted; // per block of the current graph: in the cache's counters

    // why optimize_graph failed; it cannot return a status, so the next graph_compute does
    enum ggml_status optimize_status = GGML_STATUS_SUCCESS;

    // scratch, kept to avoid allocations
    std::vector<int32_t> hook_ids;
    std::vector<float>   hook_input;
};

// From the next graph on. An instance has a cache of the device "ram", one of another device, or both; a cache replaces one of
// its kind. Never while the instance computes.
void set_cache(instance * self, std::shared_ptr<expert_cache> cache);
// detaches that one, if it is attached
void remove_cache(instance * self, const expert_cache * cache);

// what instances that are created from now on begin with
struct instance_defaults {
    std::atomic<int>                        offload_scope{ MOEEDGE_OFFLOAD_SCOPE_MOE };
    std::atomic<ggml_backend_buffer_type_t> host_buft{ nullptr }; // null: the CPU's
};
inline instance_defaults defaults;

// live instances, guarded by a mutex
void       instances_add(instance * self);
void       instances_remove(instance * self);
instance * instances_find(int64_t id);
int64_t    instances_newest_of(std::thread::id creator); // 0: none
int        instances_count();
void       instances_detach(const expert_cache * cache); // from all instances; none of them may compute

// asks ggml's allocator to keep the tensors that the sensor reads after the graph
void             optimize_graph(instance * self, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);
enum ggml_status compute_graph(instance * self, ggml_cgraph * graph);

ggml_backend_reg_t backend_reg();

// what a driver threw inside our backend on this thread, empty: nothing; the caller empties it
std::string & driver_exception();

} // namespace moeedge
