// Read speed: bytes per second that threads read from memory at once, the limit of decoding on a CPU; and products of bytes per second
// that they compute, the limit of long prompts.

#pragma once

#include <cstdint>

namespace moeedge {

// Of the fastest of n_repetitions, each of which reads all bytes once with n_threads. memory: what is read; null: memory that is
// allocated and written before. Throws std::bad_alloc
double read_speed(const void * memory, int64_t n_bytes, int n_threads, int n_repetitions);

// the fastest of n_repetitions of about a millisecond; 0: kernels of ours have no instruction for it here
double multiply_speed(int n_threads, int n_repetitions);

} // namespace moeedge
