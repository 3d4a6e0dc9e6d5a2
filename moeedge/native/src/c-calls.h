// What the functions of the C interface (include/moeedge.h) share: every call runs in `guarded`, which turns an exception into
// a status, so that none crosses C, and a failed call leaves a sentence.

#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <system_error>
#include <type_traits>

#include "backend-instance.h"
#include "moeedge.h"

namespace moeedge {

// keeps the sentence for moeedge_last_error and returns the status
int fail(int status, const char * reason);

// what `call` returns; MOEEDGE_STATUS_OK: nothing
template <typename F, typename... T> auto status_of(F & call, T &... arguments) {
    if constexpr (std::is_void_v<decltype(call(arguments...))>) {
        call(arguments...);
        return (int) MOEEDGE_STATUS_OK;
    } else {
        return call(arguments...);
    }
}

// the status that `call` returns, or that of the exception which it throws
template <typename F> auto guarded(F call) -> decltype(status_of(call)) {
    try {
        return status_of(call);
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
        return self ? status_of(call, *self) : fail(MOEEDGE_STATUS_NO_INSTANCE, "The context is closed.");
    });
}

} // namespace moeedge
