// The C interface of libmoeedge to expert caches; moeedge.h says what holds for every function.

#pragma once

#include "moeedge.h"

#ifdef __cplusplus
extern "C" {
#endif

// an expert cache: slots on a device, each of which holds one expert of the model, and a thread that moves experts

// a GGUF tensor that holds one matrix, bias or scale per expert of a layer
struct moeedge_expert_tensor {
    int32_t layer;
    int32_t type;     // ggml_type
    int64_t ne0, ne1; // of one expert; ne1 = 1 for biases and scales
    int32_t n_experts;
    int32_t file;     // index into the configuration's files
    int64_t offset;   // of expert 0 in the file, in bytes
    int64_t stride;   // bytes from one expert to the next
    char    name[64]; // "blk.3.ffn_up_exps.weight"; its role is the name without "blk.3."
};

struct moeedge_cache_config {
    const char *         device;           // ggml's name of it; "emulated": a second CPU instance with its own memory; "ram":
                                           // slots in host memory that the CPU computes from, loaded on demand
    const char * const * files;
    const struct moeedge_expert_tensor * tensors;
    int32_t              n_layers, n_experts;
    double               ratio;            // share of all experts that get a slot, 0..1
    double               link_bytes_per_s; // rate of the emulated device's transfers; 0: not limited
    double               link_latency_s;   // fixed time of each of them
    double               disk_bytes_per_s; // rate of all reads of a cache in RAM together; 0: not limited
    int64_t              pool_bytes_max;   // of the slots in one tensor; 0: as much as the device allows
    int32_t              n_stage;          // extra slots per kind of expert, for streaming prefill
    int32_t              emulated_threads;
    int32_t              disk_buffered;    // a cache in RAM reads by way of the page cache, and gives its pages back
    int32_t              pin_files;        // keep the experts' pages of the files in RAM, where the device reads them itself
    int32_t              n_files, n_tensors;
};

struct moeedge_cache_info {
    int32_t n_groups;      // a group: layers whose experts have the same tensors and share slots
    int32_t n_layers, n_experts;
    int32_t n_stage;
    int64_t n_slots;       // of all groups
    int64_t slots_wanted;  // by the ratio; more than n_slots where the device lacks memory for them
    int64_t pool_bytes;    // on the device
    int64_t staging_bytes; // on the host
    int64_t pinned_bytes;  // of the files, which the device reads itself; 0: uploads are copied
    int32_t unpinned;      // pinned staging memory was not available: transfers are slower
    int32_t is_host;       // the device's memory is the host's
    int32_t lost;
    char    device[64];
    char    description[128];
};

// figures since the cache was created; moeedge/native/cache.py states unit and meaning of each field (CacheStats)
struct moeedge_cache_stats {
    int64_t uploads, evictions, cancelled, failed;
    int64_t bytes_moved, transfers;
    double  transfer_s;
    int64_t plans, slots_used, in_flight, queued;
    int64_t blocks, blocks_unknown;
    int64_t pairs, pairs_hit, unique, unique_hit;
    double  partition_s, cpu_s, device_s, wait_s;
    int64_t wait_bytes, ahead, ahead_used;
    int64_t pinned, lost;
};

struct moeedge_block_record {
    int64_t serial; // 1, 2, ... per cache
    int32_t layer, phase, n_tokens;
    int32_t pairs_cpu, pairs_device;
    int32_t unique_cpu, unique_device;
    int32_t path;   // moeedge_prefill_path
    int64_t partition_ns, cpu_ns, device_ns, wait_ns;
    int64_t wait_bytes; // that a cache in RAM has read during wait_ns
};

// how a cache in RAM reads the model's files
struct moeedge_reader_info {
    int32_t n_threads;   // reads under way
    int32_t is_direct;   // past the page cache; 0: a file system has no direct reads, or they are not wanted
    int64_t piece_bytes; // of a read, about
    int64_t bytes_read;  // so far; direct reads are of whole blocks
    int64_t retries;     // of reads that failed
    char    error[512];  // what went wrong with the newest expert that could not be loaded; empty: nothing
};

// what goes wrong with a read, in tests
enum moeedge_read_fault {
    MOEEDGE_READ_FAULT_EIO     = 0, // the disk reports an error
    MOEEDGE_READ_FAULT_SHORT   = 1, // half of the bytes come
    MOEEDGE_READ_FAULT_END     = 2, // no bytes come
    MOEEDGE_READ_FAULT_DELAY   = 3, // it takes longer
    MOEEDGE_READ_FAULT_THREADS = 4, // no thread can be started for further reads
};

// how batches of many tokens are computed
enum moeedge_prefill_path {
    MOEEDGE_PREFILL_PATH_CPU      = 0, // the graph as it is
    MOEEDGE_PREFILL_PATH_RESIDENT = 1, // resident experts on the device, the others on the CPU
    MOEEDGE_PREFILL_PATH_STREAM   = 2, // all experts on the device, uploaded as needed
};

// how a device with memory of its own computes the resident experts of small batches
enum moeedge_device_path {
    MOEEDGE_DEVICE_PATH_PAIRS   = 0, // once the host knows the ids; several tokens as one token per pair
    MOEEDGE_DEVICE_PATH_COLUMNS = 1, // the same as one token with many experts, for devices whose matrix-vector kernels win
    MOEEDGE_DEVICE_PATH_AHEAD   = 2, // before the host knows the ids, where llama.cpp computes the router on the same device;
                                     // elsewhere as COLUMNS
};

enum moeedge_residency {
    MOEEDGE_RESIDENCY_ABSENT    = 0,
    MOEEDGE_RESIDENCY_RESIDENT  = 1,
    MOEEDGE_RESIDENCY_IN_FLIGHT = 2, // it has a slot whose bytes are not valid yet
};

// one sentence that says why the calling thread's last moeedge_cache_* call failed; never null
MOEEDGE_API const char * moeedge_last_error(void);

// returns an id > 0, or a negative moeedge_status
MOEEDGE_API int64_t moeedge_cache_create(const struct moeedge_cache_config * config);
// detaches the cache from its instances and ends its thread; a thread that waits for a lost device is abandoned
MOEEDGE_API int moeedge_cache_destroy(int64_t cache);
MOEEDGE_API int moeedge_cache_get_info(int64_t cache, struct moeedge_cache_info * out);
// layer_group [n_layers], -1: no experts; capacity (slots) and expert_bytes [n_groups]
MOEEDGE_API int moeedge_cache_groups(int64_t cache, int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes);
// replaces the queue: uploads [n_uploads, 2] (layer, expert) by priority, highest first, then by layer;
// victims [n_victims, 2] may be evicted for them, the lowest utility first
MOEEDGE_API int moeedge_cache_plan(int64_t cache, const int32_t * uploads, const uint8_t * priority, int n_uploads,
                                   const int32_t * victims, const float * victim_utility, int n_victims);
// out [n_layers, n_experts]: moeedge_residency
MOEEDGE_API int moeedge_cache_residency(int64_t cache, uint8_t * out);
MOEEDGE_API int moeedge_cache_get_stats(int64_t cache, struct moeedge_cache_stats * out);
// records with serial > after among the newest 4096, oldest first, at most n_max; returns their number
MOEEDGE_API int moeedge_cache_blocks(int64_t cache, int64_t after, struct moeedge_block_record * out, int n_max);
// Queues the absent ones of the experts [n] of a layer first and waits for them. None of the experts is evicted for another
// one; the victims [n_victims, 2] may be while it waits, in addition to those of the plan. Returns how many are resident
// in the end: fewer than n where there is no room or no time for them
MOEEDGE_API int moeedge_cache_demand(int64_t cache, int layer, const int32_t * experts, int n, const int32_t * victims,
                                     const float * victim_utility, int n_victims, double timeout_s);
// the most experts of a layer in one transfer. 0 (the default): one, with as many transfers under way as the device takes;
// 1: one, and each transfer is awaited before the next
MOEEDGE_API int moeedge_cache_set_batch(int64_t cache, int n_experts);
// Device "ram": utilities [n_layers, n_experts], by which the expert is chosen that goes for one that is loaded on demand: the
// lowest; of equal ones (all, at first) the one that was used longest ago
MOEEDGE_API int moeedge_cache_set_utilities(int64_t cache, const float * utilities);
// Device "ram": uses about n_slots of the slots from now on, at least one per group and at most all, and gives the memory of the
// others back to the system. The most useful experts stay. From any thread, also during a computation, whose experts stay.
// Returns the number of slots in use
MOEEDGE_API int moeedge_cache_limit(int64_t cache, int n_slots);
// Tests: of the device "ram", queues the absent ones of a coming layer's experts [n] after what a computation waits for. They stay until that
// layer's turn, the next one after the last layer that was computed
MOEEDGE_API int moeedge_cache_read_ahead(int64_t cache, int layer, const int32_t * experts, int n);
// waits until no transfer is under way and the queue is empty or waits for a victim
MOEEDGE_API int moeedge_cache_drain(int64_t cache, double timeout_s);
// empties the queue, waits for transfers under way and slots in use, and empties the slots unless that takes too long
MOEEDGE_API int moeedge_cache_clear(int64_t cache, double timeout_s);
// a moeedge_prefill_path for batches of at least n_tokens_min tokens
MOEEDGE_API int moeedge_cache_set_prefill(int64_t cache, int path, int n_tokens_min);
// Threads that read experts from the model's files for a device with memory of its own (1 at first), or for a cache in RAM:
// there as many reads are under way, each of about piece_bytes (0: unchanged)
MOEEDGE_API int moeedge_cache_set_readers(int64_t cache, int n_threads, int64_t piece_bytes);
MOEEDGE_API int moeedge_cache_get_reader(int64_t cache, struct moeedge_reader_info * out);
// Tests: what goes wrong with every `every`-th read (moeedge_read_fault) of a cache in RAM from now on, but not, with more than
// 1, with a second attempt; 0: nothing
MOEEDGE_API int moeedge_cache_set_read_faults(int64_t cache, int kind, int every, double delay_s);
// whether one block in eleven waits for an asynchronous device before the CPU's part, which shows in wait_ns how long the
// device takes; off at first, since it costs the time in which both parts would have run at once
MOEEDGE_API int moeedge_cache_set_timing(int64_t cache, int on);
// a moeedge_device_path (PAIRS at first)
MOEEDGE_API int moeedge_cache_set_device_path(int64_t cache, int path);
// Checks: pins the slots of resident experts [n] as a computation does and writes them to slots [n], -1: not resident;
// returns how many are resident. release unpins them
MOEEDGE_API int moeedge_cache_acquire(int64_t cache, int layer, const int32_t * experts, int n, int32_t * slots);
MOEEDGE_API int moeedge_cache_release(int64_t cache, int layer, const int32_t * slots, int n);
// Checks: copies a resident expert's bytes from the device, `size` bytes of one role
MOEEDGE_API int moeedge_cache_read(int64_t cache, int layer, int expert, const char * role, void * out, int64_t size);
// From the next graph on. An instance has a cache of the device "ram", one of another device, or both: then experts that are
// not on the device are computed from slots in RAM, never from the mapped file. A cache replaces one of its kind
MOEEDGE_API int moeedge_instance_set_cache(int64_t instance, int64_t cache);
// a cache that is not attached is ignored
MOEEDGE_API int moeedge_instance_remove_cache(int64_t instance, int64_t cache);
// Lets the cache read experts from the slots of another one, of the device "ram" and of the same experts, and those that it
// does not hold past the page cache; 0: from the files, as at first. From the next transfer on
MOEEDGE_API int moeedge_cache_set_ram(int64_t cache, int64_t ram);

#ifdef __cplusplus
}
#endif
