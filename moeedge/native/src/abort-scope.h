// Abort scope: within one, ggml_abort throws an exception in this thread in place of ending the process.
//
// llama.cpp asserts much of what it reads from a model file; its functions that load a model or make a context catch exceptions.
// What has thrown must not be used again. In an OpenMP region other threads wait for this one: there the process still ends.

#pragma once

#include "no-copy.h"

namespace moeedge {

// of the calling thread; returns whether it was on before
bool throw_on_abort(bool on);
// whether an OpenMP region is noticed; otherwise nothing that computes in several threads should be in a scope
bool notices_parallel_regions();

class abort_scope : no_copy {
  public:
    explicit abort_scope(bool on = true) : before(throw_on_abort(on)) {}
    ~abort_scope() { throw_on_abort(before); }

  private:
    const bool before;
};

// called by a thread that aborts outside of any scope; the process ends where it returns
void set_abort_handler(void (*handler)(const char * message));

} // namespace moeedge
