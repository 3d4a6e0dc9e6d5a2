// Fork mark: tells whether an object belongs to another process, which forked this one.
//
// A child has its parent's memory but none of its threads, and the parent's GPU contexts do not work in it. So an object whose
// threads stayed in the parent must not wait for them, lock their mutexes or free what they used: the child leaks it.

#pragma once

#include <atomic>
#include <mutex>

#include <pthread.h>

namespace moeedge {

class fork_mark {
  public:
    fork_mark() : generation(current()) {}
    // whether this process was forked since the mark was made; cheap
    bool is_foreign() const { return generation != current(); }

  private:
    inline static std::atomic<int> n_forks{ 0 }; // between the first process that made a mark and this one

    static int current() {
        static const int registered = pthread_atfork(nullptr, nullptr, [] { n_forks.fetch_add(1); });
        (void) registered; // it fails only without memory; a child then behaves as if it were its parent
        return n_forks.load(std::memory_order_relaxed);
    }

    const int generation;
};

// Lets each fork wait until no other thread holds the mutex that `get` returns, which a child could never take otherwise. To be
// called once, for a mutex that is held for short sections.
template <std::mutex & (*get)()> int keep_free_in_children() {
    return pthread_atfork([] { get().lock(); }, [] { get().unlock(); }, [] { get().unlock(); });
}

} // namespace moeedge
