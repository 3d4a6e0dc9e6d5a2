// What the functions of the C interface (include/moeedge.h) share: every call runs in `guarded`, which turns an exception into
// a status, so that none crosses C, and a failed call leaves a sentence in `last_error`.

#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <system_error>

#include "backend-instance.h"
#include "moeedge.h"

namespace moeedge {

// of the calling thread's last failed call; never null
const char * last_error();
// keeps the sentence and returns the status
int fail(int status, const char * reason);

// the status that `call` returns, or that of the exception which it throws
template <typename F> auto guarded(F call) -> decltype(call()) {
    try {
        return call();
    } catch (const std::bad_alloc &) {
        return fail(MOEEDGE_STATUS_OUT_OF_MEMORY, "Out of memory.");
    } catch (const std::system_error & error) { // no resources for another thread
        return fail(MOEEDGE_STATUS_OUT_OF_MEMORY, error.what());
    } catch (const std::exception & error) {
        return fail(MOEEDGE_STATUS_FAILED, error.what());
    } catch (...) {
        return fail(MOEEDGE_STATUS_FAILED, "Unknown error in the native library.");
    }
}

// calls `call(instance &)`
template <typename F> int with_instance(int64_t id, F call) {
    return guarded([&]() -> int {
        instance * self = instances_find(id);
        return self ? call(*self) : fail(MOEEDGE_STATUS_NO_INSTANCE, "The context is closed.");
    });
}

} // namespace moeedge
