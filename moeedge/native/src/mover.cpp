#include "mover.h"

#include <algorithm>
#include <chrono>
#include <deque>

#include "timing.h"

namespace moeedge {

namespace {

using clock = std::chrono::steady_clock;

// a thread sleeps longer than it asks for; the link does not, and up to this much is made good at once
constexpr int64_t oversleep_ns = 20 * 1000 * 1000;

// how long an upload to a remote worker lets computation go first; blocks take a fraction of it
constexpr auto most_courtesy = std::chrono::milliseconds(20);

// The time at which a link of a given rate has delivered what was sent over it.
class paced_link {
  public:
    paced_link(double rate, double latency) : bytes_per_s(rate), latency_s(latency) {}

    bool is_paced() const { return bytes_per_s > 0 || latency_s > 0; }

    clock::time_point deliver(int64_t bytes, int64_t ready_ns) {
        const int64_t begin_ns = std::max({ free_ns, ready_ns, now_ns() - oversleep_ns });
        const double  bytes_s  = bytes_per_s > 0 ? (double) bytes / bytes_per_s : 0.0;
        free_ns                = begin_ns + (int64_t) ((latency_s + bytes_s) * 1e9);
        return clock::time_point(std::chrono::nanoseconds(free_ns));
    }

  private:
    double  bytes_per_s;
    double  latency_s;
    int64_t free_ns = 0;
};

// The loop: start uploads as long as there are any worth starting, then wait for the oldest.
class moving_loop {
  public:
    explicit moving_loop(cache_core & c) : core(c), link(c.link_bytes_per_s, c.link_latency_s) {
        if (core.device->is_remote) {
            core.moving->set_courtesy([this] { core.table->wait_unpinned(most_courtesy); });
        }
    }

    void run() {
        residency_table::found found = residency_table::found::nothing;
        while (found != residency_table::found::stopped) {
            const int batch = core.batch.load();
            found           = core.table->take(next, std::max(batch, 1), /* may_wait = */ flights.empty());
            if (found == residency_table::found::upload) {
                start();
            }
            const bool is_full = (int) flights.size() >= (batch == 1 ? 1 : core.moving->depth());
            if (!flights.empty() && (is_full || found != residency_table::found::upload)) {
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
    int n_neighbours(size_t i) const {
        size_t end = i + 1;
        while (end < next.size() && next[end].what.expert == next[end - 1].what.expert + 1 &&
               next[end].slot == next[end - 1].slot + 1 && core.source.is_dense(next[end].what.layer)) {
            end++;
        }
        return (int) (end - i);
    }

    void start() {
        flight sent = { {}, 0 };
        for (size_t i = 0, n = 0; i < next.size(); i += n) {
            n = n_neighbours(i);
            if (next[i].ahead.layer >= 0) {
                core.source.announce(next[i].ahead.layer, next[i].ahead.expert);
            }
            const int64_t ticket = core.moving->send(next[i].what.layer, next[i].what.expert, next[i].slot, (int) n);
            for (size_t k = i; k < i + n; k++) {
                if (ticket < 0) {
                    core.table->finish(next[k], /* arrived = */ false);
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
            core.table->finish(load, /* arrived = */ true);
        }
    }

    cache_core &        core;
    paced_link          link;
    std::vector<upload> next;
    std::deque<flight>  flights;
};

} // namespace

mover::mover(std::shared_ptr<cache_core> c) : core(std::move(c)) {
    thread = std::thread([kept = core] {
        moving_loop(*kept).run();
        kept->device->loss->set(kept->is_moved);
    });
}

// the slowest upload that is still worth making takes a fraction of this
constexpr auto closing_patience = std::chrono::seconds(30);

mover::~mover() {
    core->table->stop();
    if (core->device->loss->wait(core->is_moved, closing_patience)) {
        thread.join();
    } else {
        thread.detach();
    }
}

} // namespace moeedge
