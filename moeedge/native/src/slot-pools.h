// Slot pools: one tensor per role of a group, with a slot for each expert that fits, in the device's memory.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache-device.h"
#include "expert-layout.h"

namespace moeedge {

class slot_pools {
  public:
    slot_pools(std::shared_ptr<cache_device> dev, const expert_layout & of, int n_extra)
        : device(std::move(dev)), layout(of), n_stage(n_extra) {}
    ~slot_pools();
    slot_pools(const slot_pools &)             = delete;
    slot_pools & operator=(const slot_pools &) = delete;

    // `wanted` slots per group, or as many as the device has memory for, in the same proportion; false if it has no memory
    // for one slot each
    bool allocate(const std::vector<int> & wanted);

    int           capacity(int group) const { return slots[group]; }
    int64_t       bytes() const { return n_bytes; }
    ggml_tensor * tensor(int group, int role) const { return tensors[group][role]; } // null without slots

  private:
    bool          try_allocate();
    ggml_tensor * add_pool(const expert_role & role, int n_slots);
    void          clear();
    void          free();

    std::shared_ptr<cache_device>           device;
    const expert_layout &                   layout;
    int                                     n_stage;
    std::vector<int>                        slots;   // [n_groups], without the staging ones
    std::vector<std::vector<ggml_tensor *>> tensors; // [n_groups][roles]
    ggml_context *                          ctx = nullptr;
    std::vector<ggml_backend_buffer_t>      buffers;
    int64_t                                 n_bytes = 0;
};

} // namespace moeedge
