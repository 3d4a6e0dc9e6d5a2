#pragma once

#include "ggml-backend-impl.h"

namespace counting {

static constexpr char device_name[] = "COUNTING0";

ggml_backend_dev_t the_device();

} // namespace counting
