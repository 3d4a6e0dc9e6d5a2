// The part of the C interface (include/moeedge-cache.h) that drives expert caches.

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "c-calls.h"
#include "expert-cache.h"
#include "fork-mark.h"

using moeedge::expert_cache;
using moeedge::fail;
using moeedge::guarded;
using moeedge::instance;
using moeedge::with_instance;

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

static std::mutex & list_mutex() {
    return caches().mutex;
}

// when the library is loaded: at the first use another thread might be forking already
[[maybe_unused]] static const int registered = moeedge::keep_free_in_children<list_mutex>();

static std::shared_ptr<expert_cache> find_cache(int64_t id) {
    std::lock_guard<std::mutex> lock(caches().mutex);
    const auto                  found = caches().live.find(id);
    return found == caches().live.end() ? nullptr : found->second;
}

static int no_cache() {
    return fail(MOEEDGE_STATUS_NO_CACHE, "The expert cache is closed.");
}

// Calls `call(expert_cache &)`; a status that it returns, if it returns one, gets its sentence. bad_argument: the sentence of that status.
template <typename F> static int with_cache(int64_t id, F call, const char * bad_argument = "Invalid argument.") {
    return guarded([&]() -> int {
        const std::shared_ptr<expert_cache> cache = find_cache(id);
        if (!cache) {
            return no_cache();
        }
        int status = cache->is_foreign() ? MOEEDGE_STATUS_DEVICE_LOST : MOEEDGE_STATUS_OK;
        if (status == MOEEDGE_STATUS_OK) {
            status = moeedge::status_of(call, *cache);
        }
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

extern "C" {

int moeedge_instance_set_cache(int64_t instance_id, int64_t id) {
    return with_instance(instance_id, [&](instance & self) -> int {
        const std::shared_ptr<expert_cache> cache = find_cache(id);
        if (!cache) {
            return no_cache();
        }
        moeedge::set_cache(&self, cache);
        return MOEEDGE_STATUS_OK;
    });
}

int moeedge_instance_remove_cache(int64_t instance_id, int64_t id) {
    return with_instance(instance_id, [&](instance & self) -> int {
        moeedge::remove_cache(&self, find_cache(id).get()); // one that is closed was removed before
        return MOEEDGE_STATUS_OK;
    });
}

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
    return with_cache(id, [&](expert_cache & cache) { cache.get_info(*out); });
}

int moeedge_cache_groups(int64_t id, int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) {
    return with_cache(id, [&](expert_cache & cache) { cache.get_groups(layer_group, capacity, expert_bytes); });
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

int moeedge_cache_set_utilities(int64_t id, const float * utilities) {
    return with_cache(id, [&](expert_cache & cache) { cache.table().set_utilities(utilities); });
}

int moeedge_cache_limit(int64_t id, int n_slots) {
    return with_cache(
        id, [&](expert_cache & cache) -> int { return cache.limit(n_slots); }, "Only a cache in RAM gives single slots back.");
}

int moeedge_cache_read_ahead(int64_t id, int layer, const int32_t * experts, int n) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            const bool exist = cache.group_of(layer) >= 0 && std::all_of(experts, experts + n, [&](int32_t expert) {
                                   return expert >= 0 && expert < cache.n_experts();
                               });
            if (!exist) {
                return MOEEDGE_STATUS_BAD_ARGUMENT;
            }
            cache.table().read_ahead(layer, experts, n);
            return MOEEDGE_STATUS_OK;
        },
        "The model does not have that expert.");
}

int moeedge_cache_set_batch(int64_t id, int n_experts) {
    if (n_experts < 0) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "The number of experts per transfer is negative.");
    }
    return with_cache(id, [&](expert_cache & cache) { cache.set_batch(n_experts); });
}

int moeedge_cache_residency(int64_t id, uint8_t * out) {
    return with_cache(id, [&](expert_cache & cache) { cache.table().copy_residency(out); });
}

int moeedge_cache_get_stats(int64_t id, moeedge_cache_stats * out) {
    return with_cache(id, [&](expert_cache & cache) { cache.get_stats(*out); });
}

int moeedge_cache_blocks(int64_t id, int64_t after, moeedge_block_record * out, int n_max) {
    return with_cache(id, [&](expert_cache & cache) { return cache.records.read(after, out, n_max); });
}

int moeedge_cache_drain(int64_t id, double timeout_s) {
    return with_cache(id, [&](expert_cache & cache) { return cache.table().drain(timeout_s); });
}

int moeedge_cache_clear(int64_t id, double timeout_s) {
    return with_cache(id, [&](expert_cache & cache) { return cache.table().clear(timeout_s); });
}

int moeedge_cache_set_prefill(int64_t id, int path, int n_tokens_min) {
    if (path < MOEEDGE_PREFILL_PATH_CPU || path > MOEEDGE_PREFILL_PATH_STREAM || n_tokens_min < 1) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "Unknown prefill path, or fewer than one token.");
    }
    return with_cache(id, [&](expert_cache & cache) {
        cache.prefill_path.store(path);
        cache.prefill_tokens_min.store(n_tokens_min);
    });
}

int moeedge_cache_set_readers(int64_t id, int n_threads, int64_t piece_bytes) {
    if (n_threads < 1 || piece_bytes < 0) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "Fewer than one thread reads the model's file, or less than one byte.");
    }
    return with_cache(id, [&](expert_cache & cache) { cache.set_readers(n_threads, piece_bytes); });
}

int moeedge_cache_set_ram(int64_t id, int64_t ram_id) {
    return with_cache(
        id,
        [&](expert_cache & cache) -> int {
            const std::shared_ptr<expert_cache> ram = find_cache(ram_id);
            return ram_id != 0 && !ram ? no_cache() : cache.set_ram(ram);
        },
        "Only a cache in RAM of the same experts can be read instead of the files.");
}

static const char no_loader[] = "Only a cache in RAM reads its files directly.";

int moeedge_cache_set_read_faults(int64_t id, int kind, int every, double delay_s) {
    return with_cache(id, [&](expert_cache & cache) { return cache.set_read_faults(kind, every, delay_s); }, no_loader);
}

int moeedge_cache_get_reader(int64_t id, moeedge_reader_info * out) {
    return with_cache(id, [&](expert_cache & cache) { return cache.get_reader(*out); }, no_loader);
}

int moeedge_cache_set_timing(int64_t id, int on) {
    return with_cache(id, [&](expert_cache & cache) { cache.is_timing.store(on != 0); });
}

int moeedge_cache_set_device_path(int64_t id, int path) {
    if (path < MOEEDGE_DEVICE_PATH_PAIRS || path > MOEEDGE_DEVICE_PATH_AHEAD) {
        return fail(MOEEDGE_STATUS_BAD_ARGUMENT, "Unknown device path.");
    }
    return with_cache(id, [&](expert_cache & cache) { cache.device_path.store(path); });
}

int moeedge_cache_acquire(int64_t id, int layer, const int32_t * experts, int n, int32_t * slots) {
    return with_cache(id, [&](expert_cache & cache) { return cache.acquire(layer, experts, n, slots); });
}

int moeedge_cache_release(int64_t id, int layer, const int32_t * slots, int n) {
    return with_cache(id, [&](expert_cache & cache) { cache.release(layer, slots, n); });
}

int moeedge_cache_read(int64_t id, int layer, int expert, const char * role, void * out, int64_t size) {
    return with_cache(
        id, [&](expert_cache & cache) { return cache.read(layer, expert, role, out, size); },
        "That expert is not resident, or not of that size.");
}

} // extern "C"
