#include "abort-scope.h"

#include <atomic>
#include <mutex>
#include <stdexcept>

#include <dlfcn.h>

#include "ggml.h"

namespace moeedge {

static thread_local bool                         throws = false;
static std::atomic<void (*)(const char * message)> own_handler{ nullptr };
static ggml_abort_callback_t                     previous_callback = nullptr;
static int (*in_parallel)(void)                                    = nullptr; // of the OpenMP that ggml has loaded

static void on_abort(const char * message) {
    if (throws && !(in_parallel && in_parallel())) {
        throw std::runtime_error(message);
    }
    if (auto handler = own_handler.load()) {
        handler(message);
    }
    if (previous_callback) {
        previous_callback(message);
        return;
    }
    ggml_set_abort_callback(nullptr);
    ggml_abort(__FILE__, __LINE__, "%s", message); // message, backtrace, abort, as without the hook
}

static void hook() {
    static std::once_flag once;
    std::call_once(once, [] {
        in_parallel       = (int (*)(void)) dlsym(RTLD_DEFAULT, "omp_in_parallel");
        previous_callback = ggml_set_abort_callback(on_abort);
    });
}

bool throw_on_abort(bool on) {
    hook();
    const bool before = throws;
    throws            = on;
    return before;
}

bool notices_parallel_regions() {
    hook();
    return in_parallel != nullptr;
}

void set_abort_handler(void (*handler)(const char * message)) {
    hook();
    own_handler.store(handler);
}

} // namespace moeedge
