#pragma once

#include "ggml-backend-impl.h"

namespace moeedge {

// a GPU without memory, for models that are loaded without weights; it is not registered, so that llama.cpp never chooses it
ggml_backend_dev_t dry_run_gpu();

} // namespace moeedge
