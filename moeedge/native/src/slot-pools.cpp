#include "slot-pools.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ggml-cpp.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace moeedge {

// while memory is short, each attempt asks for this share of the one before
static constexpr double shrink_factor = 0.9;

slot_pools::~slot_pools() {
    // the buffers of a lost device are leaked, see device-health.h; host memory is not lost
    if (device->is_ram || !device->health->is_lost()) {
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

// after the last slot, see slot_pools::zero_slot: nothing is launched ahead where the host's memory is the device's
static int n_zero_slots(const cache_device & device) {
    return device.is_host ? 0 : 1;
}

static ggml_tensor * new_pool(ggml_context * ctx, const expert_role & role, int64_t n_slots) {
    return role.is_matrix() ? ggml_new_tensor_3d(ctx, role.type, role.ne0, role.ne1, n_slots)
                            : ggml_new_tensor_2d(ctx, role.type, role.ne0, n_slots);
}

// Kernels count a tensor's blocks, or its values in units of four bytes, in 32 bits: the index of a later expert would
// overflow.
static bool is_addressable(const expert_role & role, int64_t n_slots) {
    const size_t unit = std::max<size_t>(ggml_type_size(role.type), 4);
    return n_slots <= INT32_MAX / (int64_t) (role.bytes / unit + 1);
}

static bool can_multiply(ggml_backend_dev_t dev, ggml_context * ctx, ggml_tensor * pool) {
    ggml_tensor * input = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, pool->ne[0], 1, 1);
    ggml_tensor * ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 1, 1);
    return ggml_backend_dev_supports_op(dev, ggml_mul_mat_id(ctx, pool, input, ids));
}

bool pool_limits::fits(const expert_role & role, int64_t n_slots) const {
    if (!is_addressable(role, n_slots)) {
        return false;
    }
    const ggml_context_ptr owner(ggml_init({ 8 * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true }));
    ggml_context *         ctx  = owner.get();
    ggml_tensor *          pool = new_pool(ctx, role, n_slots);
    const size_t           bytes = ggml_backend_buft_get_alloc_size(device.buft, pool);
    if (bytes > ggml_backend_buft_get_max_size(device.buft) || (pool_bytes_max > 0 && bytes > (size_t) pool_bytes_max)) {
        return false;
    }
    // a type that the device does not know at any size limits nothing: the CPU computes it
    return !role.is_matrix() || can_multiply(device.dev, ctx, pool) || !can_multiply(device.dev, ctx, new_pool(ctx, role, 1));
}

bool pool_limits::fits(const expert_group & group, int64_t n_slots) const {
    return std::all_of(group.roles.begin(), group.roles.end(),
                       [&](const expert_role & role) { return fits(role, n_slots + n_zero_slots(device)); });
}

int pool_limits::most_slots(const expert_group & group, int wanted) const {
    int least = 0, most = wanted; // `least` fits
    while (least < most) {
        const int n = least == 0 && most == wanted ? wanted : most - (most - least) / 2;
        if (fits(group, n)) {
            least = n;
        } else {
            most = n - 1;
        }
    }
    return least;
}

int pool_limits::count_parts(const expert_group & group, int n_experts, double ratio) const {
    int n_parts = 1;
    while (n_parts < group.n_layers) {
        const int n_layers = (group.n_layers + n_parts - 1) / n_parts; // of the largest part
        if (fits(group, (int64_t) std::ceil(ratio * n_layers * n_experts - 1e-6))) {
            break;
        }
        n_parts++;
    }
    return n_parts;
}

