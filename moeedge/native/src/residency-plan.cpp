// The planning side of the residency table: taking a plan over, waiting for it, emptying the slots.

#include <algorithm>
#include <cmath>
#include <tuple>

#include "residency-table.h"

namespace moeedge {

bool residency_table::victim::operator<(const victim & other) const {
    return utility != other.utility ? utility > other.utility : rank > other.rank;
}

int residency_table::flat_id_of(int layer, int expert) const {
    const bool exists =
        layer >= 0 && layer < (int) group_of.size() && group_of[layer] >= 0 && expert >= 0 && expert < n_experts;
    return exists ? layer * n_experts + expert : -1;
}

// a heap needs an order, which NaN does not have
static float ordered(float utility) {
    return std::isnan(utility) ? INFINITY : utility;
}

static std::chrono::duration<double> timeout_of(double seconds) {
    return std::chrono::duration<double>(std::min(seconds, 1e9));
}

// The slow part of a plan, done without the table's mutex; an expert that is named twice counts once.
bool residency_table::sort_plan(const int32_t * uploads, const uint8_t * priority, int n_uploads, const victim_list & victims,
                                new_plan & out) {
    out.queues.resize(groups.size());
    out.victims.resize(groups.size());
    for (int i = 0; i < n_uploads; i++) {
        const int32_t flat_id = flat_id_of(uploads[2 * i], uploads[2 * i + 1]);
        if (flat_id < 0) {
            return false;
        }
        if (asked[flat_id] != n_plans) {
            asked[flat_id] = n_plans;
            const uint8_t below = std::min<uint8_t>(priority[i], ahead_priority - 1);
            out.queues[group_of[layer_of(flat_id)]].push_back({ flat_id, below, i });
        }
    }
    for (int i = 0; i < victims.n; i++) {
        const int32_t flat_id = flat_id_of(victims.pairs[2 * i], victims.pairs[2 * i + 1]);
        if (flat_id < 0) {
            return false;
        }
        if (offered[flat_id] != n_plans) {
            offered[flat_id] = n_plans;
            out.victims[group_of[layer_of(flat_id)]].push_back({ flat_id, ordered(victims.utility[i]), i });
        }
    }
    const auto comes_first = [this](const queued & a, const queued & b) {
        return std::make_tuple(-a.priority, layer_of(a.flat_id), a.rank) < std::make_tuple(-b.priority, layer_of(b.flat_id), b.rank);
    };
    for (size_t g = 0; g < groups.size(); g++) {
        std::deque<queued> & queue = out.queues[g];
        if (!std::is_sorted(queue.begin(), queue.end(), comes_first)) { // policies give it sorted
            std::sort(queue.begin(), queue.end(), comes_first);
        }
        std::make_heap(out.victims[g].begin(), out.victims[g].end());
    }
    return true;
}

int residency_table::plan(const int32_t * uploads, const uint8_t * priority, int n_uploads, const victim_list & victims) {
    std::lock_guard<std::mutex> planning(plan_mutex);
    n_plans++;
    new_plan next;
    if (!sort_plan(uploads, priority, n_uploads, victims, next)) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        counts.plans++;
        for (size_t g = 0; g < groups.size(); g++) {
            keep_demanded(groups[g], next.queues[g]);
            cancel_queue(groups[g]);
            groups[g].queue.swap(next.queues[g]);
            groups[g].victims.swap(next.victims[g]);
            groups[g].deferred.clear();
            groups[g].deferred.reserve(groups[g].victims.size());
        }
        mark_work();
    }
    work.notify_one();
    return MOEEDGE_STATUS_OK;
}

template <typename F> void residency_table::remove_victims(group_state & group, F is_removed) {
    for (std::vector<victim> * list : { &group.victims, &group.deferred }) {
        list->erase(std::remove_if(list->begin(), list->end(), is_removed), list->end());
    }
    std::make_heap(group.victims.begin(), group.victims.end());
}

