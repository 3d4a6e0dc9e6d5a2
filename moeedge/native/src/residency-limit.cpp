// Using fewer of the slots, so that memory can be given back, and more of them again.
//
// Copies of experts and giving memory back take a tenth of a second per GB. Both happen without the table's mutex, so that no
// computation waits for them: meanwhile an expert that moves is pinned, its new slot is neither free nor anyone's, and no load
// begins in a slot beyond the limit. `limiting` keeps the limits as they are until a call is done.

#include <algorithm>
#include <utility>

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

// whether an expert is resident in a slot that no computation uses
bool residency_table::is_unused(const group_state & group, int32_t flat_id) const {
    const int32_t s = slot[flat_id];
    return s != no_slot && group.owner[s] == flat_id && group.pins[s] == 0;
}

// how many slots there are now; each group has its share of them
int residency_table::set_limits(int n_slots) {
    std::lock_guard<std::mutex> lock(mutex);
    int64_t                     n_all = 0;
    for (const group_state & group : groups) {
        n_all += (int64_t) group.owner.size();
    }
    int n_now = 0;
    for (size_t g = 0; g < groups.size() && n_all > 0; g++) {
        group_state & group = groups[g];
        const int     most  = (int) group.owner.size();
        group.limit         = std::clamp((int) ((int64_t) most * n_slots / n_all), std::min(1, most), most);
        group.is_moving      = true;
        n_now += group.limit;
        const std::vector<bool> is_taken = occupied((int) g);
        group.free.clear();
        for (int s = group.limit - 1; s >= 0; s--) {
            if (!is_taken[s]) {
                group.free.push_back(s);
            }
        }
    }
    mark_work();
    work.notify_one();
    return n_now;
}

// The experts beyond the limit, those that a computation waits for and then the most useful first; and those below it, the least
// useful last.
void residency_table::list_moves(const group_state & group, std::vector<int32_t> & moving, std::vector<int32_t> & below) {
    std::lock_guard<std::mutex> lock(mutex);
    for (size_t s = 0; s < group.owner.size(); s++) {
        const int32_t id = group.owner[s];
        if (id >= 0) {
            ((int) s >= group.limit ? moving : below).push_back(id);
        }
    }
    const auto comes_first = [this](int32_t a, int32_t b) {
        return awaited[a] != awaited[b] ? awaited[a] > awaited[b] : is_less_useful(b, a);
    };
    std::sort(moving.begin(), moving.end(), comes_first);
    std::sort(below.begin(), below.end(), comes_first);
}

// Pins an expert beyond the limit, and takes a slot below it for it: a free one, or that of a less useful expert, which leaves
// the list. no_slot: there is none, or a computation uses the expert.
int32_t residency_table::begin_move(group_state & group, int32_t flat_id, std::vector<int32_t> & below) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!is_unused(group, flat_id) || slot[flat_id] < group.limit) {
        return no_slot;
    }
    while (group.free.empty() && !below.empty()) {
        const int32_t least = below.back();
        if (is_unused(group, least) && !awaited[least]) {
            if (!awaited[flat_id] && is_less_useful(flat_id, least)) {
                return no_slot;
            }
            evict(group, least);
        }
        below.pop_back();
    }
    if (group.free.empty()) {
        return no_slot;
    }
    const int32_t to = group.free.back();
    group.free.pop_back();
    group.pins[slot[flat_id]]++;
    n_pins++;
    return to;
}

// The copy is done: the expert has its new slot, unless a computation has begun to use the old one.
void residency_table::end_move(group_state & group, int32_t flat_id, int32_t to) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        const int32_t               from = slot[flat_id];
        if (--group.pins[from] == 0) {
            group.owner[from] = -1;
            group.owner[to]   = flat_id;
            slot[flat_id]     = to;
        } else {
            add_free(group, to);
        }
        if (--n_pins == 0) {
            changed.notify_all();
        }
        mark_work(); // room for another one
    }
    work.notify_one();
}

// evicts what is left beyond the limit, except what a computation uses or waits for; the slots there that are empty now
std::vector<std::pair<int, int>> residency_table::empty_beyond(int g) {
    std::lock_guard<std::mutex> lock(mutex);
    group_state &               group = groups[g];
    const int                   most  = (int) group.owner.size();
    for (int s = group.limit; s < most; s++) {
        const int32_t id = group.owner[s];
        if (id >= 0 && is_unused(group, id) && !awaited[id]) {
            evict(group, id);
        }
    }
    group.is_moving                           = false;
    const std::vector<bool>          is_taken = occupied(g);
    std::vector<std::pair<int, int>> empty;
    for (int begin = group.limit; begin < most;) {
        int end = begin;
        while (end < most && !is_taken[end]) {
            end++;
        }
        if (end > begin) {
            empty.emplace_back(begin, end);
        }
        begin = end + 1;
    }
    return empty;
}

int residency_table::limit(int n_slots) {
    const std::lock_guard<std::mutex> lock(limiting);
    const int                         n_now = set_limits(n_slots);
    for (size_t g = 0; g < groups.size(); g++) {
        group_state &        group = groups[g];
        std::vector<int32_t> moving, below;
        list_moves(group, moving, below);
        for (int turn = 0; turn < 2; turn++) { // what a computation used in the first turn moves in the second
            for (const int32_t flat_id : moving) {
                const int32_t to = begin_move(group, flat_id, below);
                if (to != no_slot) {
                    memory.copy((int) g, slot[flat_id], to); // of a pinned expert, so that it stays there
                    end_move(group, flat_id, to);
                }
            }
        }
        for (const auto & [begin, end] : empty_beyond((int) g)) {
            memory.give_back((int) g, begin, end);
        }
    }
    return n_now;
}

// Evicts the expert of a slot beyond the limit as soon as no computation uses it or waits for it, and gives its memory back;
// `limit` itself does so where it may still move the expert.
void residency_table::leave_beyond(group_state & group, int32_t s) {
    if (s < group.limit || group.is_moving) {
        return;
    }
    const int32_t id = group.owner[s];
    if (id >= 0 && is_unused(group, id) && !awaited[id]) {
        evict(group, id);
        memory.give_back((int) (&group - groups.data()), s, s + 1);
    }
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
