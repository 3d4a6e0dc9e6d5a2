#include "table.h"

#include <algorithm>

#include "timing.h"

namespace moeedge {

// how far ahead the file is read: enough requests for a disk to be busy while one is waited for
static constexpr size_t n_uploads_ahead = 4;

residency_table::residency_table(const expert_layout & layout, const std::vector<int> & capacity)
    : n_experts(layout.n_experts), group_of(layout.group_of), groups(layout.groups.size()), n_resident(layout.n_layers) {
    const size_t n_entries = (size_t) layout.n_layers * layout.n_experts;
    asked.assign(n_entries, 0);
    offered.assign(n_entries, 0);
    state.assign(n_entries, absent);
    slot.assign(n_entries, no_slot);
    for (size_t g = 0; g < groups.size(); g++) {
        groups[g].expert_bytes = (int64_t) layout.groups[g].expert_bytes;
        groups[g].owner.assign(capacity[g], -1);
        groups[g].pins.assign(capacity[g], 0);
        for (int s = capacity[g] - 1; s >= 0; s--) {
            groups[g].free.push_back(s);
        }
    }
}

// the computing side

int residency_table::acquire(int layer, const int32_t * experts, int n, int32_t * slots) {
    std::lock_guard<std::mutex> lock(mutex);
    group_state &               group   = groups[group_of[layer]];
    int                         n_found = 0;
    for (int i = 0; i < n; i++) {
        const size_t entry = (size_t) layer * n_experts + experts[i];
        if (is_stopped || (uint32_t) experts[i] >= (uint32_t) n_experts || state[entry] != resident) {
            slots[i] = no_slot;
            continue;
        }
        slots[i] = slot[entry];
        group.pins[slots[i]]++;
        n_found++;
    }
    n_pins += n_found;
    return n_found;
}

void residency_table::release(int layer, const int32_t * slots, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    group_state &               group = groups[group_of[layer]];
    for (int i = 0; i < n; i++) {
        if (slots[i] == no_slot) {
            continue;
        }
        n_pins--;
        if (--group.pins[slots[i]] == 0 && !group.deferred.empty()) {
            restore_deferred(group, slots[i]);
        }
    }
    if (n_pins == 0) {
        rest.notify_all();
    }
}

bool residency_table::has_resident(int layer) const {
    return n_resident[layer].load(std::memory_order_relaxed) > 0 && !is_stopped.load(std::memory_order_relaxed);
}

// a victim that the mover had to pass over may go now
void residency_table::restore_deferred(group_state & group, int32_t freed) {
    for (size_t i = 0; i < group.deferred.size(); i++) {
        if (slot[group.deferred[i].entry] == freed) {
            group.victims.push_back(group.deferred[i]); // it was taken out of there: no allocation
            std::push_heap(group.victims.begin(), group.victims.end());
            group.deferred[i] = group.deferred.back();
            group.deferred.pop_back();
            is_resting = false;
            ready_ns   = now_ns();
            work.notify_one();
            return;
        }
    }
}

// the mover

residency_table::found residency_table::take(std::vector<upload> & out, int n_max, bool may_wait) {
    std::unique_lock<std::mutex> lock(mutex);
    out.clear();
    while (!is_stopped) {
        if (group_state * group = next_group()) {
            out.push_back(start(*group));
            const int layer = out.front().what.layer;
            while ((int) out.size() < n_max && skip_to_absent(*group) && layer_of(group->queue[group->head].entry) == layer &&
                   find_room(*group)) {
                out.push_back(start(*group));
            }
            pair_in_order(out);
            counts.transfers++;
            return found::upload;
        }
        if (!may_wait) {
            return found::nothing;
        }
        is_resting = true;
        rest.notify_all();
        work.wait(lock);
    }
    return found::stopped;
}

// Neighbours in the file that become neighbours on the device can go in one piece.
void residency_table::pair_in_order(std::vector<upload> & uploads) {
    if (uploads.size() < 2) {
        return;
    }
    std::vector<int> slots;
    for (const upload & each : uploads) {
        slots.push_back(each.slot);
    }
    std::sort(slots.begin(), slots.end());
    std::sort(uploads.begin(), uploads.end(), [](const upload & a, const upload & b) { return a.what.expert < b.what.expert; });
    for (size_t i = 0; i < uploads.size(); i++) {
        uploads[i].slot = slots[i];
        slot[(size_t) uploads[i].what.layer * n_experts + uploads[i].what.expert] = slots[i];
    }
}

// the group whose first upload comes first among those that have room: by level, then by layer
residency_table::group_state * residency_table::next_group() {
    group_state * best = nullptr;
    for (group_state & group : groups) {
        if (!skip_to_absent(group) || !find_room(group)) {
            continue;
        }
        const queued & mine = group.queue[group.head];
        if (best == nullptr || mine.level > best->queue[best->head].level ||
            (mine.level == best->queue[best->head].level && mine.entry < best->queue[best->head].entry)) {
            best = &group;
        }
    }
    return best;
}

bool residency_table::skip_to_absent(group_state & group) {
    while (group.head < group.queue.size() && state[group.queue[group.head].entry] != absent) {
        group.head++;
    }
    return group.head < group.queue.size();
}

// whether there is a free slot, or a victim at the heap's front that can go
bool residency_table::find_room(group_state & group) {
    if (!group.free.empty()) {
        return true;
    }
    while (!group.victims.empty()) {
        const victim & next = group.victims.front();
        if (state[next.entry] == resident && group.pins[slot[next.entry]] == 0) {
            return true;
        }
        if (state[next.entry] == resident) {
            group.deferred.push_back(next);
        }
        std::pop_heap(group.victims.begin(), group.victims.end());
        group.victims.pop_back();
    }
    return false;
}

upload residency_table::start(group_state & group) {
    if (group.free.empty()) {
        const int32_t entry = group.victims.front().entry;
        std::pop_heap(group.victims.begin(), group.victims.end());
        group.victims.pop_back();
        evict(group, entry);
    }
    const size_t  i_ahead = group.head + n_uploads_ahead;
    const int32_t entry   = group.queue[group.head++].entry;
    upload        out   = { id_of(entry), group.free.back(), group.expert_bytes, ready_ns, { -1, -1 } };
    if (i_ahead < group.queue.size()) {
        out.ahead = id_of(group.queue[i_ahead].entry);
    }
    group.free.pop_back();
    state[entry] = in_flight;
    slot[entry]  = out.slot;
    if (n_in_flight++ == 0) {
        busy_from_ns = now_ns();
    }
    return out;
}

void residency_table::evict(group_state & group, int32_t entry) {
    group.free.push_back(slot[entry]);
    group.owner[slot[entry]] = -1;
    state[entry]             = absent;
    slot[entry]              = no_slot;
    n_resident[layer_of(entry)].fetch_sub(1, std::memory_order_relaxed);
    counts.evictions++;
}

void residency_table::finish(const upload & done, bool arrived) {
    std::lock_guard<std::mutex> lock(mutex);
    const int                   layer = done.what.layer;
    group_state &               group = groups[group_of[layer]];
    const int32_t               entry = layer * n_experts + done.what.expert;
    if (arrived) {
        state[entry]           = resident;
        group.owner[done.slot] = entry;
        n_resident[layer].fetch_add(1, std::memory_order_relaxed);
        counts.uploads++;
        counts.bytes_moved += done.bytes;
    } else {
        state[entry] = absent;
        slot[entry]  = no_slot;
        group.free.push_back(done.slot);
        counts.failed++;
    }
    if (--n_in_flight == 0) {
        counts.transfer_ns += now_ns() - busy_from_ns;
        rest.notify_all();
    } else if (n_demands > 0) {
        rest.notify_all();
    }
}

void residency_table::wait_until(std::chrono::steady_clock::time_point time) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!is_stopped && std::chrono::steady_clock::now() < time) {
        work.wait_until(lock, time);
    }
}

