#include "mover.h"

namespace moeedge {

namespace {

using clock = std::chrono::steady_clock;

// a sleep lasts longer than asked for; what was overslept, up to this much, is made good at once
constexpr auto pace_credit = std::chrono::milliseconds(1);

// The time at which a link of a given rate has delivered what was sent over it.
class paced_link {
  public:
    explicit paced_link(double rate) : bytes_per_s(rate) {}

    bool is_paced() const { return bytes_per_s > 0; }

    clock::time_point deliver(clock::time_point begin, int64_t bytes) {
        const auto duration = std::chrono::duration<double>((double) bytes / bytes_per_s);
        free_at = std::max(free_at, begin - pace_credit) + std::chrono::duration_cast<clock::duration>(duration);
        return free_at;
    }

  private:
    double            bytes_per_s;
    clock::time_point free_at{};
};

// The loop: start uploads as long as there are any worth starting, then wait for the oldest.
class moving_loop {
  public:
    explicit moving_loop(cache_core & c) : core(c), link(c.link_bytes_per_s) {}

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
        upload            load;
        int64_t           ticket;
        clock::time_point begin;
    };

    void start(const upload & next) {
        if (next.ahead.layer >= 0) {
            core.source.announce(next.ahead.layer, next.ahead.expert);
        }
        const auto    begin  = clock::now();
        const int64_t ticket = core.moving->send(next.what.layer, next.what.expert, next.slot);
        if (ticket < 0) {
            core.table->finish(next, /* arrived = */ false);
            return;
        }
        flights.push_back({ next, ticket, begin });
    }

    void finish_oldest() {
        const flight oldest = flights.front();
        flights.pop_front();
        core.moving->wait(oldest.ticket);
        if (link.is_paced()) {
            core.table->wait_until(link.deliver(oldest.begin, oldest.load.bytes));
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
