// moeedge native library: a ggml backend that attaches to stock llama.cpp, and the plain C interface to its sensor.
//
// The backend is of device type ACCEL: every llama.cpp context of the process creates an instance of it. An instance is
// named here by its id (1, 2, ...); all state belongs to an instance, only the list of instances is global.
// Every function returns 0 on success and a negative moeedge_status otherwise, unless said differently.
// Calls on one instance must not overlap with a llama_decode of its context; calls on different instances may.

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

struct moeedge_stats {
    int64_t graphs;     // graphs (or graph parts) computed
    int64_t blocks;     // MoE blocks seen
    int64_t sense_ns;   // finding the blocks, copying ids and weights, counting
    int64_t compute_ns; // all of graph_compute, sensing included
};

MOEEDGE_API const char * moeedge_ggml_version(void);        // compiled against
MOEEDGE_API const char * moeedge_llama_cpp_version(void);   // llama-cpp-python, compiled against
MOEEDGE_API int          moeedge_backend_api_version(void); // compiled against

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
// threads that the instance's context asked for last
MOEEDGE_API int moeedge_instance_threads(int64_t id);

#ifdef __cplusplus
}
#endif
