// The largest values of a row of logits: what sampling looks at, of a vocabulary of any size.

#pragma once

#include <cstdint>

namespace moeedge {

// How many of the largest values [n] were written to ids and found, at most k: in descending order, of equal values the one with
// the lower index first; 0 where a value is no number
int64_t largest_values(const float * values, int64_t n, int64_t k, int32_t * ids, float * found);

} // namespace moeedge
