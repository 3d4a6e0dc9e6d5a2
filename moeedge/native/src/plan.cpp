// The planning side of the residency table: taking a plan over, waiting for it, emptying the slots.

#include <algorithm>
#include <cmath>

#include "table.h"
#include "timing.h"

namespace moeedge {

bool residency_table::victim::operator<(const victim & other) const {
    return utility != other.utility ? utility > other.utility : rank > other.rank;
}

int residency_table::entry_of(const int32_t * pair) const {
    const bool exists = pair[0] >= 0 && pair[0] < (int) group_of.size() && group_of[pair[0]] >= 0 && pair[1] >= 0 &&
                        pair[1] < n_experts;
    return exists ? pair[0] * n_experts + pair[1] : -1;
}

// Everything that takes long is done here, without the table's mutex; what is named twice counts once.
bool residency_table::sort_plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
                                const float * utility, int n_victims, new_plan & out) {
    out.queues.resize(groups.size());
    out.victims.resize(groups.size());
    for (int i = 0; i < n_uploads; i++) {
        const int32_t entry = entry_of(&uploads[2 * i]);
        if (entry < 0) {
            return false;
        }
        if (asked[entry] != n_plans) {
            asked[entry] = n_plans;
            out.queues[group_of[layer_of(entry)]].push_back({ entry, levels[i] });
        }
    }
    for (int i = 0; i < n_victims; i++) {
        const int32_t entry = entry_of(&victims[2 * i]);
        if (entry < 0) {
            return false;
        }
        if (offered[entry] != n_plans) {
            offered[entry] = n_plans;
            const float value = std::isnan(utility[i]) ? INFINITY : utility[i]; // a heap needs an order
            out.victims[group_of[layer_of(entry)]].push_back({ entry, value, i });
        }
    }
    const auto comes_first = [this](const queued & a, const queued & b) {
        return a.level != b.level ? a.level > b.level : layer_of(a.entry) < layer_of(b.entry);
    };
    for (size_t g = 0; g < groups.size(); g++) {
        std::vector<queued> & queue = out.queues[g];
        if (!std::is_sorted(queue.begin(), queue.end(), comes_first)) { // as policies give it
            std::stable_sort(queue.begin(), queue.end(), comes_first);
        }
        std::make_heap(out.victims[g].begin(), out.victims[g].end());
    }
    return true;
}

bool residency_table::plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
                           const float * utility, int n_victims) {
    std::lock_guard<std::mutex> planning(plan_mutex);
    n_plans++;
    new_plan next;
    if (!sort_plan(uploads, levels, n_uploads, victims, utility, n_victims, next)) {
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        counts.plans++;
        for (size_t g = 0; g < groups.size(); g++) {
            cancel_queue(groups[g]);
            groups[g].queue.swap(next.queues[g]);
            groups[g].victims.swap(next.victims[g]);
            groups[g].deferred.clear();
            groups[g].deferred.reserve(groups[g].victims.size());
        }
        is_resting = false;
        ready_ns   = now_ns();
    }
    work.notify_one();
    return true;
}

// takes entries off the lists of what may go
template <typename T, typename F> static void take_off(std::vector<T> & victims, F is_off) {
    victims.erase(std::remove_if(victims.begin(), victims.end(), is_off), victims.end());
}

void residency_table::spare(group_state & group, const std::vector<int32_t> & entries) {
    const auto is_spared = [&entries](const victim & each) {
        return std::find(entries.begin(), entries.end(), each.entry) != entries.end();
    };
    take_off(group.victims, is_spared);
    take_off(group.deferred, is_spared);
    std::make_heap(group.victims.begin(), group.victims.end());
}

// The order of what a demand gave up is that of its moment: the next demand's layer is another one.
void residency_table::end_demand(group_state & group) {
    const auto is_over = [](const victim & each) { return each.by_demand; };
    take_off(group.victims, is_over);
    take_off(group.deferred, is_over);
    std::make_heap(group.victims.begin(), group.victims.end());
}

// above every level of a plan
static constexpr uint8_t level_of_demands = UINT8_MAX;

