#include "expert-mover.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>

#include "timing.h"

namespace moeedge {

using steady_clock = std::chrono::steady_clock;

// a thread sleeps longer than it asks for, the link does not: up to this much is made up for at once
static constexpr int64_t oversleep_ns = 20 * 1000 * 1000;
// how long an upload to a remote worker waits for computation; blocks take a fraction of it
static constexpr auto yield_limit = std::chrono::milliseconds(20);

// The time at which a link of a given rate has delivered the bytes that were sent over it.
class paced_link {
  public:
    paced_link(double rate, double latency) : bytes_per_s(rate), latency_s(latency) {}

    bool is_paced() const { return bytes_per_s > 0 || latency_s > 0; }

    steady_clock::time_point deliver(int64_t bytes, int64_t ready_ns) {
        const int64_t begin_ns = std::max({ free_ns, ready_ns, now_ns() - oversleep_ns });
        const double  bytes_s  = bytes_per_s > 0 ? (double) bytes / bytes_per_s : 0.0;
        free_ns                = begin_ns + (int64_t) ((latency_s + bytes_s) * 1e9);
        return steady_clock::time_point(std::chrono::nanoseconds(free_ns));
    }

  private:
    double  bytes_per_s;
    double  latency_s;
    int64_t free_ns = 0;
};

// The thread's loop: starts uploads as long as the device takes more of them, then waits for the oldest.
class mover_loop {
  public:
    explicit mover_loop(cache_core & c) : core(c), link(c.link_bytes_per_s, c.link_latency_s) {
        if (core.device->is_remote()) {
            core.moving->set_yield_to_compute([this] { core.table->wait_unpinned(yield_limit); });
        }
    }

    void run() {
        take_result result = TAKE_NONE;
        while (result != TAKE_STOPPED) {
            const int batch = core.batch.load();
            result          = core.table->take(next, std::max(batch, 1), /* may_wait = */ flights.empty());
            if (result == TAKE_UPLOADS) {
                start();
            }
            const bool is_full = (int) flights.size() >= (batch == 1 ? 1 : core.moving->depth());
            if (!flights.empty() && (is_full || result != TAKE_UPLOADS)) {
                finish_oldest();
            }
        }
        while (!flights.empty()) {
            finish_oldest();
        }
    }

  private:
    struct flight {
        std::vector<upload> loads; // of one layer
        int64_t             ticket;
    };

    // how many of the uploads from i on are neighbours in the file and on the device
    int count_neighbours(size_t i) const {
        size_t end = i + 1;
        while (end < next.size() && next[end].id.expert == next[end - 1].id.expert + 1 &&
               next[end].slot == next[end - 1].slot + 1 && core.source.is_dense(next[end].id.layer)) {
            end++;
        }
        return (int) (end - i);
    }

    void start() {
        flight sent = { {}, 0 };
        for (size_t i = 0, n = 0; i < next.size(); i += n) {
            n = count_neighbours(i);
            if (next[i].read_ahead.layer >= 0) {
                core.source.announce(next[i].read_ahead.layer, next[i].read_ahead.expert);
            }
            const int64_t ticket = core.moving->send(next[i].id.layer, next[i].id.expert, next[i].slot, (int) n);
            for (size_t k = i; k < i + n; k++) {
                if (ticket < 0) {
                    core.table->finish(next[k], /* has_arrived = */ false);
                } else {
                    sent.loads.push_back(next[k]);
                    sent.ticket = ticket;
                }
            }
        }
        if (!sent.loads.empty()) {
            flights.push_back(std::move(sent));
        }
    }

    // The link is paced from when the upload could begin: the copy itself is part of its time.
    void finish_oldest() {
        const flight oldest = std::move(flights.front());
        flights.pop_front();
        core.moving->wait(oldest.ticket);
        if (link.is_paced()) {
            const int64_t bytes = oldest.loads.front().bytes * (int64_t) oldest.loads.size();
            core.table->wait_until(link.deliver(bytes, oldest.loads.front().ready_ns));
        }
        for (const upload & load : oldest.loads) {
            core.table->finish(load, /* has_arrived = */ true);
        }
    }

    cache_core &        core;
    paced_link          link;
    std::vector<upload> next;
    std::deque<flight>  flights;
};

// The loop where experts are read into the host's own memory: the reader's threads finish them, in the order of arrival.
static void run_loads(cache_core & core) {
    std::vector<upload>    next;
    std::vector<expert_id> hastened;
    while (core.table->take_one(next, hastened, core.loader->loads_ahead()) == TAKE_UPLOADS) {
        for (const expert_id & id : hastened) {
            core.loader->hasten(id.layer, id.expert, residency_table::demand_priority);
        }
        for (const upload & load : next) {
            core.loader->load(load.id.layer, load.id.expert, load.slot, load.priority,
                              [&core, load](bool has_arrived) { core.table->finish(load, has_arrived); });
        }
    }
    core.loader->end();
}

void run_mover(cache_core & core) {
    try {
        if (core.loader) {
            run_loads(core);
        } else {
            mover_loop(core).run();
        }
    } catch (const std::exception & error) { // no memory, or a backend that throws
        core.device->health->mark_lost(error.what());
    } catch (...) {
        core.device->health->mark_lost("its backend failed");
    }
    core.device->health->set(core.has_mover_ended);
}

} // namespace moeedge
