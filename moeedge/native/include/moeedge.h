// moeedge native library: a ggml backend that attaches to stock llama.cpp, and the plain C interface to its sensor and to
// the expert cache, which keeps single experts on a device.
//
// The backend is of device type ACCEL: every llama.cpp context of the process creates an instance of it. An instance is
// named here by its id (1, 2, ...); all state belongs to an instance, only the list of instances is global.
// Every function returns 0 on success and a negative moeedge_status otherwise, unless said differently.
// Calls on one instance must not overlap with a llama_decode of its context; calls on different instances may.
// Calls on a cache may come from any thread at any time, but for attaching and destroying it: no decode may use it then.

#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define MOEEDGE_API __declspec(dllexport)
#else
#    define MOEEDGE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum moeedge_status {
    MOEEDGE_OK               = 0,
    MOEEDGE_NO_INSTANCE      = -1, // no live instance of that id
    MOEEDGE_BAD_ARGUMENT     = -2,
    MOEEDGE_OUT_OF_MEMORY    = -3,
    MOEEDGE_NOT_CONFIGURED   = -4, // moeedge_instance_configure was not called
    MOEEDGE_VERSION_MISMATCH = -5, // another ggml than the one compiled against
    MOEEDGE_NO_CACHE         = -6, // no live cache of that id
    MOEEDGE_NO_DEVICE        = -7, // no device of that name, or it cannot be used
    MOEEDGE_DEVICE_LOST      = -8, // the device failed while in use
    MOEEDGE_FILE_ERROR       = -9, // a model file cannot be read or is too short
    MOEEDGE_TIMEOUT          = -10,
};

// what an instance asks llama.cpp's scheduler for
enum moeedge_claims {
    MOEEDGE_CLAIMS_NONE  = 0, // nothing: the context runs as stock llama.cpp does
    MOEEDGE_CLAIMS_BLOCK = 1, // the MoE blocks whose weights lie in host memory (beside a GPU, and in stock programs)
    MOEEDGE_CLAIMS_WHOLE = 2, // every operation that the CPU backend supports: one split, no seams (without a GPU)
};

// what a decode call is for
enum moeedge_phase {
    MOEEDGE_PHASE_AUTO    = 0, // not told: more than one token is prefill, one is decode
    MOEEDGE_PHASE_PREFILL = 1,
    MOEEDGE_PHASE_DECODE  = 2,
    MOEEDGE_PHASE_DRAFT   = 3,
    MOEEDGE_PHASE_VERIFY  = 4,
};

// routing of one graph (one ubatch); the arrays live in the instance and are overwritten when the ring comes round
struct moeedge_frame {
    int64_t         serial;       // 1, 2, ... per instance
    int32_t         phase;        // moeedge_phase, never AUTO
    int32_t         n_tokens;     // tokens of the first MoE layer; no later layer sees more
    const int32_t * layer_tokens; // [n_layers] tokens seen; 0: no experts. The last layer sees only rows with outputs
    const int32_t * ids;          // [n_layers, n_tokens, n_used] selected experts, -1 where fewer were used
    const float   * weights;      // [n_layers, n_tokens, n_used] router weights, NaN where the graph hides them
};

// what a context's small graphs (of at most 32 tokens) leave behind when they are done; a sum of these
enum moeedge_capture {
    MOEEDGE_CAPTURE_NONE   = 0,
    MOEEDGE_CAPTURE_INPUTS = 1, // what each layer's router reads; in a dense layer, what its FFN reads
    MOEEDGE_CAPTURE_PROBS  = 2, // what the router makes of it: a value per expert, not normalised where the model does not
};

// of the newest small graph; the arrays live in the instance and are overwritten by the next one
struct moeedge_captured {
    int64_t         serial;       // 1, 2, ... per instance; 0: nothing yet
    int32_t         n_layers;
    int32_t         stride;       // rows from one layer to the next
    int32_t         width;        // values per row: n_embd, or experts
    const int32_t * layer_tokens; // [n_layers] rows; 0: nothing is known of the layer
    const float *   rows;         // [n_layers, stride, width]
};

