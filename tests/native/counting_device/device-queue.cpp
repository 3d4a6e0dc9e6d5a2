#include "device-queue.h"

#include "ledger.h"

namespace counting {

// never destroyed: a program may free its contexts after static destructors ran
static std::map<int, device_queue *> & queues() {
    static auto * all = new std::map<int, device_queue *>;
    return *all;
}

static int next_id() {
    static int last_id = 0;
    return ++last_id;
}

device_queue::device_queue() : id(next_id()) {
    queues()[id] = this;
}

device_queue::~device_queue() {
    finish_to(n_issued);
    queues().erase(id);
}

device_queue * device_queue::find(int id) {
    const auto found = queues().find(id);
    return found == queues().end() ? nullptr : found->second;
}

static void report(const operation & a, const operation & b, const char * what) {
    add_hazard(a.name + " and " + b.name + ": " + what);
}

// `next`, which comes after `before`, against the unfinished operations of this queue
void device_queue::check(operation & next, const std::map<int, int64_t> & before) const {
    const auto known   = before.find(id);
    size_t     ordered_n = 0;
    if (known != before.end() && known->second > n_finished) {
        ordered_n = (size_t) (known->second - n_finished);
    }
    for (size_t i = std::min(ordered_n, pending.size()); i < pending.size(); i++) {
        operation & other = const_cast<operation &>(pending[i]);
        if (next.writes.overlaps(other.writes)) {
            report(next, other, "both write the same bytes, unordered");
        } else if (next.writes.overlaps(other.reads)) {
            report(next, other, "the first writes bytes that the second reads, unordered");
        } else if (next.reads.overlaps(other.writes)) {
            report(next, other, "the first reads bytes that the second writes, unordered");
        }
        if (!other.has_run && next.writes.overlaps(other.tables)) {
            other.suspects.add(next.writes.intersection(other.tables));
            other.suspect = next.name;
        }
        if (next.tables.overlaps(other.writes)) {
            next.suspects.add(other.writes.intersection(next.tables));
            next.suspect = other.name;
        }
    }
}

void device_queue::check_host(const operation & access) {
    operation checked = access;
    for (const auto & [id, queue] : queues()) {
        queue->check(checked, {});
    }
}

void device_queue::issue(operation next) {
    next.name += " (queue " + std::to_string(id) + ")";
    for (const auto & [other_id, queue] : queues()) {
        if (queue != this) {
            queue->check(next, ordered);
        }
    }
    pending.push_back(std::move(next));
    n_issued++;
    if (!current_settings().defer) {
        execute(n_issued);
    }
}

moment device_queue::now() const {
    moment point = { ordered };
    point.before[id] = n_issued;
    return point;
}

void device_queue::wait_for(const moment & point) {
    for (const auto & [other, index] : point.before) {
        if (other == id) {
            continue;
        }
        ordered[other] = std::max(ordered[other], index);
        operation wait;
        wait.name        = "wait";
        wait.after_queue = other;
        wait.after_index = index;
        issue(std::move(wait));
    }
}

void device_queue::run(operation & op) {
    op.has_run = true;
    if (op.after_queue != 0) {
        if (device_queue * other = find(op.after_queue)) {
            other->execute(op.after_index);
        }
    }
    if (op.run) {
        op.run();
    }
    if (op.picked) {
        const byte_ranges parts = op.picked();
        if (parts.overlaps(op.suspects)) {
            add_hazard(op.suspect + " and " + op.name + ": the first writes an expert that the second reads, unordered");
        }
        op.reads.add(parts);
        op.tables = {};
    }
}

void device_queue::execute(int64_t end) {
    const int64_t n = std::min<int64_t>(end - n_finished, (int64_t) pending.size());
    for (int64_t i = 0; i < n; i++) {
        if (!pending[(size_t) i].has_run) {
            run(pending[(size_t) i]);
        }
    }
}

int device_queue::finish_to(int64_t end) {
    execute(end);
    int n_graphs = 0;
    while (n_finished < end && !pending.empty()) {
        const operation done = std::move(pending.front());
        pending.pop_front();
        n_finished++;
        n_graphs += done.is_graph;
        if (device_queue * other = done.after_queue ? find(done.after_queue) : nullptr) {
            n_graphs += other->finish_to(done.after_index);
        }
    }
    return n_graphs;
}

int device_queue::finish(const moment & point) {
    int n_graphs = 0;
    for (const auto & [id, index] : point.before) {
        if (device_queue * queue = find(id)) {
            n_graphs += queue->finish_to(index);
        }
    }
    return n_graphs;
}

int device_queue::finish_all() {
    int n_graphs = 0;
    for (const auto & [id, queue] : queues()) {
        n_graphs += queue->finish_to(queue->n_issued);
    }
    return n_graphs;
}

bool device_queue::is_finished(const moment & point) {
    for (const auto & [id, index] : point.before) {
        const device_queue * queue = find(id);
        if (queue && queue->n_finished < std::min(index, queue->n_issued)) {
            return false;
        }
    }
    return true;
}

} // namespace counting