void residency_table::wait_unpinned(std::chrono::milliseconds at_most) {
    std::unique_lock<std::mutex> lock(mutex);
    rest.wait_for(lock, at_most, [this] { return is_stopped || n_pins == 0; });
}

void residency_table::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_stopped = true;
    }
    work.notify_all();
    rest.notify_all();
}

// counters

void residency_table::copy_residency(uint8_t * out) {
    std::lock_guard<std::mutex> lock(mutex);
    std::copy(state.begin(), state.end(), out);
}

void residency_table::add_stats(moeedge_cache_stats & stats) {
    std::lock_guard<std::mutex> lock(mutex);
    stats.uploads     = counts.uploads;
    stats.evictions   = counts.evictions;
    stats.cancelled   = counts.cancelled;
    stats.failed      = counts.failed;
    stats.bytes_moved = counts.bytes_moved;
    stats.transfers   = counts.transfers;
    stats.transfer_ns = counts.transfer_ns + (n_in_flight > 0 ? now_ns() - busy_from_ns : 0);
    stats.plans       = counts.plans;
    stats.slots_used  = counts.uploads - counts.evictions;
    stats.in_flight   = n_in_flight;
    stats.pinned      = n_pins;
    for (const group_state & group : groups) {
        stats.queued += (int64_t) (group.queue.size() - group.head);
    }
}

} // namespace moeedge