int residency_table::demand(int layer, const int32_t * experts, int n, const victim_list & victims, double timeout_s) {
    std::vector<int32_t> wanted;
    for (int i = 0; i < n; i++) {
        const int32_t flat_id = flat_id_of(layer, experts[i]);
        if (flat_id < 0) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        if (std::find(wanted.begin(), wanted.end(), flat_id) == wanted.end()) {
            wanted.push_back(flat_id);
        }
    }
    const auto is_wanted = [&](const victim & v) { return std::find(wanted.begin(), wanted.end(), v.flat_id) != wanted.end(); };
    std::vector<victim> offered_now;
    for (int i = 0; i < victims.n; i++) {
        const int32_t flat_id = flat_id_of(victims.pairs[2 * i], victims.pairs[2 * i + 1]);
        if (flat_id < 0) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        if (group_of[layer_of(flat_id)] == group_of[layer]) {
            offered_now.push_back({ flat_id, ordered(victims.utility[i]), i, /* by_demand = */ true });
        }
    }
    std::unique_lock<std::mutex> lock(mutex);
    const auto is_resident = [this](int32_t flat_id) { return state[flat_id] == MOEEDGE_RESIDENCY_RESIDENT; };
    if (wanted.empty() || std::all_of(wanted.begin(), wanted.end(), is_resident)) {
        return (int) wanted.size();
    }
    group_state & group = groups[group_of[layer]];
    group.victims.insert(group.victims.end(), offered_now.begin(), offered_now.end());
    remove_victims(group, is_wanted);
    group.deferred.reserve(group.deferred.size() + group.victims.size());
    std::vector<queued> absent;
    for (const int32_t flat_id : wanted) {
        if (state[flat_id] == MOEEDGE_RESIDENCY_ABSENT) {
            absent.push_back({ flat_id, demand_priority });
        } else if (state[flat_id] == MOEEDGE_RESIDENCY_IN_FLIGHT) {
            to_hasten.push_back(id_of(flat_id));
        }
    }
    group.queue.insert(group.queue.begin(), absent.begin(), absent.end());
    mark_work();
    work.notify_one();
    n_demands++;
    changed.wait_for(lock, timeout_of(timeout_s), [&] {
        const bool is_over = is_mover_idle && n_in_flight == 0; // the mover found no room for more
        return is_stopped || is_over || std::all_of(wanted.begin(), wanted.end(), is_resident);
    });
    n_demands--;
    // the victims' order holds for this moment only: the next demand is of another layer
    remove_victims(group, [](const victim & v) { return v.by_demand; });
    return (int) std::count_if(wanted.begin(), wanted.end(), is_resident);
}

// takes over into the front of a new queue what someone waits for
void residency_table::keep_demanded(group_state & group, std::deque<queued> & next) {
    std::vector<queued> demanded;
    for (; !group.queue.empty() && group.queue.front().priority == demand_priority; group.queue.pop_front()) {
        if (n_demands > 0 || awaited[group.queue.front().flat_id]) {
            demanded.push_back(group.queue.front());
        }
    }
    next.insert(next.begin(), demanded.begin(), demanded.end());
}

// drops the queue; counts the uploads that the current plan does not ask for again
void residency_table::cancel_queue(group_state & group) {
    for (const queued & each : group.queue) {
        counts.cancelled += state[each.flat_id] == MOEEDGE_RESIDENCY_ABSENT && asked[each.flat_id] != n_plans;
    }
    group.queue.clear();
}

// no transfer is under way, and none begins before the next plan
bool residency_table::is_idle() const {
    bool is_waiting = false; // for pinned slots
    for (const group_state & group : groups) {
        is_waiting |= !group.deferred.empty() && !group.queue.empty();
    }
    return is_mover_idle && n_in_flight == 0 && !is_waiting;
}

int residency_table::drain(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex);
    const bool in_time = changed.wait_for(lock, timeout_of(timeout_s), [this] { return is_stopped || is_idle(); });
    return is_stopped ? MOEEDGE_STATUS_DEVICE_LOST : in_time ? MOEEDGE_STATUS_OK : MOEEDGE_STATUS_TIMEOUT;
}

int residency_table::clear(double timeout_s) {
    std::lock_guard<std::mutex>  planning(plan_mutex);
    std::unique_lock<std::mutex> lock(mutex);
    n_plans++;
    for (group_state & group : groups) {
        std::deque<queued> kept;
        keep_demanded(group, kept);
        cancel_queue(group);
        group.queue.swap(kept);
        group.victims.clear();
        group.deferred.clear();
    }
    const bool in_time =
        changed.wait_for(lock, timeout_of(timeout_s), [this] { return is_stopped || (n_in_flight == 0 && n_pins == 0); });
    if (is_stopped || !in_time) {
        return is_stopped ? MOEEDGE_STATUS_DEVICE_LOST : MOEEDGE_STATUS_TIMEOUT;
    }
    for (group_state & group : groups) {
        for (int32_t owner : std::vector<int32_t>(group.owner)) {
            if (owner >= 0 && !awaited[owner]) {
                evict(group, owner);
            }
        }
    }
    mark_work(); // room for what is awaited
    work.notify_one();
    return MOEEDGE_STATUS_OK;
}

} // namespace moeedge
