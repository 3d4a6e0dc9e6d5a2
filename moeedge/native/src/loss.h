// Loss: a device that fails while in use, and how the process lives on.
//
// ggml's RPC client ends the process when its worker dies: a thread of its own, which carries all traffic of an endpoint,
// calls ggml_abort. We hook that call: the thread is parked for good and every remote device of ours is marked as lost.
// Whoever waits for an answer of that worker waits forever then, inside ggml; so such calls are made in threads that can be
// left behind, and what they use is kept alive. Every other abort stays what it was.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace moeedge {

class device_loss : public std::enable_shared_from_this<device_loss> {
  public:
    device_loss(const void * dev, bool remote) : is_remote(remote), device(dev) {}
    // of a ggml device; a remote one is lost from the start if it was lost before: ggml never connects to it again
    static std::shared_ptr<device_loss> create(const void * device, bool is_remote);

    bool        is_lost() const { return lost.load(std::memory_order_acquire); }
    std::string reason() const;

    // from any thread; only the first time counts
    void mark(const char * why);
    // called by the thread that marks it; at once if it is lost already
    void on_lost(std::function<void()> call);

    // runs `work`, which talks to the device, and waits for it; false if the device is lost before it is done. The work of
    // a remote device runs in another thread, which may never end: it must own what it uses.
    bool run(std::function<void()> work, std::chrono::seconds patience = std::chrono::hours(24));

    // a flag that one thread sets and another waits for; false: the device is lost, or is now taken for lost since a remote
    // worker did not answer within the patience (one that is stopped keeps its connection)
    void set(bool & flag);
    bool wait(const bool & flag, std::chrono::seconds patience = std::chrono::hours(24));

    const bool is_remote;

  private:
    const void * const                 device;
    std::atomic<bool>                  lost{ false };
    mutable std::mutex                 mutex;
    std::condition_variable            changed;
    std::string                        why_lost;
    std::vector<std::function<void()>> calls;
};

} // namespace moeedge
