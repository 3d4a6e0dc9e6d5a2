// Slot pools: one tensor per role of a group, with a slot for each expert that fits, in the device's memory; and one tensor
// per role of each kind of expert with the staging slots, which all groups of that kind share.
//
// A subgraph on the device names one tensor per role, so a tensor holds the slots of entire layers. Devices limit the size of a
// tensor (Vulkan: 1 GiB); where a pool would be larger, its group is cut into parts of fewer layers, each with its own pool.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache-device.h"
#include "expert-layout.h"

namespace moeedge {

// the largest pools that a device takes
class pool_limits {
  public:
    // bytes_max: of one pool, 0: the device's own limit
    pool_limits(const cache_device & dev, int64_t bytes_max) : device(dev), pool_bytes_max(bytes_max) {}

    // whether the device can compute with n slots of each of the group's roles
    bool fits(const expert_group & group, int64_t n_slots) const;
    // the largest number of slots up to `wanted` that fits
    int  most_slots(const expert_group & group, int wanted) const;
    // into how many parts the group's layers are cut, so that its share `ratio` of slots fits
    int  count_parts(const expert_group & group, int n_experts, double ratio) const;

  private:
    bool fits(const expert_role & role, int64_t n_slots) const;

    const cache_device & device;
    int64_t              pool_bytes_max;
};

class slot_pools : no_copy {
  public:
    slot_pools(std::shared_ptr<cache_device> dev, const expert_layout & of, const pool_limits & most, int n_staging)
        : device(std::move(dev)), layout(of), limits(most), n_stage(n_staging) {}
    ~slot_pools();

    // `wanted` slots per group, or as many as the device has memory for, in the same proportion; false if it has no memory
    // for one slot each
    bool allocate(const std::vector<int> & wanted);

    int           capacity(int group) const { return slots[group]; }
    // a slot that is never written: all its weights are zero, and so are the columns that it gives. Not in host memory
    int           zero_slot(int group) const { return slots[group]; }
    int64_t       bytes() const { return n_bytes; }
    ggml_tensor * tensor(int group, int role) const { return tensors[group][role]; } // null without slots
    // staging slots of the group's kind, null without any; as many in each kind
    ggml_tensor * stage(int group, int role) const { return stages[layout.groups[group].kind][role]; }
    int           n_staging() const { return n_stage; }

    // of slots in RAM: the bytes of one to another, and the memory of slots [begin, end), which is taken again when it is written
    void          copy(int group, int from, int to) const;
    void          give_back(int group, int begin, int end) const;

  private:
    bool          try_allocate();
    bool          add_pools(std::vector<std::vector<ggml_tensor *>> & out, const expert_group & group, int n_slots);
    ggml_tensor * add_pool(const expert_role & role, int n_slots);
    void          clear();
    void          free();

    std::shared_ptr<cache_device>           device;
    const expert_layout &                   layout;
    const pool_limits                       limits;
    int                                     n_stage;
    std::vector<int>                        slots;   // [n_groups]
    std::vector<std::vector<ggml_tensor *>> tensors; // [n_groups][roles]
    std::vector<std::vector<ggml_tensor *>> stages;  // [n_kinds][roles]
    ggml_context *                          ctx = nullptr;
    std::vector<ggml_backend_buffer_t>      buffers;
    int64_t                                 n_bytes = 0;
};

} // namespace moeedge
