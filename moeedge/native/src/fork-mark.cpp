#include "fork-mark.h"

#include <atomic>

#include <pthread.h>

namespace moeedge {

static std::atomic<int> n_forks{ 0 }; // between the first process that made a mark and this one

int fork_mark::current() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { n_forks.fetch_add(1); });
    (void) registered; // it fails only without memory; a child then behaves as if it were its parent
    return n_forks.load(std::memory_order_relaxed);
}

} // namespace moeedge
