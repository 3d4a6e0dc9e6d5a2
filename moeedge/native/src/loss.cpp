#include "loss.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include <unistd.h>

#if defined(__linux__)
#    include <sys/syscall.h>
#else
#    include <pthread.h>
#endif

#include "ggml.h"

namespace moeedge {

namespace {

// what ggml-rpc's client says when its worker does not answer as it should
const char rpc_failure[] = "Remote RPC server crashed";

struct watch_list {
    std::mutex                              mutex;
    std::vector<std::weak_ptr<device_loss>> remote;
    std::vector<const void *>               lost; // devices
    ggml_abort_callback_t                   earlier   = nullptr;
    bool                                    is_hooked = false;
};

// never destroyed: a parked thread may outlive static destructors
watch_list & watched() {
    static watch_list * list = new watch_list;
    return *list;
}

bool is_main_thread() {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#else
    return pthread_main_np() != 0;
#endif
}

std::vector<std::shared_ptr<device_loss>> live_remotes() {
    watch_list &                              list = watched();
    std::lock_guard<std::mutex>               lock(list.mutex);
    std::vector<std::shared_ptr<device_loss>> live;
    for (const std::weak_ptr<device_loss> & entry : list.remote) {
        if (auto loss = entry.lock()) {
            live.push_back(std::move(loss));
        }
    }
    return live;
}

[[noreturn]] void park() {
    while (true) {
        pause();
    }
}

// The message does not name the endpoint, so all remote devices go: two workers at once are rare, and experts on the CPU
// are slower but never wrong. The main thread carries no traffic: it aborts, say, while it connects to a dead worker.
void on_abort(const char * message) {
    if (std::strstr(message, rpc_failure) && !is_main_thread()) {
        const auto remotes = live_remotes();
        for (const auto & loss : remotes) {
            loss->mark("its worker does not answer any more");
        }
        if (!remotes.empty()) {
            park();
        }
    }
    ggml_abort_callback_t earlier = watched().earlier;
    if (earlier) {
        earlier(message);
        return;
    }
    ggml_set_abort_callback(nullptr);
    ggml_abort(__FILE__, __LINE__, "%s", message); // as without us: message, backtrace, abort
}

// whether the device was lost before
bool watch(const std::shared_ptr<device_loss> & loss, const void * device) {
    watch_list &                list = watched();
    std::lock_guard<std::mutex> lock(list.mutex);
    if (!list.is_hooked) {
        list.earlier   = ggml_set_abort_callback(on_abort);
        list.is_hooked = true;
    }
    list.remote.erase(std::remove_if(list.remote.begin(), list.remote.end(),
                                     [](const std::weak_ptr<device_loss> & entry) { return entry.expired(); }),
                      list.remote.end());
    list.remote.push_back(loss);
    return std::find(list.lost.begin(), list.lost.end(), device) != list.lost.end();
}

void remember_lost(const void * device) {
    watch_list &                list = watched();
    std::lock_guard<std::mutex> lock(list.mutex);
    list.lost.push_back(device);
}

} // namespace

std::shared_ptr<device_loss> device_loss::create(const void * device, bool is_remote) {
    auto loss = std::make_shared<device_loss>(device, is_remote);
    if (is_remote && watch(loss, device)) {
        loss->mark("its worker stopped answering earlier");
    }
    return loss;
}

std::string device_loss::reason() const {
    std::lock_guard<std::mutex> lock(mutex);
    return why_lost;
}

void device_loss::mark(const char * why) {
    std::vector<std::function<void()>> to_call;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (lost.load()) {
            return;
        }
        why_lost = why;
        lost.store(true, std::memory_order_release);
        to_call.swap(calls);
    }
    changed.notify_all();
    if (is_remote) {
        remember_lost(device);
    }
    for (const auto & call : to_call) {
        call();
    }
}

void device_loss::on_lost(std::function<void()> call) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (!lost.load()) {
            calls.push_back(std::move(call));
            return;
        }
    }
    call();
}

void device_loss::set(bool & flag) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        flag = true;
    }
    changed.notify_all();
}

bool device_loss::wait(const bool & flag, std::chrono::seconds patience) {
    std::unique_lock<std::mutex> lock(mutex);
    const auto                   is_over = [&] { return flag || lost.load(); };
    if (!is_remote) {
        changed.wait(lock, is_over);
    } else if (!changed.wait_for(lock, patience, is_over)) {
        lock.unlock();
        mark("its worker does not answer any more");
        return false;
    }
    return flag;
}

bool device_loss::run(std::function<void()> work, std::chrono::seconds patience) {
    if (!is_remote) {
        work();
        return true;
    }
    if (is_lost()) {
        return false;
    }
    // both threads own the flag and this object: either may be the last
    auto        done = std::make_shared<bool>(false);
    std::thread thread([self = shared_from_this(), done, work = std::move(work)] {
        work();
        self->set(*done);
    });
    if (!wait(*done, patience)) {
        thread.detach();
        return false;
    }
    thread.join();
    return true;
}

} // namespace moeedge
