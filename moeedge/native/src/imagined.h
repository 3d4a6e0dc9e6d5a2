#pragma once

#include "ggml-backend-impl.h"

namespace moeedge {

// a GPU without memory, for models that are loaded without weights; it is in no registry, so that nobody finds it by chance
ggml_backend_dev_t imagined_gpu();

} // namespace moeedge
