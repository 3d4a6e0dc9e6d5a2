// libmoeedge: a ggml backend that attaches to stock llama.cpp, and the C interface to its routing sensor and, in
// moeedge-cache.h, to the expert cache, which keeps single experts on a device.
//
// The backend is of device type ACCEL: every llama.cpp context of the process creates an instance of it. An instance is
// named here by its id (1, 2, ...). All state belongs to an instance; only the list of instances is global.
//
// Every function returns MOEEDGE_STATUS_OK or a negative moeedge_status unless its comment says otherwise; none lets a
// C++ exception pass. Calls on one instance must not overlap with a llama_decode of its context; calls on different
// instances may. Calls on a cache may come from any thread at any time, except moeedge_cache_destroy,
// moeedge_instance_set_cache and moeedge_instance_remove_cache: no decode may use the cache then.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#    define MOEEDGE_API __declspec(dllexport)
#else
#    define MOEEDGE_API __attribute__((visibility("default")))
#endif

struct ggml_tensor;

#ifdef __cplusplus
extern "C" {
#endif

enum moeedge_status {
    MOEEDGE_STATUS_OK               = 0,
    MOEEDGE_STATUS_NO_INSTANCE      = -1, // no live instance of that id
    MOEEDGE_STATUS_BAD_ARGUMENT     = -2,
    MOEEDGE_STATUS_OUT_OF_MEMORY    = -3,
    MOEEDGE_STATUS_NOT_CONFIGURED   = -4, // moeedge_instance_configure was not called
    MOEEDGE_STATUS_VERSION_MISMATCH = -5, // this process has another ggml than the one compiled against
    MOEEDGE_STATUS_NO_CACHE         = -6, // no live cache of that id
    MOEEDGE_STATUS_NO_DEVICE        = -7, // no device of that name, or it cannot be used
    MOEEDGE_STATUS_DEVICE_LOST      = -8, // the device failed while in use
    MOEEDGE_STATUS_FILE_ERROR       = -9, // a model file cannot be read or is too short
    MOEEDGE_STATUS_TIMEOUT          = -10,
    MOEEDGE_STATUS_FAILED           = -11, // an error that has no code of its own
};

// the operations that an instance takes from llama.cpp's scheduler
enum moeedge_offload_scope {
    MOEEDGE_OFFLOAD_SCOPE_NONE = 0, // the context runs as in stock llama.cpp
    MOEEDGE_OFFLOAD_SCOPE_MOE  = 1, // MoE blocks whose weights are in host memory (with a GPU, and in stock programs)
    MOEEDGE_OFFLOAD_SCOPE_ALL  = 2, // every operation that the CPU backend supports: one split per graph (without a GPU)
};

// the purpose of a decode call
enum moeedge_phase {
    MOEEDGE_PHASE_AUTO    = 0, // not set: more than one token is prefill, one is decode
    MOEEDGE_PHASE_PREFILL = 1,
    MOEEDGE_PHASE_DECODE  = 2,
    MOEEDGE_PHASE_DRAFT   = 3,
    MOEEDGE_PHASE_VERIFY  = 4,
};

// routing of one graph (one ubatch); the arrays belong to the instance and are overwritten when the ring wraps around
struct moeedge_frame {
    int64_t         serial;       // 1, 2, ... per instance
    int32_t         phase;        // moeedge_phase, never AUTO
    int32_t         n_tokens;     // tokens of the first MoE layer; later layers have at most as many
    const int32_t * layer_tokens; // [n_layers]; 0: no experts. The last layer has only the tokens with outputs
    const int32_t * ids;          // [n_layers, n_tokens, n_used] selected experts, -1 where fewer were used
    const float   * weights;      // [n_layers, n_tokens, n_used] router weights, NaN where the graph does not show them
};

// activations that are captured of each small graph (at most 32 tokens); a bit set
enum moeedge_capture_flags {
    MOEEDGE_CAPTURE_NONE   = 0,
    MOEEDGE_CAPTURE_INPUTS = 1, // the input of each layer's router; in a dense layer, of its FFN
    MOEEDGE_CAPTURE_PROBS  = 2, // the router's output: a value per expert, not normalised where the model does not
};

// activations of the newest small graph; the arrays belong to the instance and are overwritten by the next one
struct moeedge_activations {
    int64_t         serial;       // 1, 2, ... per instance; 0: none yet
    int32_t         n_layers;
    int32_t         stride;       // rows from one layer to the next
    int32_t         width;        // values per row: n_embd or n_experts
    const int32_t * layer_tokens; // [n_layers] rows; 0: the layer was not captured
    const float *   rows;         // [n_layers, stride, width]
};

// a MoE block whose experts are computed next (in a dense model: the FFN); valid during the call
struct moeedge_block {
    int32_t         layer, phase, n_tokens, n_used, n_embd;
    const int32_t * ids;   // [n_tokens, n_used] selected experts; null in a dense model
    const float *   input; // [n_tokens, n_embd] the router's input; null where it is not known
};

// called by the thread that decodes
typedef void (*moeedge_block_hook)(void * user, const struct moeedge_block * block);

struct moeedge_sensor_stats {
    int64_t graphs;    // graphs (or parts of graphs) computed
    int64_t blocks;    // MoE blocks seen
    double  sense_s;   // finding the blocks, copying ids and weights, counting
    double  compute_s; // computing graphs, sensing included
};

MOEEDGE_API const char * moeedge_ggml_version(void);        // compiled against
MOEEDGE_API const char * moeedge_llama_cpp_version(void);   // llama-cpp-python, compiled against
MOEEDGE_API int          moeedge_backend_api_version(void); // compiled against

// version of this header's structures and functions
#define MOEEDGE_ABI_VERSION 30
MOEEDGE_API int moeedge_abi_version(void);

// registers the backend with the ggml of this process; a second call has no effect
MOEEDGE_API int moeedge_register(void);
// offload scope of instances that are created from now on (MOE at first)
MOEEDGE_API int moeedge_set_default_offload_scope(int scope);

// Instances that are created from now on keep their activations in memory from which this device (ggml_backend_dev_t) copies
// fast (pinned), as llama.cpp does for its CPU backend; null or a device without such memory: in ordinary memory
MOEEDGE_API int moeedge_set_default_host_buffer(void * device);

// id of the newest live instance that the calling thread created, 0 without one
MOEEDGE_API int64_t moeedge_newest_instance(void);
MOEEDGE_API int     moeedge_live_instances(void);

// takes effect with the next graph that llama.cpp builds (a reused graph keeps its assignment)
MOEEDGE_API int moeedge_instance_set_offload_scope(int64_t id, int scope);
MOEEDGE_API int moeedge_instance_set_phase(int64_t id, int phase);
// allocates the sensor, before the first decode; shapes come from the model's metadata, n_tokens_max is the context's
// n_ubatch
MOEEDGE_API int moeedge_instance_configure(int64_t id, int n_layers, int n_experts, int n_used, int n_tokens_max);
// activation counts since the last read into out [n_layers * n_experts], then clears them
MOEEDGE_API int moeedge_instance_read_counts(int64_t id, uint32_t * out);
// frames with serial > after, oldest first, at most n_max; returns their number
MOEEDGE_API int moeedge_instance_frames(int64_t id, int64_t after, struct moeedge_frame * out, int n_max);
MOEEDGE_API int moeedge_instance_get_stats(int64_t id, struct moeedge_sensor_stats * out);
// what to capture of small graphs (moeedge_capture_flags); n_embd and n_experts are the model's. Like a hook, it needs an
// offload scope other than NONE, and takes effect with the next graph that llama.cpp builds
MOEEDGE_API int moeedge_instance_set_capture(int64_t id, int flags, int n_layers, int n_embd, int n_experts);
// captured activations of one kind
MOEEDGE_API int moeedge_instance_get_activations(int64_t id, int flag, struct moeedge_activations * out);
// calls the hook before each block of small batches that are not prompts; null removes it. The hook may use caches and must
// not decode
MOEEDGE_API int moeedge_instance_set_hook(int64_t id, moeedge_block_hook hook, void * user);
// During the hook's call for a MoE block: computes what each of the block's experts gives for each token of the batch, selected
// or not, before the router's weights. out: float32 [n_tokens, n_experts, n_embd], n_values in all
MOEEDGE_API int moeedge_instance_expert_outputs(int64_t id, float * out, int64_t n_values);
// returns the number of threads that the instance's context asked for last
MOEEDGE_API int moeedge_instance_threads(int64_t id);

// Whether (token, expert) pairs whose weight is zero are left out of verifications where our backend computes the experts on
// the CPU: those that a budget truncates
MOEEDGE_API int moeedge_instance_skip_unweighted(int64_t id, int on);

// expert budget: a verification uses at most so many experts per layer (MoE-Spec). It works through
// llama.cpp's eval callback: moeedge_budget_on_node and the budget go into llama_context_params.cb_eval and
// cb_eval_user_data. Calls must not overlap with a decode of that context, which must be freed before the budget

struct moeedge_budget;

// how experts are ranked for the shortlist of a layer
enum moeedge_budget_ranking {
    MOEEDGE_BUDGET_RANKING_ROUTER = 0, // by the routing probability that the batch's tokens give them (Eq. 5)
    MOEEDGE_BUDGET_RANKING_PICKS  = 1, // by the shares that the tokens' selected experts have of their probability
};

// what becomes of a token's experts outside the shortlist
enum moeedge_budget_coverage {
    MOEEDGE_BUDGET_COVERAGE_SUBSTITUTION = 0, // the token's best experts within the shortlist take their places (Eq. 8)
    MOEEDGE_BUDGET_COVERAGE_TRUNCATION   = 1, // they contribute nothing (Eq. 7)
};

// what the router's output (the node ffn_moe_probs) holds
enum moeedge_router_kind {
    MOEEDGE_ROUTER_SOFTMAX  = 0, // probabilities over all experts
    MOEEDGE_ROUTER_LOGITS   = 1, // values before a softmax over the selected experts
    MOEEDGE_ROUTER_POSITIVE = 2, // positive values that do not add up to one (sigmoid)
};

struct moeedge_budget_config {
    int32_t         ranking;  // moeedge_budget_ranking
    int32_t         coverage; // moeedge_budget_coverage
    const int32_t * budgets;  // [n_layers] experts, each at least n_used; n_experts or more: no limit
};

// figures of one layer since they were read last
struct moeedge_budget_layer {
    int64_t batches;               // seen while the budget was active
    int64_t unique_natural;        // distinct experts, summed over the batches: as the router selected
    int64_t unique, unique_max;    // with the budget; the sum, and the most of any batch
    int64_t substituted;           // batches that got substitutes instead of truncation: their weights were not recognised
    double  kept;                  // share of the selected experts' routing probability within the shortlist, summed over batches
};

// routing of one layer in the newest batch; the arrays belong to the budget and are overwritten by the next batch
struct moeedge_budget_routing {
    int32_t         n_tokens;    // 0: none
    int32_t         kind;        // moeedge_router_kind
    const float *   values;      // [n_tokens, n_experts] the router's output
    const float *   selection;   // [n_tokens, n_experts] what the selection sorts: with bias and masked groups
    const int32_t * natural_ids; // [n_tokens, n_used of the layer] as the router selected
    const int32_t * ids;         // [n_tokens, n_used of the layer] with the budget
};

// n_used: experts per token of each layer, [n_layers], 0 for one without experts. null: out of memory, or a bad argument
MOEEDGE_API struct moeedge_budget * moeedge_budget_create(int n_layers, int n_experts, const int32_t * n_used);
MOEEDGE_API void                    moeedge_budget_destroy(struct moeedge_budget * budget);
// ggml_backend_sched_eval_callback; `budget` is a moeedge_budget
MOEEDGE_API bool moeedge_budget_on_node(struct ggml_tensor * node, bool ask, void * budget);
MOEEDGE_API int  moeedge_budget_configure(struct moeedge_budget * budget, const struct moeedge_budget_config * config);
// whether the next decodes keep to the budget
MOEEDGE_API int  moeedge_budget_set_active(struct moeedge_budget * budget, int on);
// writes out [n_layers] and starts anew
MOEEDGE_API int  moeedge_budget_read(struct moeedge_budget * budget, struct moeedge_budget_layer * out);
// whether routing is kept of batches while the budget is active
MOEEDGE_API int  moeedge_budget_set_capture(struct moeedge_budget * budget, int on);
MOEEDGE_API int  moeedge_budget_get_routing(struct moeedge_budget * budget, int layer, struct moeedge_budget_routing * out);

// forced routing: the experts that the routers select are replaced by given ones. It works through llama.cpp's eval callback
// as the expert budget does; a context has one of the two

struct moeedge_routing;

enum moeedge_routing_mode {
    MOEEDGE_ROUTING_OFF      = 0,
    MOEEDGE_ROUTING_IDENTITY = 1, // the hook runs, and the routers' own choice stays
    MOEEDGE_ROUTING_FORCED   = 2,
};

// of the next batch; the array must live until it is computed
struct moeedge_routing_batch {
    int32_t         mode; // moeedge_routing_mode
    int32_t         n_tokens;
    const int32_t * ids; // [n_tokens, n_layers, largest n_used of any layer], of which a layer takes its first n_used
};

// n_used: experts per token of each layer, [n_layers], 0 for one without experts. n_ubatch: the context's. null: out of memory,
// or a bad argument
MOEEDGE_API struct moeedge_routing * moeedge_routing_create(int n_layers, int n_experts, const int32_t * n_used, int n_ubatch);
MOEEDGE_API void                     moeedge_routing_destroy(struct moeedge_routing * routing);
// ggml_backend_sched_eval_callback; `routing` is a moeedge_routing
MOEEDGE_API bool moeedge_routing_on_node(struct ggml_tensor * node, bool ask, void * routing);
MOEEDGE_API int  moeedge_routing_set(struct moeedge_routing * routing, const struct moeedge_routing_batch * batch);
// for tests: whether the experts that llama.cpp's graph uses are kept of the next batches
MOEEDGE_API int     moeedge_routing_set_capture(struct moeedge_routing * routing, int on);
// the layer's experts in the newest batch, token by token, into out [n_max]; returns their number, -1 if they do not fit
MOEEDGE_API int64_t moeedge_routing_captured(struct moeedge_routing * routing, int layer, int32_t * out, int64_t n_max);

// kernels: our own for the experts' matmuls on the CPU, with results equal to ggml's bit by bit

enum moeedge_kernel_choice {
    MOEEDGE_KERNEL_CHOICE_NONE     = 0, // ggml's alone
    MOEEDGE_KERNEL_CHOICE_MEASURED = 1, // ours where they are faster (at first)
    MOEEDGE_KERNEL_CHOICE_ALL      = 2, // ours where there are any, of the newest instructions
    MOEEDGE_KERNEL_CHOICE_AVX2     = 3, // ours for AVX2 where there are any
    MOEEDGE_KERNEL_CHOICE_AVXVNNI  = 4, // ours for AVX-VNNI where there are any
};

// a kernel of ours, as its check on this CPU found it
struct moeedge_kernel {
    char    instructions[16];   // of the processor, by the compiler's name for them
    char    layout[16];         // of the matrices; "attention": of few tokens (several_speed) and of prompts (many_speed)
    int32_t is_equal;           // its results have the bits of ggml's; it is not used otherwise
    double  single_speed;       // ggml's time over ours with rows from memory, one column per expert
    double  several_speed;      // two columns per expert
    double  many_speed;         // sixteen; 0: not used from eight columns of an expert on, where ggml rounds otherwise
    double  dense_single_speed; // one column of a dense matrix; 0: not used for one
    double  dense_speed;        // thirty-two columns of a dense matrix; 0: not used from eight on
    int32_t n_dense_max;        // less columns of a dense matrix that it computes, at most; 0: none, the bits of some batch differ
};

// a moeedge_kernel_choice for the entire process, from the next graph on
MOEEDGE_API int moeedge_set_kernel_choice(int choice);
// checks the kernels that were not used yet; returns how many this CPU runs, of which out [n_max] gets the first
MOEEDGE_API int moeedge_kernels(struct moeedge_kernel * out, int n_max);
// nodes of attention that kernels of ours have computed in this process
MOEEDGE_API int64_t moeedge_attention_count(void);
// Bytes per second that n_threads read from memory [n_bytes] at once: the fastest of n_repetitions; 0: a bad argument, or out of
// memory. memory: null: as many bytes of its own, written before
MOEEDGE_API double moeedge_read_speed(const void * memory, int64_t n_bytes, int n_threads, int n_repetitions);
// products of bytes per second that n_threads compute at once; 0: a bad argument, or kernels of ours have no instruction for it here
MOEEDGE_API double moeedge_multiply_speed(int n_threads, int n_repetitions);

// loading

// Keeps ggml from its AMX kernels where they fail, as those do that some compilers make (amx-check.cpp). 1: they did. Before the
// first model is loaded
MOEEDGE_API int moeedge_disable_broken_amx(void);
// Whether an assertion of ggml or llama.cpp throws a std::exception in the calling thread, but in an OpenMP region, in place of
// ending the process; around functions that catch it, as llama.cpp's that load a model, an adapter or make a context. 1: it did
MOEEDGE_API int moeedge_throw_on_abort(int on);
// gguf_init_from_file without the tensors' data; null, and moeedge_last_error has a reason or is empty, for a damaged file
MOEEDGE_API void * moeedge_open_gguf(const char * path);
// on: llama.cpp maps the model files that the calling thread loads without reading them ahead; 0: as it does by default
MOEEDGE_API int moeedge_set_lazy_mapping(int on);

// planning: memory of a context that is not allocated

// bytes that a context has in buffers of one type
struct moeedge_memory_use {
    char    buffer_type[64];
    char    device[64];    // the GPU's name; empty: the CPU's
    int32_t on_gpu;        // 0: in host memory
    int64_t weights_bytes;
    int64_t memory_bytes;  // KV cache and recurrent states
    int64_t compute_bytes;
};

// ggml_backend_dev_t of a dry-run GPU, for llama_model_params.devices of a model that is loaded with no_alloc
MOEEDGE_API void * moeedge_dry_run_gpu(void);
// get_breakdown: llama.cpp's llama_get_memory_breakdown; context: a llama_context, simulated where its model was loaded
// with no_alloc; returns how many entries of out [n_max] were written
MOEEDGE_API int moeedge_memory_uses(void * get_breakdown, const void * context, int simulated,
                                    struct moeedge_memory_use * out, int n_max);

// text

// Calls llama.cpp's llama_tokenize or llama_token_to_piece (lstrip 0) and returns its result, or MOEEDGE_TEXT_THREW, as damaged
// vocabularies make them throw; moeedge_last_error has the exception's text
#define MOEEDGE_TEXT_THREW INT32_MIN
MOEEDGE_API int moeedge_tokenize(void * llama_tokenize, const void * vocab, const char * text, int n_text, int32_t * tokens, int n_max,
                                 bool add_special, bool parse_special);
MOEEDGE_API int moeedge_piece(void * llama_token_to_piece, const void * vocab, int token, char * out, int n_max, bool special);

// decoding

// Calls llama.cpp's llama_decode(context, *batch), then its llama_synchronize(context) unless that is null, and returns the
// result of llama_decode, or MOEEDGE_DECODE_THREW: a backend's driver threw an exception, as ggml's Vulkan backend does when
// its device is lost, or an assertion failed (moeedge_throw_on_abort). The context must not be used nor freed afterwards;
// moeedge_last_error has the exception's text
#define MOEEDGE_DECODE_THREW (-1000)
MOEEDGE_API int moeedge_decode(void * llama_decode, void * llama_synchronize, void * context, const void * batch);

// The largest of values [n], which are logits: how many were written to ids and found [k], in descending order, of equal values
// the one with the lower index first. 0: a value is no number; a moeedge_status below 0: a bad argument, or out of memory
MOEEDGE_API int64_t moeedge_largest_values(const float * values, int64_t n, int64_t k, int32_t * ids, float * found);

// what a decode asks whether to stop: 0 means that it should
typedef int (*moeedge_stop_call)(void);

struct moeedge_stop {
    moeedge_stop_call call;        // null: nothing is asked
    int64_t           interval_ns; // between two questions, and before the first
    int64_t           next_ns;     // when it is asked again; 0: the decode begins
    int32_t           stopped;     // it has said so
};

// An abort callback of llama.cpp, data: struct moeedge_stop. It asks in the thread that decodes, also while that waits for
// experts from a disk
MOEEDGE_API bool moeedge_should_stop(void * stop);

#ifdef __cplusplus
}
#endif
