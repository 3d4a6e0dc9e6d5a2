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
    explicit paced_link(double rate) : bytes_per_s(rate) {}

    bool is_paced() const { return bytes_per_s > 0; }

    clock::time_point deliver(const upload & load) {
        const int64_t begin_ns = std::max({ free_ns, load.ready_ns, now_ns() - oversleep_ns });
        free_ns                = begin_ns + (int64_t) ((double) load.bytes / bytes_per_s * 1e9);
        return clock::time_point(std::chrono::nanoseconds(free_ns));
    }

  private:
    double  bytes_per_s;
    int64_t free_ns = 0;
};

// The loop: start uploads as long as there are any worth starting, then wait for the oldest.
class moving_loop {
  public:
    explicit moving_loop(cache_core & c) : core(c), link(c.link_bytes_per_s) {
        if (core.device->is_remote) {
            core.moving->set_courtesy([this] { core.table->wait_unpinned(most_courtesy); });
        }
    }

    void run() {
        residency_table::found found = residency_table::found::nothing;
        while (found != residency_table::found::stopped) {
            upload next;
            found = core.table->take(next, /* may_wait = */ flights.empty());
            if (found == residency_table::found::upload) {
                start(next);
            }
            const bool is_full = (int) flights.size() >= core.moving->depth();
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
        upload  load;
        int64_t ticket;
    };

    void start(const upload & next) {
        if (next.ahead.layer >= 0) {
            core.source.announce(next.ahead.layer, next.ahead.expert);
        }
        const int64_t ticket = core.moving->send(next.what.layer, next.what.expert, next.slot);
        if (ticket < 0) {
            core.table->finish(next, /* arrived = */ false);
            return;
        }
        flights.push_back({ next, ticket });
    }

    // The link is paced from when the upload could begin: the copy itself is part of its time.
    void finish_oldest() {
        const flight oldest = flights.front();
        flights.pop_front();
        core.moving->wait(oldest.ticket);
        if (link.is_paced()) {
            core.table->wait_until(link.deliver(oldest.load));
        }
        core.table->finish(oldest.load, /* arrived = */ true);
    }

    cache_core &       core;
    paced_link         link;
    std::deque<flight> flights;
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
