// Counting device: a ggml backend for tests. It looks like a CUDA GPU to ggml's scheduler and to moeedge, computes on the
// CPU, and records each call in a timeline.
//
// Looks like a GPU  memory of its own that the host cannot touch (its addresses are not mapped), pinned host memory,
//                   asynchronous streams, events, op offload from 32 tokens on, one ordered queue per backend instance.
// Late              with `defer` nothing that was queued is executed before the host waits for it: a missing
//                   synchronisation reads old bytes. The destination of an asynchronous get holds 0xFF until then.
// Strict            operations of two queues, or of a queue and the host, that touch the same bytes without an event or a
//                   synchronisation between them are reported as hazards, by name.
// Not a GPU         it says nothing about time, and its arithmetic is the CPU's.
//
// Settings: counting_set(name, value) at any time, or COUNTING_NAME=value in the environment when the library is loaded.
//   defer             1: execute as late as allowed. 0 (default): at once
//   other_bytes       of the device's 8 GiB, taken by other programs (default 0); an allocation that does not fit fails
//   max_buffer_bytes  largest single buffer (default: no limit)
//   fail_graph        n > 0: the n-th graph from now on fails (default 0: none)
//   fail_mode         what a failing graph does: 0 (default) GGML_STATUS_FAILED once; 1 from then on; 2 ends the process, as
//                     ggml's CUDA backend does; 3 throws std::runtime_error once, as ggml's Vulkan backend does
#pragma once

#include <cstdint>

#if defined(_WIN32)
#    error "the counting device needs mmap"
#endif
#define COUNTING_API __attribute__((visibility("default")))

extern "C" {

enum counting_kind {
    COUNTING_SET,          // host to device
    COUNTING_SET_ASYNC,
    COUNTING_GET,          // device to host
    COUNTING_GET_ASYNC,
    COUNTING_COPY,         // device to device
    COUNTING_COPY_ASYNC,
    COUNTING_CLEAR,        // memset of a tensor or of a buffer
    COUNTING_SYNC,         // of an instance
    COUNTING_EVENT_RECORD,
    COUNTING_EVENT_WAIT,   // one queue waits for another, not the host
    COUNTING_EVENT_SYNC,   // the host waits for an event
    COUNTING_GRAPH,        // a graph launch
    COUNTING_ALLOC,        // of a device buffer
    COUNTING_FREE,
};

enum counting_flags {
    // the host cannot go on before the device has done something: blocking set, get, copy and clear; sync and event sync if
    // something was queued that the host does not know to be done; get_async to memory that is not pinned (as in CUDA)
    COUNTING_WAITS      = 1,
    COUNTING_ROUND_TRIP = 2, // a wait that ends with a graph launch newly known to be done
    COUNTING_PINNED     = 4, // the host's side of the transfer is in the device's pinned host memory
    COUNTING_FAILED     = 8, // a graph that failed, an allocation that was refused
};

struct counting_record {
    int64_t bytes; // of the transfer or allocation
    int32_t kind;
    int32_t flags;
    int32_t instance; // 1, 2, ... by age; 0: none (transfers through a buffer)
    int32_t n_nodes;  // of a graph, without views
    char    name[64]; // the tensor's, or of a graph the last node's; of an event its number
};

// 0; -1 for an unknown name
COUNTING_API int counting_set(const char * name, int64_t value);
// drops the timeline and the hazards
COUNTING_API void counting_reset(void);
// how many records there are since the last reset; writes up to n_max of them, from the first on
COUNTING_API int64_t counting_timeline(counting_record * out, int64_t n_max);
// how many hazards there were; the text of the i-th, or null (64 are kept)
COUNTING_API int64_t      counting_hazards(void);
COUNTING_API const char * counting_hazard(int64_t i);
// bytes that are allocated on the device now
COUNTING_API int64_t counting_allocated(void);
}
