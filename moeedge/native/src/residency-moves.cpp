// The mover's side of the residency table: which upload comes next, what goes for it, and its end.

#include <algorithm>
#include <utility>

#include "residency-table.h"
#include "timing.h"

namespace moeedge {

// how many uploads ahead the file is read: enough requests to keep a disk busy while one is awaited
static constexpr size_t n_uploads_read_ahead = 4;

take_result residency_table::take(std::vector<upload> & out, int n_max, bool may_wait) {
    std::unique_lock<std::mutex> lock(mutex);
    out.clear();
    to_hasten.clear(); // an upload that has begun is not interrupted
    while (!is_stopped) {
        if (group_state * group = next_group()) {
            out.push_back(start(*group));
            const int layer = out.front().id.layer;
            while ((int) out.size() < n_max && skip_to_absent(*group) && layer_of(group->queue.front().flat_id) == layer &&
                   find_room(*group)) {
                out.push_back(start(*group));
            }
            pair_in_order(out);
            counts.transfers++;
            return TAKE_UPLOADS;
        }
        if (!may_wait) {
            return TAKE_NONE;
        }
        is_mover_idle = true;
        changed.notify_all();
        work.wait(lock);
    }
    return TAKE_STOPPED;
}

take_result residency_table::take_one(std::vector<upload> & out, std::vector<expert_id> & hastened, int n_in_flight_max) {
    std::unique_lock<std::mutex> lock(mutex);
    out.clear();
    hastened.clear();
    while (!is_stopped) {
        hastened.swap(to_hasten);
        group_state * group = next_group();
        if (group && (n_in_flight < n_in_flight_max || group->queue.front().priority == demand_priority)) {
            out.push_back(start(*group));
            counts.transfers++;
        }
        if (!out.empty() || !hastened.empty()) {
            return TAKE_UPLOADS;
        }
        is_mover_idle = group == nullptr;
        if (is_mover_idle) {
            changed.notify_all();
        }
        work.wait(lock);
    }
    return TAKE_STOPPED;
}

// Gives neighbours in the file neighbouring slots: they go in one piece.
void residency_table::pair_in_order(std::vector<upload> & uploads) {
    if (uploads.size() < 2) {
        return;
    }
    std::vector<int> slots;
    for (const upload & each : uploads) {
        slots.push_back(each.slot);
    }
    std::sort(slots.begin(), slots.end());
    std::sort(uploads.begin(), uploads.end(), [](const upload & a, const upload & b) { return a.id.expert < b.id.expert; });
    for (size_t i = 0; i < uploads.size(); i++) {
        uploads[i].slot = slots[i];
        slot[(size_t) uploads[i].id.layer * n_experts + uploads[i].id.expert] = slots[i];
    }
}

// among the groups that have room, the one whose first upload comes first: by priority, then by layer
residency_table::group_state * residency_table::next_group() {
    group_state * best = nullptr;
    for (group_state & group : groups) {
        if (!skip_to_absent(group) || !find_room(group)) {
            continue;
        }
        const queued & mine = group.queue.front();
        if (best == nullptr || mine.priority > best->queue.front().priority ||
            (mine.priority == best->queue.front().priority && mine.flat_id < best->queue.front().flat_id)) {
            best = &group;
        }
    }
    return best;
}

bool residency_table::skip_to_absent(group_state & group) {
    for (; !group.queue.empty(); group.queue.pop_front()) {
        const queued & first   = group.queue.front();
        const bool     is_late = first.priority == ahead_priority && !is_kept(first.flat_id);
        if (state[first.flat_id] == MOEEDGE_RESIDENCY_ABSENT && !is_late) {
            break;
        }
    }
    return !group.queue.empty();
}

// whether there is a free slot, or a victim at the heap's front that can be evicted
bool residency_table::find_room(group_state & group) {
    if (!group.free.empty()) {
        return true;
    }
    const queued & first = group.queue.front();
    if (awaited[first.flat_id] || first.priority == ahead_priority) {
        return find_least_useful(group, awaited[first.flat_id] != 0);
    }
    while (!group.victims.empty()) {
        const victim & next        = group.victims.front();
        const bool     is_resident = state[next.flat_id] == MOEEDGE_RESIDENCY_RESIDENT && !is_kept(next.flat_id) &&
                                 slot[next.flat_id] < group.limit;
        if (is_resident && group.pins[slot[next.flat_id]] == 0) {
            return true;
        }
        if (is_resident) {
            group.deferred.push_back(next);
        }
        std::pop_heap(group.victims.begin(), group.victims.end());
        group.victims.pop_back();
    }
    return false;
}

// Names the expert that goes for one that is wanted or read ahead. Loading takes milliseconds, so that a look at each slot
// costs nothing.
bool residency_table::find_least_useful(group_state & group, bool is_wanted) {
    group.victims.clear(); // one that was named for a load that another one has overtaken
    // the layer's own experts can go as soon as they are computed, so that the others need not
    const bool is_urgent = is_wanted && (!is_scan || n_demands > 0);
    // whether the batch needs it before it begins anew
    const auto is_needed = [this](int32_t id) { return is_scan && layer_of(id) > wanted_layer; };
    int32_t    least     = -1;
    for (int s = 0; s < group.limit; s++) {
        const int32_t id = group.owner[s];
        if (id < 0 || group.pins[s] > 0 || awaited[id] || (!is_urgent && (is_kept(id) || is_needed(id)))) {
            continue;
        }
        const auto rank = [&](int32_t e) { return std::make_pair(is_kept(e), is_needed(e)); };
        if (least < 0 || rank(id) < rank(least) || (rank(id) == rank(least) && is_less_useful(id, least))) {
            least = id;
        }
    }
    if (least >= 0) {
        group.victims.push_back({ least, utility[least], 0 });
    }
    return least >= 0;
}

upload residency_table::start(group_state & group) {
    if (group.free.empty()) {
        const int32_t flat_id = group.victims.front().flat_id;
        std::pop_heap(group.victims.begin(), group.victims.end());
        group.victims.pop_back();
        evict(group, flat_id);
    }
    const uint8_t priority = group.queue.front().priority;
    const int32_t flat_id  = group.queue.front().flat_id;
    upload        out = { id_of(flat_id), group.free.back(), group.expert_bytes, ready_ns, { -1, -1 }, priority };
    if (n_uploads_read_ahead < group.queue.size()) {
        out.read_ahead = id_of(group.queue[n_uploads_read_ahead].flat_id);
    }
    group.queue.pop_front();
    group.free.pop_back();
    state[flat_id]    = MOEEDGE_RESIDENCY_IN_FLIGHT;
    slot[flat_id]     = out.slot;
    is_ahead[flat_id] = priority == ahead_priority;
    counts.ahead += is_ahead[flat_id];
    if (n_in_flight++ == 0) {
        busy_from_ns = now_ns();
    }
    return out;
}

// a slot beyond the limit stays empty
void residency_table::add_free(group_state & group, int32_t freed) {
    if (freed < group.limit) {
        group.free.push_back(freed);
    }
}

void residency_table::evict(group_state & group, int32_t flat_id) {
    add_free(group, slot[flat_id]);
    group.owner[slot[flat_id]] = -1;
    state[flat_id]             = MOEEDGE_RESIDENCY_ABSENT;
    slot[flat_id]              = no_slot;
    is_ahead[flat_id]          = 0;
    n_resident[layer_of(flat_id)].fetch_sub(1, std::memory_order_relaxed);
    counts.evictions++;
}

void residency_table::finish(const upload & done, bool has_arrived) {
    std::lock_guard<std::mutex> lock(mutex);
    const int                   layer   = done.id.layer;
    group_state &               group   = groups[group_of[layer]];
    const int32_t               flat_id = layer * n_experts + done.id.expert;
    if (has_arrived) {
        state[flat_id]         = MOEEDGE_RESIDENCY_RESIDENT;
        group.owner[done.slot] = flat_id;
        n_resident[layer].fetch_add(1, std::memory_order_relaxed);
        counts.uploads++;
        counts.bytes_moved += done.bytes;
        leave_beyond(group, done.slot);
    } else {
        state[flat_id] = MOEEDGE_RESIDENCY_ABSENT;
        slot[flat_id]  = no_slot;
        add_free(group, done.slot);
        is_ahead[flat_id] = 0;
        counts.failed++;
        mark_work();
        is_unloadable |= awaited[flat_id] != 0;
    }
    if (--n_in_flight == 0) {
        counts.transfer_ns += now_ns() - busy_from_ns;
    }
    if (n_in_flight == 0 || n_demands > 0) {
        changed.notify_all();
    }
    work.notify_one(); // room for another one
}

void residency_table::wait_until(std::chrono::steady_clock::time_point time) {
    std::unique_lock<std::mutex> lock(mutex);
    while (!is_stopped && std::chrono::steady_clock::now() < time) {
        work.wait_until(lock, time);
    }
}

void residency_table::wait_unpinned(std::chrono::milliseconds at_most) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, at_most, [this] { return is_stopped || n_pins == 0; });
}

} // namespace moeedge
