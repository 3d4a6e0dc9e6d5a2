// The C interface to what predictors of experts read (include/moeedge.h): captured inputs, and the hook before each block.

#include <new>

#include "instance.h"
#include "moeedge.h"

using moeedge::instance;
using moeedge::registry_find;

extern "C" {

int moeedge_instance_set_capture(int64_t id, int what, int n_layers, int n_embd, int n_experts) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    const bool wants_probs = (what & MOEEDGE_CAPTURE_PROBS) != 0;
    if (what < 0 || what > (MOEEDGE_CAPTURE_INPUTS | MOEEDGE_CAPTURE_PROBS) || n_layers <= 0 || n_embd <= 0 ||
        (wants_probs && n_experts <= 0)) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    try {
        self->parsed.clear(); // they may lack the inputs
        self->capture.reset(what ? new moeedge::input_capture(what, n_layers, n_embd, n_experts) : nullptr);
    } catch (const std::bad_alloc &) {
        return MOEEDGE_OUT_OF_MEMORY;
    }
    return MOEEDGE_OK;
}

int moeedge_instance_captured(int64_t id, int what, moeedge_captured * out) {
    const instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    return self->capture && self->capture->read(what, *out) ? MOEEDGE_OK : MOEEDGE_NOT_CONFIGURED;
}

int moeedge_instance_set_hook(int64_t id, moeedge_block_hook hook, void * user) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    self->parsed.clear();
    self->hook      = hook;
    self->hook_user = user;
    return MOEEDGE_OK;
}

} // extern "C"