// a MoE block whose experts are computed next (in a dense model: the FFN); valid during the call
struct moeedge_block {
    int32_t         layer, phase, n_tokens, n_used, n_embd;
    const int32_t * ids;   // [n_tokens, n_used] the chosen experts; null in a dense model
    const float *   input; // [n_tokens, n_embd] what the router read; null where it is not known
};

// called by the thread that decodes
typedef void (*moeedge_block_hook)(void * user, const struct moeedge_block * block);

struct moeedge_stats {
    int64_t graphs;     // graphs (or graph parts) computed
    int64_t blocks;     // MoE blocks seen
    int64_t sense_ns;   // finding the blocks, copying ids and weights, counting
    int64_t compute_ns; // all of graph_compute, sensing included
};

MOEEDGE_API const char * moeedge_ggml_version(void);        // compiled against
MOEEDGE_API const char * moeedge_llama_cpp_version(void);   // llama-cpp-python, compiled against
MOEEDGE_API int          moeedge_backend_api_version(void); // compiled against

// of this header: structures and functions as a caller was written for
#define MOEEDGE_ABI_VERSION 4
MOEEDGE_API int moeedge_abi_version(void);

// registers the backend with the ggml of this process; calling it again does nothing
MOEEDGE_API int moeedge_register(void);
// what instances created from now on claim until told otherwise (BLOCK at first)
MOEEDGE_API int moeedge_set_default_claims(int claims);

// id of the newest live instance that the calling thread created, 0 without one
MOEEDGE_API int64_t moeedge_newest_instance(void);
MOEEDGE_API int     moeedge_live_instances(void);

// takes effect with the next graph that llama.cpp builds (a reused graph keeps its assignment)
MOEEDGE_API int moeedge_instance_set_claims(int64_t id, int claims);
MOEEDGE_API int moeedge_instance_set_phase(int64_t id, int phase);
// allocates counters and the ring, before the first decode; shapes come from the model's metadata, n_tokens_max is the
// context's n_ubatch
MOEEDGE_API int moeedge_instance_configure(int64_t id, int n_layers, int n_experts, int n_used, int n_tokens_max);
// activations since the last read into out [n_layers * n_experts], then clears them
MOEEDGE_API int moeedge_instance_read_counts(int64_t id, uint32_t * out);
// frames with serial > after, oldest first, at most n_max; returns how many
MOEEDGE_API int moeedge_instance_frames(int64_t id, int64_t after, struct moeedge_frame * out, int n_max);
MOEEDGE_API int moeedge_instance_stats(int64_t id, struct moeedge_stats * out);
// what to keep of small graphs, a sum of moeedge_capture; n_embd and n_experts are the model's. Like a hook, it needs claims,
// and takes effect with the next graph that llama.cpp builds
MOEEDGE_API int moeedge_instance_set_capture(int64_t id, int what, int n_layers, int n_embd, int n_experts);
// one kind of what is kept
MOEEDGE_API int moeedge_instance_captured(int64_t id, int what, struct moeedge_captured * out);
// calls the hook before each block of small batches that are no prompts; null: none. It may use caches, and must not decode
MOEEDGE_API int moeedge_instance_set_hook(int64_t id, moeedge_block_hook hook, void * user);
// threads that the instance's context asked for last
MOEEDGE_API int moeedge_instance_threads(int64_t id);

// the expert cache: slots on a device, each of which holds one expert of the model, and a thread that moves experts

// a GGUF tensor that holds one matrix, bias or scale per expert of a layer
struct moeedge_expert_tensor {
    int32_t layer;
    int32_t type;      // ggml_type
    int64_t ne0, ne1;  // of one expert; ne1 = 1 for biases and scales
    int32_t n_experts;
    int32_t file;      // index into the configuration's files
    int64_t offset;    // of expert 0 in the file
    int64_t stride;    // bytes from one expert to the next
    char    name[64];  // "blk.3.ffn_up_exps.weight"; its role is the name without "blk.3."
};

