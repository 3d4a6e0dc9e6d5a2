// Expert mover: the thread that uploads experts to the device as the residency table asks for them.

#pragma once

#include <atomic>
#include <memory>

#include "expert-loader.h"
#include "expert-uploader.h"
#include "residency-table.h"

namespace moeedge {

// the parts of a cache that the mover works with; it shares their ownership, since the thread of a lost device may be
// abandoned
struct cache_core {
    expert_layout                    layout;
    expert_source                    source;
    std::shared_ptr<cache_device>    device;
    std::unique_ptr<slot_pools>      pools;
    std::unique_ptr<residency_table> table;
    std::unique_ptr<expert_uploader> moving;    // the mover's
    std::unique_ptr<expert_uploader> streaming; // for staging slots; null if there are none
    double                           link_bytes_per_s = 0;
    double                           link_latency_s   = 0;
    int64_t                          slots_wanted     = 0;
    std::atomic<int>                 batch{ 0 };            // see moeedge_cache_set_batch
    bool                             has_mover_ended = false; // see device_health::wait
    std::unique_ptr<expert_loader>   loader; // null: slots are not in the host's own memory. Its threads use what is above

    ~cache_core() {
        moving.reset(); // uploads read pinned pages
        streaming.reset();
        if (device && !device->health->is_lost()) {
            source.unpin();
        }
    }
};

// the thread's work, until the table is stopped and the uploads under way are done
void run_mover(cache_core & core);

} // namespace moeedge
