#include "residency-table.h"

#include <algorithm>

#include "timing.h"

namespace moeedge {

residency_table::residency_table(const expert_layout & layout, const std::vector<int> & capacity, slot_memory of_slots)
    : n_experts(layout.n_experts), group_of(layout.group_of), memory(std::move(of_slots)), groups(layout.groups.size()),
      n_resident(layout.n_layers) {
    const size_t n_flat_ids = (size_t) layout.n_layers * layout.n_experts;
    asked.assign(n_flat_ids, 0);
    offered.assign(n_flat_ids, 0);
    state.assign(n_flat_ids, MOEEDGE_RESIDENCY_ABSENT);
    slot.assign(n_flat_ids, no_slot);
    awaited.assign(n_flat_ids, 0);
    utility.assign(n_flat_ids, 0.0f);
    used.assign(n_flat_ids, 0);
    kept_until.assign(n_flat_ids, 0);
    is_ahead.assign(n_flat_ids, 0);
    for (size_t g = 0; g < groups.size(); g++) {
        groups[g].expert_bytes = (int64_t) layout.groups[g].expert_bytes;
        groups[g].owner.assign(capacity[g], -1);
        groups[g].pins.assign(capacity[g], 0);
        groups[g].limit = capacity[g];
        for (int s = capacity[g] - 1; s >= 0; s--) {
            groups[g].free.push_back(s);
        }
    }
}

// computing side

// with the mutex, see acquire
int residency_table::pin_resident(int layer, const int32_t * experts, int n, int32_t * slots) {
    group_state & group   = groups[group_of[layer]];
    int           n_found = 0;
    for (int i = 0; i < n; i++) {
        const size_t flat_id = (size_t) layer * n_experts + experts[i];
        if (is_stopped || (uint32_t) experts[i] >= (uint32_t) n_experts || state[flat_id] != MOEEDGE_RESIDENCY_RESIDENT) {
            slots[i] = no_slot;
            continue;
        }
        slots[i] = slot[flat_id];
        group.pins[slots[i]]++;
        n_found++;
    }
    n_pins += n_found;
    return n_found;
}

int residency_table::acquire(int layer, const int32_t * experts, int n, int32_t * slots) {
    std::lock_guard<std::mutex> lock(mutex);
    return pin_resident(layer, experts, n, slots);
}

void residency_table::want(int layer, const int32_t * experts, int n, const float * shares) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        group_state &               group = groups[group_of[layer]];
        is_unloadable                     = false;
        n_wants++;
        wanted_layer = layer;
        is_scan      = shares != nullptr;
        for (int i = n - 1; i >= 0; i--) {
            const int32_t flat_id = layer * n_experts + experts[i];
            awaited[flat_id]       = 1;
            used[flat_id]          = n_wants;
            utility[flat_id] += shares ? shares[i] : 0.0f;
            counts.ahead_used += is_ahead[flat_id];
            is_ahead[flat_id] = 0;
            if (state[flat_id] == MOEEDGE_RESIDENCY_ABSENT) {
                group.queue.push_front({ flat_id, demand_priority });
            } else if (state[flat_id] == MOEEDGE_RESIDENCY_IN_FLIGHT) {
                to_hasten.push_back(id_of(flat_id));
            }
        }
        mark_work();
    }
    work.notify_one();
}

int residency_table::layer_after(int layer) const {
    const int n_layers = (int) group_of.size();
    do {
        layer = (layer + 1) % n_layers;
    } while (group_of[layer] < 0); // there is at least one
    return layer;
}

void residency_table::read_ahead(int layer, const int32_t * experts, int n) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        group_state &               group = groups[group_of[layer]];
        int64_t                     turn  = n_wants + 1; // the number of that layer's `want`
        for (int l = layer_after(wanted_layer); l != layer; l = layer_after(l)) {
            turn++;
        }
        const auto is_after = [](const queued & q) { return q.priority < ahead_priority; };
        auto       place    = std::find_if(group.queue.begin(), group.queue.end(), is_after) - group.queue.begin();
        for (int i = 0; i < n; i++) {
            const int32_t flat_id = layer * n_experts + experts[i];
            kept_until[flat_id]   = turn;
            if (state[flat_id] == MOEEDGE_RESIDENCY_ABSENT) {
                group.queue.insert(group.queue.begin() + place++, { flat_id, ahead_priority });
            }
        }
        mark_work();
    }
    work.notify_one();
}

