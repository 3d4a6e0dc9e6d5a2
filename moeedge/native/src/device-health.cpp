#include "device-health.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <thread>

#include <unistd.h>

#if defined(__linux__)
#    include <sys/syscall.h>
#else
#    include <pthread.h>
#endif

#include "abort-scope.h"

namespace moeedge {

// message of ggml-rpc's client when its worker does not answer as it should
static const char rpc_failure[] = "Remote RPC server crashed";

struct remote_device_list {
    std::mutex                                mutex;
    std::vector<std::weak_ptr<device_health>> live;
    std::vector<const void *>                 lost; // devices
};

// never destroyed: a parked thread may outlive static destructors
static remote_device_list & remote_devices() {
    static remote_device_list * list = new remote_device_list;
    return *list;
}

static bool is_main_thread() {
#if defined(__linux__)
    return syscall(SYS_gettid) == getpid();
#else
    return pthread_main_np() != 0;
#endif
}

[[noreturn]] static void park() {
    while (true) {
        pause();
    }
}

// marks all remote devices as lost; false if there are none
static bool mark_remote_devices_lost() {
    std::vector<std::shared_ptr<device_health>> live;
    {
        remote_device_list &        list = remote_devices();
        std::lock_guard<std::mutex> lock(list.mutex);
        for (const std::weak_ptr<device_health> & entry : list.live) {
            if (auto health = entry.lock()) {
                live.push_back(std::move(health));
            }
        }
    }
    for (const auto & health : live) {
        health->mark_lost("its worker does not answer any more");
    }
    return !live.empty();
}

// The message does not name the endpoint, so all remote devices are marked: two workers at once are rare, and experts on the
// CPU are slower but never wrong. The main thread carries no traffic: it aborts while it connects to a dead worker, say.
static void on_abort(const char * message) {
    if (std::strstr(message, rpc_failure) && !is_main_thread()) {
        try {
            if (mark_remote_devices_lost()) {
                park();
            }
        } catch (const std::exception &) { // no memory: abort
        }
    }
}

// returns whether the device was lost before
static bool watch(const std::shared_ptr<device_health> & health, const void * device) {
    remote_device_list &        list = remote_devices();
    std::lock_guard<std::mutex> lock(list.mutex);
    set_abort_handler(on_abort);
    list.live.erase(std::remove_if(list.live.begin(), list.live.end(),
                                   [](const std::weak_ptr<device_health> & entry) { return entry.expired(); }),
                    list.live.end());
    list.live.push_back(health);
    return std::find(list.lost.begin(), list.lost.end(), device) != list.lost.end();
}

std::shared_ptr<device_health> device_health::create(const void * device, bool is_remote) {
    auto health = std::make_shared<device_health>(device, is_remote);
    if (is_remote && watch(health, device)) {
        health->mark_lost("its worker stopped answering earlier");
    }
    return health;
}

std::string device_health::reason() const {
    if (is_foreign()) {
        return "it belongs to the process that forked this one";
    }
    std::lock_guard<std::mutex> lock(mutex);
    return why_lost;
}

void device_health::mark_lost(const char * why) {
    if (is_foreign()) {
        return;
    }
    std::function<void()> call;
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (lost.load()) {
            return;
        }
        why_lost = why;
        lost.store(true, std::memory_order_release);
        call.swap(when_lost);
    }
    changed.notify_all();
    if (is_remote) {
        remote_device_list &        list = remote_devices();
        std::lock_guard<std::mutex> lock(list.mutex);
        list.lost.push_back(device);
    }
    if (call) {
        call();
    }
}

void device_health::on_lost(std::function<void()> call) {
    if (!is_foreign()) {
        std::lock_guard<std::mutex> lock(mutex);
        if (!lost.load()) {
            when_lost = std::move(call);
            return;
        }
    }
    call();
}

void device_health::set(bool & flag) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        flag = true;
    }
    changed.notify_all();
}

bool device_health::wait(const bool & flag, std::chrono::seconds timeout) {
    if (is_foreign()) {
        return false;
    }
    std::unique_lock<std::mutex> lock(mutex);
    const auto                   is_over = [&] { return flag || lost.load(); };
    if (!is_remote) {
        changed.wait(lock, is_over);
    } else if (!changed.wait_for(lock, timeout, is_over)) {
        lock.unlock();
        mark_lost("its worker does not answer any more");
        return false;
    }
    return flag;
}

bool device_health::run(std::function<void()> work, std::chrono::seconds timeout) {
    if (is_foreign() || (is_remote && is_lost())) {
        return false;
    }
    if (!is_remote) {
        work();
        return true;
    }
    // both threads own the outcome and this object: either may be the last
    struct outcome {
        bool               is_done = false;
        std::exception_ptr error;
    };
    auto        result = std::make_shared<outcome>();
    std::thread thread;
    try {
        thread = std::thread([self = shared_from_this(), result, work = std::move(work)] {
            try {
                work();
            } catch (...) {
                result->error = std::current_exception();
            }
            self->set(result->is_done);
        });
    } catch (const std::system_error &) {
        mark_lost("no thread could be started to talk to it");
        return false;
    }
    if (!wait(result->is_done, timeout)) {
        thread.detach();
        return false;
    }
    thread.join();
    if (result->error) {
        std::rethrow_exception(result->error);
    }
    return true;
}

} // namespace moeedge
