// Queues of the counting device: what was launched and what the host knows to be done.
//
// An operation is issued, executed (at once, or with `defer` when something waits for it) and finished: known to be done,
// because the host waited. Two operations are ordered if one was finished when the other was issued, if they are in the same
// queue, or if an event orders their queues. Unordered ones must not touch the same bytes unless both only read them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "byte-ranges.h"

namespace counting {

struct operation {
    std::string name; // for hazards
    bool        is_graph = false;
    byte_ranges reads, writes;
    byte_ranges tables;                  // some parts of them are read: which, is known after the execution
    std::function<byte_ranges()> picked; // gives the parts
    std::function<void()>        run;
    // another queue's operation that comes first, if there is one
    int     after_queue = 0;
    int64_t after_index = 0;

    byte_ranges suspects; // unordered writes to the tables, by others
    std::string suspect;
    bool        has_run = false;
};

// a point in a queue, and what is ordered before it: queue id -> number of operations
struct moment {
    std::map<int, int64_t> before;
};

class device_queue {
  public:
    device_queue();
    ~device_queue();
    device_queue(const device_queue &)             = delete;
    device_queue & operator=(const device_queue &) = delete;

    const int id;

    void   issue(operation next);
    moment now() const;
    void   wait_for(const moment & point);
    bool   has_unfinished() const { return !pending.empty(); }

    static device_queue * find(int id);
    // checks bytes that the host or a transfer of its own is about to touch against all queues
    static void check_host(const operation & access);
    // the host waits for that point; returns how many graph launches are newly known to be done
    static int  finish(const moment & point);
    static int  finish_all();
    static bool is_finished(const moment & point);

  private:
    void execute(int64_t end);
    int  finish_to(int64_t end);
    void run(operation & op);
    void check(operation & next, const std::map<int, int64_t> & before) const;

    std::deque<operation>  pending;
    int64_t                n_finished = 0;
    int64_t                n_issued   = 0;
    std::map<int, int64_t> ordered; // what the next operation comes after, in other queues
};

} // namespace counting