int residency_table::demand(int layer, const int32_t * experts, int n, const int32_t * victims, const float * utility,
                            int n_victims, double timeout_s) {
    std::vector<int32_t> wanted;
    for (int i = 0; i < n; i++) {
        const int32_t pair[]  = { layer, experts[i] };
        const int32_t entry   = entry_of(pair);
        const bool    is_new  = std::find(wanted.begin(), wanted.end(), entry) == wanted.end();
        if (entry < 0) {
            return -1;
        }
        if (is_new) {
            wanted.push_back(entry);
        }
    }
    std::vector<victim> given_up;
    for (int i = 0; i < n_victims; i++) {
        const int32_t entry = entry_of(&victims[2 * i]);
        if (entry < 0) {
            return -1;
        }
        if (group_of[layer_of(entry)] == group_of[layer]) {
            given_up.push_back({ entry, std::isnan(utility[i]) ? INFINITY : utility[i], i, /* by_demand = */ true });
        }
    }
    std::unique_lock<std::mutex> lock(mutex);
    const auto                   is_there = [this](int32_t entry) { return state[entry] == resident; };
    if (wanted.empty() || std::all_of(wanted.begin(), wanted.end(), is_there)) {
        return (int) wanted.size();
    }
    group_state & group = groups[group_of[layer]];
    group.victims.insert(group.victims.end(), given_up.begin(), given_up.end());
    spare(group, wanted);
    group.deferred.reserve(group.deferred.size() + group.victims.size());
    group.queue.erase(group.queue.begin(), group.queue.begin() + (ptrdiff_t) group.head);
    group.head = 0;
    std::vector<queued> first;
    for (const int32_t entry : wanted) {
        if (state[entry] == absent) {
            first.push_back({ entry, level_of_demands });
        }
    }
    group.queue.insert(group.queue.begin(), first.begin(), first.end());
    is_resting = false;
    ready_ns   = now_ns();
    work.notify_one();
    n_demands++;
    const auto timeout = std::chrono::duration<double>(std::min(timeout_s, 1e9));
    rest.wait_for(lock, timeout, [&] {
        const bool is_over = is_resting && n_in_flight == 0; // the mover has found no room for more
        return is_stopped || is_over || std::all_of(wanted.begin(), wanted.end(), is_there);
    });
    n_demands--;
    end_demand(group);
    return (int) std::count_if(wanted.begin(), wanted.end(), is_there);
}

// what is queued still and not asked for by the plan under way
void residency_table::cancel_queue(group_state & group) {
    for (; group.head < group.queue.size(); group.head++) {
        const int32_t entry = group.queue[group.head].entry;
        counts.cancelled += state[entry] == absent && asked[entry] != n_plans;
    }
    group.queue.clear();
    group.head = 0;
}

// nothing moves, and nothing will before the next plan
bool residency_table::is_idle() const {
    bool is_waiting = false; // for pins
    for (const group_state & group : groups) {
        is_waiting |= !group.deferred.empty() && group.head < group.queue.size();
    }
    return is_resting && n_in_flight == 0 && !is_waiting;
}

residency_table::outcome residency_table::drain(double timeout_s) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto                   timeout = std::chrono::duration<double>(std::min(timeout_s, 1e9));
    const bool in_time = rest.wait_for(lock, timeout, [this] { return is_stopped || is_idle(); });
    return is_stopped ? outcome::stopped : in_time ? outcome::done : outcome::timeout;
}

residency_table::outcome residency_table::clear() {
    std::lock_guard<std::mutex>  planning(plan_mutex);
    std::unique_lock<std::mutex> lock(mutex);
    n_plans++;
    for (group_state & group : groups) {
        cancel_queue(group);
        group.victims.clear();
        group.deferred.clear();
    }
    rest.wait(lock, [this] { return is_stopped || (n_in_flight == 0 && n_pins == 0); });
    if (is_stopped) {
        return outcome::stopped;
    }
    for (group_state & group : groups) {
        for (int32_t owner : std::vector<int32_t>(group.owner)) {
            if (owner >= 0) {
                evict(group, owner);
            }
        }
    }
    return outcome::done;
}

} // namespace moeedge