bool slot_pools::allocate(const std::vector<int> & wanted) {
    for (const expert_group & group : layout.groups) {
        n_stage = std::min(n_stage, limits.most_slots(group, n_stage));
    }
    for (size_t g = 0; g < wanted.size(); g++) {
        if (wanted[g] > 0 && !limits.fits(layout.groups[g], 1)) {
            return false;
        }
    }
    const int most = wanted.empty() ? 0 : *std::max_element(wanted.begin(), wanted.end());
    for (double share = 1.0;; share *= shrink_factor) {
        slots.clear();
        for (size_t g = 0; g < wanted.size(); g++) {
            const int n = std::max(1, (int) (wanted[g] * share));
            slots.push_back(wanted[g] == 0 ? 0 : limits.most_slots(layout.groups[g], n));
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
        n_tensors += 2 * group.roles.size(); // slots and staging slots
    }
    ctx = ggml_init({ (n_tensors + 1) * ggml_tensor_overhead(), nullptr, /* .no_alloc = */ true });
    if (ctx == nullptr) {
        return false;
    }
    tensors.clear();
    stages.clear();
    for (size_t g = 0; g < layout.groups.size(); g++) {
        const expert_group & group = layout.groups[g];
        if (!add_pools(tensors, group, slots[g] > 0 ? slots[g] + n_zero_slots(*device) : 0) ||
            ((int) stages.size() == group.kind && !add_pools(stages, group, n_stage))) {
            return false;
        }
    }
    return true;
}

// a pool for each of the group's roles, null without slots
bool slot_pools::add_pools(std::vector<std::vector<ggml_tensor *>> & out, const expert_group & group, int n_slots) {
    out.emplace_back(group.roles.size(), nullptr);
    for (size_t r = 0; n_slots > 0 && r < group.roles.size(); r++) {
        out.back()[r] = add_pool(group.roles[r], n_slots);
        if (out.back()[r] == nullptr) {
            return false;
        }
    }
    return true;
}

// each pool has a buffer of its own: devices limit the size of one
ggml_tensor * slot_pools::add_pool(const expert_role & role, int n_slots) {
    ggml_tensor * pool = new_pool(ctx, role, n_slots);
    ggml_set_name(pool, role.name.c_str());
    ggml_backend_buffer_t buffer =
        ggml_backend_buft_alloc_buffer(device->buft, ggml_backend_buft_get_alloc_size(device->buft, pool));
    if (buffer == nullptr) {
        return nullptr;
    }
    buffers.push_back(buffer);
    n_bytes += (int64_t) ggml_backend_buffer_get_size(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    const ggml_status status = ggml_backend_tensor_alloc(buffer, pool, ggml_backend_buffer_get_base(buffer));
    return status == GGML_STATUS_SUCCESS ? pool : nullptr;
}

// Kernels read padding after the last slot and multiply it by zero, which hides any value except NaN. The CPU's do not, and the
// memory of slots in RAM is taken as experts arrive.
void slot_pools::clear() {
    if (device->is_ram) {
        return;
    }
    for (ggml_backend_buffer_t buffer : buffers) {
        ggml_backend_buffer_clear(buffer, 0);
    }
}

void slot_pools::copy(int group, int from, int to) const {
    for (size_t r = 0; r < tensors[group].size(); r++) {
        const size_t bytes = layout.groups[group].roles[r].bytes;
        char *       data  = (char *) tensors[group][r]->data;
        std::memcpy(data + to * bytes, data + from * bytes, bytes);
    }
}

void slot_pools::give_back(int group, int begin, int end) const {
#if defined(__linux__)
    const uintptr_t page = (uintptr_t) sysconf(_SC_PAGESIZE);
    for (size_t r = 0; r < tensors[group].size(); r++) {
        const size_t    bytes = layout.groups[group].roles[r].bytes;
        const uintptr_t data  = (uintptr_t) tensors[group][r]->data;
        const uintptr_t first = (data + begin * bytes + page - 1) / page * page;
        const uintptr_t last  = (data + end * bytes) / page * page;
        if (last > first) {
            madvise((void *) first, last - first, MADV_DONTNEED);
        }
    }
#else
    (void) group;
    (void) begin;
    (void) end;
#endif
}

} // namespace moeedge
