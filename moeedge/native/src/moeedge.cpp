// The C interface (include/moeedge.h) and the entry point by which stock llama.cpp programs load the library.
//
// Every call runs in `guarded`, which turns an exception into a status: none crosses C.

#include "moeedge.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <unordered_map>

#include "backend-instance.h"
#include "dry-run-device.h"
#include "expert-cache.h"
#include "ggml-impl.h"
#include "graph-compute.h"
#include "memory-breakdown.h"

using moeedge::expert_cache;
using moeedge::instance;

// live caches; never destroyed: a program may end without destroying its caches
struct cache_list {
    std::mutex                                                 mutex;
    std::unordered_map<int64_t, std::shared_ptr<expert_cache>> live;
    int64_t                                                    last_id = 0;
};

static cache_list & caches() {
    static cache_list * list = new cache_list;
    return *list;
}

static thread_local char last_error[4096]; // long enough for a sentence with a path

static int fail(int status, const char * reason) {
    std::snprintf(last_error, sizeof(last_error), "%s", reason);
    return status;
}

// the status that `call` returns, or that of the exception which it throws
template <typename F> static auto guarded(F call) -> decltype(call()) {
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
template <typename F> static int with_instance(int64_t id, F call) {
    return guarded([&]() -> int {
        instance * self = moeedge::instances_find(id);
        return self ? call(*self) : fail(MOEEDGE_STATUS_NO_INSTANCE, "The context is closed.");
    });
}

static std::shared_ptr<expert_cache> find_cache(int64_t id) {
    std::lock_guard<std::mutex> lock(caches().mutex);
    const auto                  found = caches().live.find(id);
    return found == caches().live.end() ? nullptr : found->second;
}

static int no_cache() {
    return fail(MOEEDGE_STATUS_NO_CACHE, "The expert cache is closed.");
}

// Calls `call(expert_cache &)`; a status that it returns gets its sentence. bad_argument: the sentence of that status.
template <typename F> static int with_cache(int64_t id, F call, const char * bad_argument = "Invalid argument.") {
    return guarded([&]() -> int {
        const std::shared_ptr<expert_cache> cache = find_cache(id);
        if (!cache) {
            return no_cache();
        }
        const int status = cache->is_foreign() ? MOEEDGE_STATUS_DEVICE_LOST : call(*cache);
        switch (status) {
            case MOEEDGE_STATUS_BAD_ARGUMENT:
                return fail(status, bad_argument);
            case MOEEDGE_STATUS_TIMEOUT:
                return fail(status, "The expert cache still moves experts.");
            case MOEEDGE_STATUS_DEVICE_LOST:
                return fail(status, cache->is_lost() ? cache->lost_message().c_str() : "The expert cache is closed.");
            default:
                return status;
        }
    });
}

// graph and backend structures are private to ggml: they match only the version that we were compiled against
static bool ggml_matches() {
    return std::strcmp(ggml_version(), MOEEDGE_GGML_VERSION) == 0;
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
    return last_error;
}

int moeedge_register(void) {
    if (!ggml_matches()) {
        return MOEEDGE_STATUS_VERSION_MISMATCH;
    }
    return guarded([]() -> int {
        static std::once_flag once;
        std::call_once(once, [] { ggml_backend_register(moeedge::backend_reg()); });
        return MOEEDGE_STATUS_OK;
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
    return moeedge::backend_reg();
}

// instances

int moeedge_set_default_offload_scope(int scope) {
    if (!is_offload_scope(scope)) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return guarded([&]() -> int {
        moeedge::instances_set_default_offload_scope(scope);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_set_default_host_buffer(void * device) {
    return guarded([&]() -> int {
        ggml_backend_dev_t dev = (ggml_backend_dev_t) device;
        moeedge::instances_set_default_host_buft(dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr);
        return MOEEDGE_STATUS_OK;
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
    return with_instance(id, [&](instance & self) -> int {
        *out = { self.n_graphs, self.n_blocks, (double) self.sense_ns * 1e-9, (double) self.compute_ns * 1e-9 };
        return MOEEDGE_STATUS_OK;
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
    return with_instance(id, [&](instance & self) -> int {
        self.parsed.clear();
        self.hook      = hook;
        self.hook_user = user;
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_set_cache(int64_t instance_id, int64_t id) {
    return with_instance(instance_id, [&](instance & self) -> int {
        const std::shared_ptr<expert_cache> cache = find_cache(id);
        if (id != 0 && !cache) {
            return no_cache();
        }
        moeedge::set_cache(&self, cache);
        return MOEEDGE_STATUS_OK;
    });
}

// expert caches

int64_t moeedge_cache_create(const moeedge_cache_config * config) {
    if (config == nullptr) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "The expert cache needs a configuration.");
    }
    return guarded([&]() -> int64_t {
        std::string                   reason;
        int                           status = MOEEDGE_STATUS_OK;
        std::shared_ptr<expert_cache> cache  = expert_cache::create(*config, reason, status);
        if (!cache) {
            return fail(status, reason.c_str());
        }
        std::lock_guard<std::mutex> lock(caches().mutex);
        const int64_t               id = caches().last_id + 1;
        caches().live[id] = std::move(cache);
        return caches().last_id = id;
    });
}

int moeedge_cache_destroy(int64_t id) {
    return guarded([&]() -> int {
        const std::shared_ptr<expert_cache> cache = find_cache(id);
        if (!cache) {
            return no_cache();
        }
        {
            std::lock_guard<std::mutex> lock(caches().mutex);
            caches().live.erase(id);
        }
        moeedge::instances_detach(cache.get());
        cache->close();
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_get_info(int64_t id, moeedge_cache_info * out) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.get_info(*out);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_groups(int64_t id, int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.get_groups(layer_group, capacity, expert_bytes);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_plan(int64_t id, const int32_t * uploads, const uint8_t * priority, int n_uploads, const int32_t * victims,
                       const float * victim_utility, int n_victims) {
    return with_cache(
        id,
        [&](expert_cache & cache) {
            return cache.table().plan(uploads, priority, n_uploads, { victims, victim_utility, n_victims });
        },
        "The plan names an expert that the model does not have.");
}

int moeedge_cache_demand(int64_t id, int layer, const int32_t * experts, int n, const int32_t * victims,
                         const float * victim_utility, int n_victims, double timeout_s) {
    return with_cache(
        id,
        [&](expert_cache & cache) {
            return cache.table().demand(layer, experts, n, { victims, victim_utility, n_victims }, timeout_s);
        },
        "The demand names an expert that the model does not have.");
}

int moeedge_cache_set_batch(int64_t id, int n_experts) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            if (n_experts < 0) {
                return MOEEDGE_STATUS_BAD_ARGUMENT;
            }
            cache.set_batch(n_experts);
            return MOEEDGE_STATUS_OK;
        },
        "The number of experts per transfer is negative.");
}

int moeedge_cache_residency(int64_t id, uint8_t * out) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.table().copy_residency(out);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_get_stats(int64_t id, moeedge_cache_stats * out) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.get_stats(*out);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_blocks(int64_t id, int64_t after, moeedge_block_record * out, int n_max) {
    return with_cache(id, [&](expert_cache & cache) { return cache.records.read(after, out, n_max); });
}

int moeedge_cache_drain(int64_t id, double timeout_s) {
    return with_cache(id, [&](expert_cache & cache) { return cache.table().drain(timeout_s); });
}

int moeedge_cache_clear(int64_t id) {
    return with_cache(id, [](expert_cache & cache) { return cache.table().clear(); });
}

int moeedge_cache_set_prefill(int64_t id, int path, int n_tokens_min) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            if (path < MOEEDGE_PREFILL_PATH_CPU || path > MOEEDGE_PREFILL_PATH_STREAM || n_tokens_min < 1) {
                return MOEEDGE_STATUS_BAD_ARGUMENT;
            }
            cache.prefill_path.store(path);
            cache.prefill_tokens_min.store(n_tokens_min);
            return MOEEDGE_STATUS_OK;
        },
        "Unknown prefill path, or fewer than one token.");
}

int moeedge_cache_set_readers(int64_t id, int n_threads) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            if (n_threads < 1) {
                return MOEEDGE_STATUS_BAD_ARGUMENT;
            }
            cache.set_readers(n_threads);
            return MOEEDGE_STATUS_OK;
        },
        "Fewer than one thread reads the model's file.");
}

int moeedge_cache_set_timing(int64_t id, int on) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.is_timing.store(on != 0);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_set_device_path(int64_t id, int path) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            if (path < MOEEDGE_DEVICE_PATH_PAIRS || path > MOEEDGE_DEVICE_PATH_AHEAD) {
                return MOEEDGE_STATUS_BAD_ARGUMENT;
            }
            cache.device_path.store(path);
            return MOEEDGE_STATUS_OK;
        },
        "Unknown device path.");
}

int moeedge_cache_acquire(int64_t id, int layer, const int32_t * experts, int n, int32_t * slots) {
    return with_cache(id, [&](expert_cache & cache) { return cache.acquire(layer, experts, n, slots); });
}

int moeedge_cache_release(int64_t id, int layer, const int32_t * slots, int n) {
    return with_cache(id, [&](expert_cache & cache) -> int {
        cache.release(layer, slots, n);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_cache_read(int64_t id, int layer, int expert, const char * role, void * out, int64_t size) {
    return with_cache(
        id, [&](expert_cache & cache) { return cache.read(layer, expert, role, out, size); },
        "That expert is not resident, or not of that size.");
}

// planning

void * moeedge_dry_run_gpu(void) {
    return moeedge::dry_run_gpu();
}

int moeedge_memory_uses(void * get_breakdown, const void * context, int simulated, moeedge_memory_use * out, int n_max) {
    if (get_breakdown == nullptr || context == nullptr || out == nullptr) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return guarded([&] { return moeedge::read_memory_uses(get_breakdown, context, simulated != 0, out, n_max); });
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

} // extern "C"
