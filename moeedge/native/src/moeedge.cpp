// The C interface (include/moeedge.h) and the entry point by which stock llama.cpp programs load the library.
//
// Expert caches have their part of it in moeedge-cache.cpp; what has a source of its own has its functions at the end of that.

#include <cstdio>
#include <cstring>
#include <mutex>

#include "abort-scope.h"
#include "c-calls.h"
#include "ggml-impl.h"
#include "gguf.h"
#include "timing.h"

using moeedge::fail;
using moeedge::guarded;
using moeedge::instance;
using moeedge::with_instance;

static thread_local char last_message[4096]; // long enough for a sentence with a path

int moeedge::fail(int status, const char * reason) {
    std::snprintf(last_message, sizeof(last_message), "%s", reason);
    return status;
}

// graph and backend structures are private to ggml: they match only the version that we were compiled against
static bool ggml_matches() {
    return std::strcmp(ggml_version(), MOEEDGE_GGML_VERSION) == 0;
}

// f(arguments), a function of llama.cpp
template <typename... arguments> static int text_result(void * f, arguments... values) {
    int count = MOEEDGE_TEXT_THREW;
    guarded([&] {
        const moeedge::abort_scope scope;
        count = ((int32_t (*)(arguments...)) f)(values...);
        if (count == MOEEDGE_TEXT_THREW) {
            fail(MOEEDGE_STATUS_FAILED, "too many tokens");
        }
    });
    return count;
}

static bool is_offload_scope(int scope) {
    return scope >= MOEEDGE_OFFLOAD_SCOPE_NONE && scope <= MOEEDGE_OFFLOAD_SCOPE_ALL;
}

extern "C" {

// library

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

const char * moeedge_last_error(void) {
    return last_message;
}

int moeedge_register(void) {
    if (!ggml_matches()) {
        return MOEEDGE_STATUS_VERSION_MISMATCH;
    }
    return guarded([] {
        static std::once_flag once;
        std::call_once(once, [] { ggml_backend_register(moeedge::backend_reg()); });
    });
}

// stock llama.cpp programs of the same version: GGML_BACKEND_PATH=this library
MOEEDGE_API ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void) {
    if (!ggml_matches()) {
        GGML_LOG_ERROR("moeedge: compiled for ggml %s, this program has ggml %s: not loaded\n", MOEEDGE_GGML_VERSION,
                       ggml_version());
        return nullptr;
    }
    moeedge_disable_broken_amx();
    return moeedge::backend_reg();
}

// instances

int moeedge_set_default_offload_scope(int scope) {
    if (!is_offload_scope(scope)) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    moeedge::defaults.offload_scope.store(scope);
    return MOEEDGE_STATUS_OK;
}

int moeedge_set_default_host_buffer(void * device) {
    return guarded([&] {
        ggml_backend_dev_t dev = (ggml_backend_dev_t) device;
        moeedge::defaults.host_buft.store(dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr);
    });
}

int64_t moeedge_newest_instance(void) {
    return guarded([] { return moeedge::instances_newest_of(std::this_thread::get_id()); });
}

int moeedge_live_instances(void) {
    return guarded([] { return moeedge::instances_count(); });
}

