// Large pages: memory of the CPU in pages of 2 MiB where Linux has them, so that reading gigabytes misses the TLB less and taking
// them costs thousands of page faults instead of millions.

#pragma once

namespace moeedge {

// Asks for large pages for every buffer that the CPU's buffer type makes from now on: repacked weights, slots in RAM, KV caches
// and the columns of graphs. Further calls do nothing.
void use_large_pages();

} // namespace moeedge
