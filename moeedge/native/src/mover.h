// Mover: the thread that brings experts to the device as the table asks for them.

#pragma once

#include <atomic>
#include <memory>
#include <thread>

#include "table.h"
#include "uploader.h"

namespace moeedge {

// what the mover works with; it owns it too, since the thread of a lost device may be left behind
struct cache_core {
    expert_layout                    layout;
    expert_source                    source;
    std::shared_ptr<cache_device>    device;
    std::unique_ptr<slot_pools>      pools;
    std::unique_ptr<residency_table> table;
    std::unique_ptr<uploader>        moving;    // the mover's
    std::unique_ptr<uploader>        streaming; // for staging slots; null if there are none
    double                           link_bytes_per_s = 0;
    double                           link_latency_s   = 0;
    std::atomic<int>                 batch{ 0 }; // see moeedge_cache_set_batch
    bool                             is_moved         = false; // the mover has ended; see device_loss::wait
};

class mover {
  public:
    explicit mover(std::shared_ptr<cache_core> core);
    // ends the thread after what is in flight, or leaves it behind where it waits for a lost device
    ~mover();
    mover(const mover &)             = delete;
    mover & operator=(const mover &) = delete;

  private:
    std::shared_ptr<cache_core> core;
    std::thread                 thread;
};

} // namespace moeedge
