// Read speed: bytes per second that threads read from memory at once, the limit of decoding on a CPU.

#pragma once

#include <cstdint>

namespace moeedge {

// Of the fastest of n_repetitions, each of which reads all bytes once with n_threads. memory: what is read; null: memory that is
// allocated and written before. Throws std::bad_alloc
double read_speed(const void * memory, int64_t n_bytes, int n_threads, int n_repetitions);

} // namespace moeedge
