#pragma once

#include "ggml-backend.h"
#include "moeedge.h"

namespace moeedge {

// see moeedge_memory_uses
int read_memory_uses(void * get_breakdown, const void * context, bool is_simulated, moeedge_memory_use * out, int n_max);

} // namespace moeedge