int moeedge_instance_set_offload_scope(int64_t id, int scope) {
    return with_instance(id, [&](instance & self) -> int {
        if (!is_offload_scope(scope)) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        self.offload_scope.store(scope);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_set_phase(int64_t id, int phase) {
    return with_instance(id, [&](instance & self) -> int {
        if (phase < MOEEDGE_PHASE_AUTO || phase > MOEEDGE_PHASE_VERIFY) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        self.phase = phase;
        if (self.sensor) {
            self.sensor->end_frame();
        }
        if (self.capture) {
            self.capture->end_frame();
        }
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_configure(int64_t id, int n_layers, int n_experts, int n_used, int n_tokens_max) {
    return with_instance(id, [&](instance & self) -> int {
        if (n_layers <= 0 || n_experts <= 0 || n_used <= 0 || n_used > n_experts || n_tokens_max <= 0) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        self.sensor.reset(new moeedge::routing_sensor({ n_layers, n_experts, n_used, n_tokens_max }));
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_read_counts(int64_t id, uint32_t * out) {
    return with_instance(id, [&](instance & self) -> int {
        if (!self.sensor) {
            return MOEEDGE_STATUS_NOT_CONFIGURED;
        }
        self.sensor->read_counts(out);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_frames(int64_t id, int64_t after, moeedge_frame * out, int n_max) {
    return with_instance(id, [&](instance & self) -> int {
        return self.sensor ? self.sensor->read_frames(after, out, n_max) : MOEEDGE_STATUS_NOT_CONFIGURED;
    });
}

int moeedge_instance_get_stats(int64_t id, moeedge_sensor_stats * out) {
    return with_instance(id, [&](instance & self) {
        *out = { self.n_graphs, self.n_blocks, (double) self.sense_ns * 1e-9, (double) self.compute_ns * 1e-9 };
    });
}

int moeedge_instance_threads(int64_t id) {
    return with_instance(id, [](instance & self) { return self.n_threads; });
}

int moeedge_instance_set_capture(int64_t id, int flags, int n_layers, int n_embd, int n_experts) {
    return with_instance(id, [&](instance & self) -> int {
        const bool has_probs = (flags & MOEEDGE_CAPTURE_PROBS) != 0;
        if (flags < 0 || flags > (MOEEDGE_CAPTURE_INPUTS | MOEEDGE_CAPTURE_PROBS) || n_layers <= 0 || n_embd <= 0 ||
            (has_probs && n_experts <= 0)) {
            return MOEEDGE_STATUS_BAD_ARGUMENT;
        }
        self.parsed.clear(); // parsed graphs may lack the inputs
        self.capture.reset(flags ? new moeedge::activation_capture(flags, n_layers, n_embd, n_experts) : nullptr);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_get_activations(int64_t id, int flag, moeedge_activations * out) {
    return with_instance(id, [&](instance & self) -> int {
        return self.capture && self.capture->read(flag, *out) ? MOEEDGE_STATUS_OK : MOEEDGE_STATUS_NOT_CONFIGURED;
    });
}

int moeedge_instance_set_hook(int64_t id, moeedge_block_hook hook, void * user) {
    return with_instance(id, [&](instance & self) {
        self.parsed.clear();
        self.hook      = hook;
        self.hook_user = user;
    });
}

int moeedge_instance_skip_unweighted(int64_t id, int on) {
    return with_instance(id, [&](instance & self) {
        self.parsed.clear();
        self.pairs.reset(on ? new moeedge::pair_columns(self.cpu, self.cpu_dev) : nullptr);
    });
}

// loading

int moeedge_throw_on_abort(int on) {
    return moeedge::throw_on_abort(on != 0);
}

void * moeedge_open_gguf(const char * path) {
    gguf_context * file = nullptr;
    guarded([&]() -> int {
        const moeedge::abort_scope scope;
        file = gguf_init_from_file(path, { /*.no_alloc =*/true, /*.ctx =*/nullptr });
        return file ? MOEEDGE_STATUS_OK : fail(MOEEDGE_STATUS_FILE_ERROR, "");
    });
    return file;
}

// decoding

// struct llama_batch of llama.h, which is not among the headers of ggml
struct batch_by_value {
    int32_t n_tokens;
    void *  arrays[6];
};

int moeedge_decode(void * llama_decode, void * llama_synchronize, void * context, const void * batch) {
    if (llama_decode == nullptr || context == nullptr || batch == nullptr) {
        return fail(MOEEDGE_DECODE_THREW, "The context is closed.");
    }
    int       code   = 0;
    const int status = guarded([&]() -> int {
        const moeedge::abort_scope scope(moeedge::notices_parallel_regions());
        moeedge::driver_exception().clear();
        code = ((int32_t (*)(void *, batch_by_value)) llama_decode)(context, *(const batch_by_value *) batch);
        if (code == 0 && llama_synchronize) { // an asynchronous backend fails here
            ((void (*)(void *)) llama_synchronize)(context);
        }
        if (!moeedge::driver_exception().empty()) { // our backend turned it into a status
            return fail(MOEEDGE_STATUS_FAILED, moeedge::driver_exception().c_str());
        }
        return MOEEDGE_STATUS_OK;
    });
    return status == MOEEDGE_STATUS_OK ? code : MOEEDGE_DECODE_THREW;
}

int moeedge_tokenize(void * llama_tokenize, const void * vocab, const char * text, int n_text, int32_t * tokens, int n_max,
                     bool add_special, bool parse_special) {
    return text_result(llama_tokenize, vocab, text, (int32_t) n_text, tokens, (int32_t) n_max, add_special, parse_special);
}

int moeedge_piece(void * llama_token_to_piece, const void * vocab, int token, char * out, int n_max, bool special) {
    return text_result(llama_token_to_piece, vocab, (int32_t) token, out, (int32_t) n_max, (int32_t) 0, special);
}

bool moeedge_should_stop(void * stop) {
    moeedge_stop & asked = *(moeedge_stop *) stop;
    if (asked.call == nullptr || asked.stopped) {
        return asked.stopped != 0;
    }
    const int64_t now = moeedge::now_ns();
    if (asked.next_ns == 0) {
        asked.next_ns = now + asked.interval_ns;
    } else if (now >= asked.next_ns) {
        asked.stopped = asked.call() == 0;
        asked.next_ns = moeedge::now_ns() + asked.interval_ns;
    }
    return asked.stopped != 0;
}

} // extern "C"