struct moeedge_cache_config {
    const char *         device;           // ggml's name of it, or "emulated": a second CPU instance with its own memory
    int32_t              emulated_threads;
    double               link_bytes_per_s; // the emulated device's transfers are slowed down to this rate; 0: they are not
    int32_t              n_layers, n_experts;
    const char * const * files;
    int32_t              n_files;
    const struct moeedge_expert_tensor * tensors;
    int32_t              n_tensors;
    double               ratio;            // share of all experts that get a slot, 0..1
    int32_t              n_stage;          // extra slots per group, for streaming prefill
    double               link_latency_s;   // what each of the emulated device's transfers takes besides; 0: nothing
};

struct moeedge_cache_info {
    int32_t n_groups;      // a group: layers whose experts have the same tensors
    int32_t n_layers, n_experts;
    int32_t n_stage;
    int64_t n_slots;       // of all groups
    int64_t slots_wanted;  // by the ratio; more than n_slots where the device had no memory for them
    int64_t pool_bytes;    // on the device
    int64_t staging_bytes; // on the host
    int32_t unpinned;      // staging memory should be pinned, and the host had none: transfers are slower
    int32_t is_host;       // the device's memory is the host's
    int32_t lost;
    char    device[64];
    char    description[128];
};

struct moeedge_cache_stats {
    int64_t uploads;         // arrived; uploads - evictions = slots_used
    int64_t evictions;
    int64_t cancelled;       // asked for by a plan and no longer by the next
    int64_t failed;
    int64_t bytes_moved;
    int64_t transfers;       // begun, of one expert or of several
    int64_t transfer_ns;     // time in which something was on its way
    int64_t plans;
    int64_t slots_used;
    int64_t in_flight;
    int64_t queued;
    int64_t blocks;          // MoE blocks computed
    int64_t blocks_unknown;  // not understood: on the CPU
    int64_t pairs;           // (token, expert) pairs of batches of at most 64 tokens
    int64_t pairs_device;
    int64_t unique;          // experts per block of such batches
    int64_t unique_device;
    int64_t partition_ns;    // our own work: split, graphs, gather, scatter, submit
    int64_t cpu_ns;
    int64_t device_ns;
    int64_t wait_ns;         // the CPU's part was done, the device's not
    int64_t pinned;          // slots in use by a computation
    int64_t lost;
};

struct moeedge_block_record {
    int64_t serial; // 1, 2, ... per cache
    int32_t layer, phase, n_tokens;
    int32_t pairs_cpu, pairs_device;
    int32_t unique_cpu, unique_device;
    int32_t path;   // moeedge_prefill_path
    int64_t partition_ns, cpu_ns, device_ns, wait_ns;
};

// how batches of many tokens are computed
enum moeedge_prefill_path {
    MOEEDGE_PREFILL_CPU      = 0, // the graph as it is
    MOEEDGE_PREFILL_RESIDENT = 1, // resident experts on the device, the others on the CPU
    MOEEDGE_PREFILL_STREAM   = 2, // all experts on the device, brought there as needed
};

// the reason why the calling thread's last moeedge_cache_* call failed, as one sentence; never null
MOEEDGE_API const char * moeedge_last_error(void);

