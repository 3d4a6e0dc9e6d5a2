// Settings, timeline and hazards of the counting device; one lock for everything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "counting-device.h"

namespace counting {

static constexpr int64_t memory_bytes = 8ll << 30; // of the device

struct settings {
    int64_t defer            = 0;
    int64_t other_bytes      = 0;
    int64_t max_buffer_bytes = INT64_MAX;
    int64_t fail_graph       = 0;
    int64_t fail_mode        = 0;
};

// Held by every entry point of the backend, computations included: the device does one thing at a time.
std::mutex & device_lock();
settings &   current_settings();

void add_record(enum counting_kind kind, int instance, const char * name, size_t bytes, int flags, int n_nodes = 0);
void add_hazard(const std::string & text);

// bytes of the device's memory in use
int64_t & allocated_bytes();

// host memory that the device offers as pinned
void add_pinned(const void * address, size_t bytes);
void remove_pinned(const void * address);
bool is_pinned(const void * address);

} // namespace counting
