// Memory of the counting device: buffers at addresses that are reserved but not mapped, with their bytes elsewhere. A host
// that reads or writes a tensor's data itself gets a segmentation fault, as with a GPU.
#pragma once

#include "ggml-backend-impl.h"

namespace counting {

// the device's buffer type, and that of pinned host memory
ggml_backend_buffer_type_t device_buffer_type();
ggml_backend_buffer_type_t pinned_buffer_type();

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor);
bool                  is_on_device(const ggml_tensor * tensor);
// where the bytes of an address inside the tensor's buffer are; null if the tensor is not on the device
void * real_address(const ggml_tensor * tensor, const void * address);

} // namespace counting
