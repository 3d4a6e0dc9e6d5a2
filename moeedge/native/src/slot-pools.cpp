#include "slot-pools.h"

#include <algorithm>
#include <cstdint>

namespace moeedge {

// while memory is short, each attempt asks for this share of the one before
static constexpr double shrink_factor = 0.9;

slot_pools::~slot_pools() {
    // the buffers of a lost device are leaked, see device-health.h
    if (!device->health->is_lost()) {
        free();
    }
}

void slot_pools::free() {
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_free(buffer);
    }
    buffers.clear();
    ggml_free(ctx);
    ctx     = nullptr;
    n_bytes = 0;
}

// Kernels count a tensor's blocks, or its values in units of four bytes, in 32 bits: the index of a later expert would
// overflow.
static int addressable_slots(const expert_group & group, int n_stage) {
    int64_t most = INT32_MAX;
    for (const expert_role & role : group.roles) {
        const size_t unit = std::max<size_t>(ggml_type_size(role.type), 4);
        most              = std::min<int64_t>(most, INT32_MAX / (int64_t) (role.bytes / unit + 1));
    }
    return (int) std::max<int64_t>(most - n_stage, 1);
}

bool slot_pools::allocate(const std::vector<int> & wanted) {
    const int most = wanted.empty() ? 0 : *std::max_element(wanted.begin(), wanted.end());
    for (double share = 1.0;; share *= shrink_factor) {
        slots.clear();
        for (size_t g = 0; g < wanted.size(); g++) {
            const int n = std::max(1, (int) (wanted[g] * share));
            slots.push_back(wanted[g] == 0 ? 0 : std::min(n, addressable_slots(layout.groups[g], n_stage)));
        }
        if (try_allocate()) {
            clear();
            return true;
        }
        free();
        if (most * share <= 1.0) {
            return false;
        }
    }
}

bool slot_pools::try_allocate() {
    size_t n_tensors = 0;
    for (const expert_group & group : layout.groups) {
        n_tensors += group.roles.size();
    }
    ctx = ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true });
    tensors.clear();
    for (size_t g = 0; g < layout.groups.size(); g++) {
        tensors.emplace_back(layout.groups[g].roles.size(), nullptr);
        const int n_slots = slots[g] + n_stage;
        for (size_t r = 0; n_slots > 0 && r < tensors[g].size(); r++) {
            tensors[g][r] = add_pool(layout.groups[g].roles[r], n_slots);
            if (tensors[g][r] == nullptr) {
                return false;
            }
        }
    }
    return true;
}

// each pool has its own buffer: devices limit the size of one
ggml_tensor * slot_pools::add_pool(const expert_role & role, int n_slots) {
    ggml_tensor * pool = role.is_matrix() ? ggml_new_tensor_3d(ctx, role.type, role.ne0, role.ne1, n_slots)
                                          : ggml_new_tensor_2d(ctx, role.type, role.ne0, n_slots);
    ggml_set_name(pool, role.name.c_str());
    const size_t size = ggml_backend_buft_get_alloc_size(device->buft, pool);
    if (size > ggml_backend_buft_get_max_size(device->buft)) {
        return nullptr;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(device->buft, size);
    if (buffer == nullptr) {
        return nullptr;
    }
    buffers.push_back(buffer);
    n_bytes += (int64_t) ggml_backend_buffer_get_size(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const enum ggml_status status = ggml_backend_tensor_alloc(buffer, pool, ggml_backend_buffer_get_base(buffer));
    return status == GGML_STATUS_SUCCESS ? pool : nullptr;
}

// kernels read padding after the last slot and multiply it by zero, which hides any value except NaN
void slot_pools::clear() {
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_clear(buffer, 0);
    }
}

} // namespace moeedge
