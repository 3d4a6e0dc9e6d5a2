// Using fewer of the slots, so that memory can be given back, and more of them again.

#include <algorithm>
#include <numeric>

#include "residency-table.h"

namespace moeedge {

// slots that an expert has, resident or in flight
std::vector<bool> residency_table::occupied(int g) const {
    std::vector<bool> found(groups[g].owner.size(), false);
    for (size_t flat_id = 0; flat_id < slot.size(); flat_id++) {
        if (slot[flat_id] != no_slot && group_of[layer_of((int32_t) flat_id)] == g) {
            found[slot[flat_id]] = true;
        }
    }
    return found;
}

// whether expert a goes before expert b
bool residency_table::is_less_useful(int32_t a, int32_t b) const {
    return utility[a] != utility[b] ? utility[a] < utility[b] : used[a] < used[b];
}

// Takes the experts out of the slots from `limit` on: the most useful ones move to free slots below, or replace less useful
// experts. Those in use by a computation stay until they are evicted.
void residency_table::move_down(group_state & group, const slot_memory & memory, int g) {
    std::vector<int32_t> moving, evictable;
    for (size_t s = 0; s < group.owner.size(); s++) {
        const int32_t id       = group.owner[s];
        const bool    is_above = (int) s >= group.limit;
        if (id >= 0 && group.pins[s] == 0 && (is_above || !awaited[id])) {
            (is_above ? moving : evictable).push_back(id);
        }
    }
    const auto by_use = [this](int32_t a, int32_t b) { return is_less_useful(a, b); };
    std::sort(evictable.begin(), evictable.end(), by_use);
    std::sort(moving.rbegin(), moving.rend(), by_use);
    std::vector<bool> is_taken = occupied(g);
    int               to       = 0; // slots before it are taken
    size_t            n_gone   = 0; // of the evictable ones
    for (const int32_t id : moving) {
        while (to < group.limit && is_taken[to]) {
            to++;
        }
        int place = to;
        if (to == group.limit) {
            if (n_gone == evictable.size() || (!awaited[id] && is_less_useful(id, evictable[n_gone]))) {
                if (!awaited[id]) {
                    evict(group, id);
                }
                continue;
            }
            place = slot[evictable[n_gone]];
            evict(group, evictable[n_gone++]);
        }
        memory.copy(g, slot[id], place);
        group.owner[slot[id]] = -1;
        group.owner[place]    = id;
        slot[id]              = place;
        is_taken[place]       = true;
    }
}

int residency_table::limit(int n_slots, const slot_memory & memory) {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t                     n_all = 0;
    for (const group_state & group : groups) {
        n_all += (int64_t) group.owner.size();
    }
    if (n_all == 0) {
        return 0;
    }
    int n_now = 0;
    for (size_t g = 0; g < groups.size(); g++) {
        group_state & group  = groups[g];
        const int     before = group.limit;
        const int     most   = (int) group.owner.size();
        group.limit          = std::clamp((int) ((int64_t) most * n_slots / n_all), std::min(1, most), most);
        n_now += group.limit;
        move_down(group, memory, (int) g);
        const std::vector<bool> is_taken = occupied((int) g);
        group.free.clear();
        for (int s = group.limit - 1; s >= 0; s--) {
            if (!is_taken[s]) {
                group.free.push_back(s);
            }
        }
        for (int begin = group.limit; begin < most;) {
            int end = begin;
            while (end < most && !is_taken[end]) {
                end++;
            }
            if (end > begin && group.limit <= before) {
                memory.give_back((int) g, begin, end);
            }
            begin = end + 1;
        }
    }
    mark_work();
    work.notify_one();
    return n_now;
}

std::vector<int> residency_table::limits() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<int>            found;
    for (const group_state & group : groups) {
        found.push_back(group.limit);
    }
    return found;
}

} // namespace moeedge
