// The plain C interface (include/moeedge.h) and the entry point by which stock llama.cpp programs load the library.

#include <cstring>
#include <mutex>
#include <new>

#include "ggml-impl.h"
#include "instance.h"
#include "moeedge.h"

using moeedge::instance;
using moeedge::registry_find;

// graph and backend structs are private to ggml: they match only the very version that we were compiled against
static bool ggml_matches() {
    return std::strcmp(ggml_version(), MOEEDGE_GGML_VERSION) == 0;
}

extern "C" {

const char * moeedge_ggml_version(void) {
    return MOEEDGE_GGML_VERSION;
}

const char * moeedge_llama_cpp_version(void) {
    return MOEEDGE_LLAMA_CPP_VERSION;
}

int moeedge_backend_api_version(void) {
    return GGML_BACKEND_API_VERSION;
}

int moeedge_abi_version(void) {
    return MOEEDGE_ABI_VERSION;
}

int moeedge_register(void) {
    if (!ggml_matches()) {
        return MOEEDGE_VERSION_MISMATCH;
    }
    static std::once_flag once;
    std::call_once(once, [] { ggml_backend_register(moeedge::backend_reg()); });
    return MOEEDGE_OK;
}

int moeedge_set_default_claims(int claims) {
    if (claims < MOEEDGE_CLAIMS_NONE || claims > MOEEDGE_CLAIMS_WHOLE) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    moeedge::registry_set_default_claims(claims);
    return MOEEDGE_OK;
}

int64_t moeedge_newest_instance(void) {
    return moeedge::registry_newest_of(std::this_thread::get_id());
}

int moeedge_live_instances(void) {
    return moeedge::registry_size();
}

int moeedge_instance_set_claims(int64_t id, int claims) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    if (claims < MOEEDGE_CLAIMS_NONE || claims > MOEEDGE_CLAIMS_WHOLE) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    self->claims.store(claims);
    return MOEEDGE_OK;
}

int moeedge_instance_set_phase(int64_t id, int phase) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    if (phase < MOEEDGE_PHASE_AUTO || phase > MOEEDGE_PHASE_VERIFY) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    self->phase = phase;
    if (self->sense) {
        self->sense->end_frame();
    }
    if (self->capture) {
        self->capture->end_frame();
    }
    return MOEEDGE_OK;
}

int moeedge_instance_configure(int64_t id, int n_layers, int n_experts, int n_used, int n_tokens_max) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    if (n_layers <= 0 || n_experts <= 0 || n_used <= 0 || n_used > n_experts || n_tokens_max <= 0) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    try {
        self->sense.reset(new moeedge::sensor({ n_layers, n_experts, n_used, n_tokens_max }));
    } catch (const std::bad_alloc &) {
        return MOEEDGE_OUT_OF_MEMORY;
    }
    return MOEEDGE_OK;
}

int moeedge_instance_read_counts(int64_t id, uint32_t * out) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    if (!self->sense) {
        return MOEEDGE_NOT_CONFIGURED;
    }
    self->sense->read_counts(out);
    return MOEEDGE_OK;
}

int moeedge_instance_frames(int64_t id, int64_t after, moeedge_frame * out, int n_max) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    if (!self->sense) {
        return MOEEDGE_NOT_CONFIGURED;
    }
    return self->sense->read_frames(after, out, n_max);
}

int moeedge_instance_stats(int64_t id, moeedge_stats * out) {
    instance * self = registry_find(id);
    if (self == nullptr) {
        return MOEEDGE_NO_INSTANCE;
    }
    *out = self->stats;
    return MOEEDGE_OK;
}

int moeedge_instance_threads(int64_t id) {
    instance * self = registry_find(id);
    return self ? self->n_threads : MOEEDGE_NO_INSTANCE;
}

// stock llama.cpp programs of the same version: GGML_BACKEND_PATH=this library
MOEEDGE_API ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void) {
    if (!ggml_matches()) {
        GGML_LOG_ERROR("moeedge: compiled for ggml %s, this program has ggml %s: not loaded\n", MOEEDGE_GGML_VERSION,
                       ggml_version());
        return nullptr;
    }
    return moeedge::backend_reg();
}

} // extern "C"
