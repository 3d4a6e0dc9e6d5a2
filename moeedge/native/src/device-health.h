// Device health: a device that fails while in use, and how the process goes on without it.
//
// ggml's RPC client ends the process when its worker dies: the thread that carries the traffic of an endpoint calls
// ggml_abort. We hook that call: the thread is parked for good and every remote device is marked as lost. A thread that
// waits for an answer of that worker then waits forever, inside ggml; so such calls are made in threads that can be
// abandoned, and those threads own the memory that they use. Every other abort behaves as before.
//
// A device is also lost to a process that was forked from the one that opened it.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fork-mark.h"

namespace moeedge {

class device_health : public std::enable_shared_from_this<device_health> {
  public:
    device_health(const void * dev, bool remote) : is_remote(remote), device(dev) {}
    // of a ggml device; a remote one that was lost before is lost from the start: ggml never connects to it again
    static std::shared_ptr<device_health> create(const void * device, bool is_remote);

    bool        is_lost() const { return lost.load(std::memory_order_acquire) || is_foreign(); }
    bool        is_foreign() const { return owner.is_foreign(); } // then no call waits or locks
    std::string reason() const;

    // from any thread; only the first call has an effect
    void mark_lost(const char * why);
    // what the thread calls that marks the device as lost; at once if it is lost already
    void on_lost(std::function<void()> call);

    // Runs `work`, which talks to the device, and waits for it; false if the device is lost before it is done. The work of
    // a remote device runs in another thread, which may never end: it must own what it uses. Exceptions of the work arrive
    // at the caller.
    bool run(std::function<void()> work, std::chrono::seconds timeout = answer_limit);

    // a flag that one thread sets and another waits for; wait returns false if the device is lost, or if a remote worker
    // did not answer in time (one that is stopped keeps its connection), which marks it as lost
    void set(bool & flag);
    bool wait(const bool & flag, std::chrono::seconds timeout);

    // of a remote worker: computing, allocating, taking as many experts as are staged at once; and freeing
    static constexpr auto answer_limit = std::chrono::seconds(120), free_limit = std::chrono::seconds(30);

    const bool is_remote;

  private:
    const void * const                 device;
    const fork_mark                    owner;
    std::atomic<bool>                  lost{ false };
    mutable std::mutex                 mutex;
    std::condition_variable            changed;
    std::string                        why_lost;
    std::function<void()>              when_lost;
};

} // namespace moeedge