int residency_table::await(int layer, const int32_t * experts, int n, int32_t * slots, const stop_call & should_stop) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto is_resident = [&](int32_t expert) {
        return state[(size_t) layer * n_experts + expert] == MOEEDGE_RESIDENCY_RESIDENT;
    };
    const auto is_over = [&] { return is_stopped || is_unloadable || std::any_of(experts, experts + n, is_resident); };
    n_demands++;
    mark_work(); // what is needed later may go now
    work.notify_one();
    while (!changed.wait_for(lock, stop_interval, is_over)) {
        lock.unlock();
        const bool stops = should_stop && should_stop();
        lock.lock();
        if (stops) {
            n_demands--;
            return await_stopped;
        }
    }
    n_demands--;
    return is_unloadable ? 0 : is_stopped ? await_closed : pin_resident(layer, experts, n, slots);
}

void residency_table::forget(int layer, const int32_t * experts, int n) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        group_state &               group = groups[group_of[layer]];
        for (int i = 0; i < n; i++) {
            const size_t flat_id = (size_t) layer * n_experts + experts[i];
            awaited[flat_id]     = 0;
            if (state[flat_id] == MOEEDGE_RESIDENCY_RESIDENT) {
                leave_beyond(group, slot[flat_id]);
            }
        }
        const auto is_later     = [](const queued & q) { return q.priority < demand_priority; };
        const auto is_forgotten = [&](const queued & q) { return layer_of(q.flat_id) == layer && !awaited[q.flat_id]; };
        const auto begin        = group.queue.begin();
        const auto end          = std::find_if(begin, group.queue.end(), is_later);
        group.queue.erase(std::remove_if(begin, end, is_forgotten), end);
        mark_work(); // an expert may go now that could not before
    }
    work.notify_one();
}

void residency_table::release(int layer, const int32_t * slots, int n) {
    std::lock_guard<std::mutex> lock(mutex);
    group_state &               group = groups[group_of[layer]];
    for (int i = 0; i < n; i++) {
        if (slots[i] == no_slot) {
            continue;
        }
        n_pins--;
        if (--group.pins[slots[i]] > 0) {
            continue;
        }
        if (!group.deferred.empty()) {
            restore_deferred(group, slots[i]);
        }
        leave_beyond(group, slots[i]);
        if (!group.queue.empty() && awaited[group.queue.front().flat_id]) {
            mark_work(); // the slot may be the only one that a wanted expert can get
            work.notify_one();
        }
    }
    if (n_pins == 0) {
        changed.notify_all();
    }
}

bool residency_table::has_resident(int layer) const {
    return n_resident[layer].load(std::memory_order_relaxed) > 0 && !is_stopped.load(std::memory_order_relaxed);
}

// a plan, a demand or a free slot gives the mover work; to be followed by work.notify_one()
void residency_table::mark_work() {
    is_mover_idle = false;
    ready_ns      = now_ns();
}

// the mover passed over a victim that was pinned: it can be evicted now
void residency_table::restore_deferred(group_state & group, int32_t freed) {
    for (size_t i = 0; i < group.deferred.size(); i++) {
        if (slot[group.deferred[i].flat_id] == freed) {
            group.victims.push_back(group.deferred[i]); // it was removed from there: no allocation
            std::push_heap(group.victims.begin(), group.victims.end());
            group.deferred[i] = group.deferred.back();
            group.deferred.pop_back();
            mark_work();
            work.notify_one();
            return;
        }
    }
}

void residency_table::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_stopped = true;
    }
    work.notify_all();
    changed.notify_all();
}

// counters

void residency_table::set_utilities(const float * values) {
    std::lock_guard<std::mutex> lock(mutex);
    std::copy(values, values + utility.size(), utility.begin());
}

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
    stats.transfer_s  = (double) (counts.transfer_ns + (n_in_flight > 0 ? now_ns() - busy_from_ns : 0)) * 1e-9;
    stats.plans       = counts.plans;
    stats.ahead       = counts.ahead;
    stats.ahead_used  = counts.ahead_used;
    stats.slots_used  = counts.uploads - counts.evictions;
    stats.in_flight   = n_in_flight;
    stats.pinned      = n_pins;
    for (const group_state & group : groups) {
        stats.queued += (int64_t) group.queue.size();
    }
}

} // namespace moeedge