// id > 0, or a negative moeedge_status
MOEEDGE_API int64_t moeedge_cache_create(const struct moeedge_cache_config * config);
// detaches it from its instances and ends its thread; one whose device is lost is left behind where it waits
MOEEDGE_API int moeedge_cache_destroy(int64_t cache);
MOEEDGE_API int moeedge_cache_get_info(int64_t cache, struct moeedge_cache_info * out);
// layer_group [n_layers], -1: no experts; capacity (slots) and expert_bytes [n_groups]
MOEEDGE_API int moeedge_cache_groups(int64_t cache, int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes);
// what to move from now on, in place of what is still queued: uploads [n_uploads, 2] (layer, expert) by level, highest
// first, then by layer; victims [n_victims, 2], the lowest utility first, may be evicted for them
MOEEDGE_API int moeedge_cache_plan(int64_t cache, const int32_t * uploads, const uint8_t * levels, int n_uploads,
                                   const int32_t * victims, const float * victim_utility, int n_victims);
// out [n_layers, n_experts]: 0 absent, 1 resident, 2 in flight
MOEEDGE_API int moeedge_cache_residency(int64_t cache, uint8_t * out);
MOEEDGE_API int moeedge_cache_get_stats(int64_t cache, struct moeedge_cache_stats * out);
// records with serial > after among the newest 4096, oldest first, at most n_max; returns how many
MOEEDGE_API int moeedge_cache_blocks(int64_t cache, int64_t after, struct moeedge_block_record * out, int n_max);
// Puts those of the experts [n] of a layer that are absent in front of the queue and waits for them. None of the experts is
// evicted for another one, the victims [n_victims, 2] may be while it waits, beside those of the plan. Returns how many are
// resident in the end: not all where there is no room or no time for them
MOEEDGE_API int moeedge_cache_demand(int64_t cache, int layer, const int32_t * experts, int n, const int32_t * victims,
                                     const float * victim_utility, int n_victims, double timeout_s);
// how many experts of a layer go in one transfer at most. 0, as at first: each by itself, as many under way as the device
// takes; 1: each by itself, waited for before the next
MOEEDGE_API int moeedge_cache_set_batch(int64_t cache, int n_experts);
// waits until nothing can be moved any more: the queue is empty or waits for a victim, and nothing is in flight
MOEEDGE_API int moeedge_cache_drain(int64_t cache, double timeout_s);
// empties queue and slots; waits for what is in flight or in use
MOEEDGE_API int moeedge_cache_clear(int64_t cache);
// a path (moeedge_prefill_path) for batches of at least n_tokens_min tokens
MOEEDGE_API int moeedge_cache_set_prefill(int64_t cache, int path, int n_tokens_min);
// pins the slots of resident experts [n] as a computation does and writes them to slots [n], -1: not resident; returns how
// many are; release gives them back. For tests
MOEEDGE_API int moeedge_cache_acquire(int64_t cache, int layer, const int32_t * experts, int n, int32_t * slots);
MOEEDGE_API int moeedge_cache_release(int64_t cache, int layer, const int32_t * slots, int n);
// a resident expert's bytes as the device holds them, size bytes of one role; for tests
MOEEDGE_API int moeedge_cache_read(int64_t cache, int layer, int expert, const char * role, void * out, int64_t size);
// from the next graph on; cache 0 detaches
MOEEDGE_API int moeedge_instance_set_cache(int64_t instance, int64_t cache);

// planning: what a context takes, without allocating it

// what a context has in buffers of one type, in bytes
struct moeedge_memory_use {
    char    buffer_type[64];
    char    device[64];  // the GPU's name; empty: the CPU's
    int32_t on_gpu;      // 0: in the machine's memory
    int64_t weights, memory, compute; // memory: KV cache and recurrent states
};

// ggml_backend_dev_t of a GPU that does not exist, for llama_model_params.devices of a model that is loaded with no_alloc
MOEEDGE_API void * moeedge_imagined_gpu(void);
// get_breakdown: llama.cpp's llama_get_memory_breakdown; context: a llama_context, simulated where its model was loaded
// with no_alloc; returns how many of out [n_max] were written
MOEEDGE_API int moeedge_memory_uses(void * get_breakdown, const void * context, int simulated,
                                    struct moeedge_memory_use * out, int n_max);

#ifdef __cplusplus
}
#endif
