// The C interface to expert caches (include/moeedge.h): the list of live ones, and the reason of the last failure.

#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <unordered_map>

#include "cache.h"
#include "compute.h"
#include "instance.h"
#include "moeedge.h"

using moeedge::expert_cache;

namespace {

struct cache_list {
    std::mutex                                                mutex;
    std::unordered_map<int64_t, std::shared_ptr<expert_cache>> live;
    int64_t                                                   last_id = 0;
};

// never destroyed: a program may end without destroying its caches
cache_list & get_list() {
    static cache_list * list = new cache_list;
    return *list;
}

thread_local std::string last_error;

int fail(int status, std::string reason) {
    last_error = std::move(reason);
    return status;
}

std::shared_ptr<expert_cache> find(int64_t id) {
    cache_list &                list = get_list();
    std::lock_guard<std::mutex> lock(list.mutex);
    const auto                  found = list.live.find(id);
    return found == list.live.end() ? nullptr : found->second;
}

int64_t add(std::shared_ptr<expert_cache> cache) {
    cache_list &                list = get_list();
    std::lock_guard<std::mutex> lock(list.mutex);
    list.live[++list.last_id] = std::move(cache);
    return list.last_id;
}

std::shared_ptr<expert_cache> remove(int64_t id) {
    cache_list &                  list = get_list();
    std::lock_guard<std::mutex>   lock(list.mutex);
    std::shared_ptr<expert_cache> cache;
    const auto                    found = list.live.find(id);
    if (found != list.live.end()) {
        cache = std::move(found->second);
        list.live.erase(found);
    }
    return cache;
}

int no_cache() {
    return fail(MOEEDGE_NO_CACHE, "There is no such expert cache, or it is closed.");
}

// the sentence of a status that a cache's own function returned
int explained(int status, const expert_cache & cache, const char * bad_argument) {
    switch (status) {
        case MOEEDGE_BAD_ARGUMENT:
            return fail(status, bad_argument);
        case MOEEDGE_TIMEOUT:
            return fail(status, "The expert cache still moves experts.");
        case MOEEDGE_DEVICE_LOST:
            return fail(status, cache.lost() ? cache.loss_reason() : "The expert cache is closed.");
        default:
            return status;
    }
}

} // namespace

extern "C" {

const char * moeedge_last_error(void) {
    return last_error.c_str();
}

int64_t moeedge_cache_create(const moeedge_cache_config * config) {
    if (config == nullptr) {
        return fail(MOEEDGE_BAD_ARGUMENT, "The expert cache needs a configuration.");
    }
    try {
        std::string reason;
        int         status = MOEEDGE_OK;
        auto        cache  = expert_cache::create(*config, reason, status);
        return cache ? add(std::move(cache)) : fail(status, reason);
    } catch (const std::bad_alloc &) {
        return fail(MOEEDGE_OUT_OF_MEMORY, "There is no memory for the expert cache.");
    } catch (const std::system_error & error) {
        return fail(MOEEDGE_OUT_OF_MEMORY, std::string("The expert cache cannot start its thread: ") + error.what() + ".");
    }
}

int moeedge_cache_destroy(int64_t id) {
    const std::shared_ptr<expert_cache> cache = remove(id);
    if (!cache) {
        return no_cache();
    }
    moeedge::registry_detach(cache.get());
    cache->close();
    return MOEEDGE_OK;
}

int moeedge_cache_get_info(int64_t id, struct moeedge_cache_info * out) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    cache->get_info(*out);
    return MOEEDGE_OK;
}

int moeedge_cache_groups(int64_t id, int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    cache->get_groups(layer_group, capacity, expert_bytes);
    return MOEEDGE_OK;
}

int moeedge_cache_plan(int64_t id, const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
                       const float * victim_utility, int n_victims) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    try {
        const int status = cache->plan(uploads, levels, n_uploads, victims, victim_utility, n_victims);
        return explained(status, *cache, "The plan names an expert that the model does not have.");
    } catch (const std::bad_alloc &) {
        return fail(MOEEDGE_OUT_OF_MEMORY, "There is no memory for the plan.");
    }
}

int moeedge_cache_demand(int64_t id, int layer, const int32_t * experts, int n, const int32_t * victims,
                         const float * victim_utility, int n_victims, double timeout_s) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    try {
        const int status = cache->demand(layer, experts, n, victims, victim_utility, n_victims, timeout_s);
        return explained(status, *cache, "The demand names an expert that the model does not have.");
    } catch (const std::bad_alloc &) {
        return fail(MOEEDGE_OUT_OF_MEMORY, "There is no memory for the demand.");
    }
}

int moeedge_cache_set_batch(int64_t id, int n_experts) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    if (n_experts < 0) {
        return fail(MOEEDGE_BAD_ARGUMENT, "No transfer has fewer than no experts.");
    }
    cache->set_batch(n_experts);
    return MOEEDGE_OK;
}

int moeedge_cache_residency(int64_t id, uint8_t * out) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    cache->copy_residency(out);
    return MOEEDGE_OK;
}

int moeedge_cache_get_stats(int64_t id, struct moeedge_cache_stats * out) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    cache->get_stats(*out);
    return MOEEDGE_OK;
}

int moeedge_cache_blocks(int64_t id, int64_t after, moeedge_block_record * out, int n_max) {
    const auto cache = find(id);
    return cache ? cache->read_blocks(after, out, n_max) : no_cache();
}

int moeedge_cache_drain(int64_t id, double timeout_s) {
    const auto cache = find(id);
    return cache ? explained(cache->drain(timeout_s), *cache, "") : no_cache();
}

int moeedge_cache_clear(int64_t id) {
    const auto cache = find(id);
    return cache ? explained(cache->clear(), *cache, "") : no_cache();
}

int moeedge_cache_set_prefill(int64_t id, int path, int n_tokens_min) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    if (path < MOEEDGE_PREFILL_CPU || path > MOEEDGE_PREFILL_STREAM || n_tokens_min < 1) {
        return fail(MOEEDGE_BAD_ARGUMENT, "There is no such way to compute large batches.");
    }
    cache->prefill_path.store(path);
    cache->prefill_tokens_min.store(n_tokens_min);
    return MOEEDGE_OK;
}

int moeedge_cache_acquire(int64_t id, int layer, const int32_t * experts, int n, int32_t * slots) {
    const auto cache = find(id);
    return cache ? cache->acquire(layer, experts, n, slots) : no_cache();
}

int moeedge_cache_release(int64_t id, int layer, const int32_t * slots, int n) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    cache->release(layer, slots, n);
    return MOEEDGE_OK;
}

int moeedge_cache_read(int64_t id, int layer, int expert, const char * role, void * out, int64_t size) {
    const auto cache = find(id);
    if (!cache) {
        return no_cache();
    }
    return explained(cache->read(layer, expert, role, out, size), *cache, "That expert is not resident, or not of that size.");
}

int moeedge_instance_set_cache(int64_t instance_id, int64_t id) {
    moeedge::instance * instance = moeedge::registry_find(instance_id);
    if (instance == nullptr) {
        return fail(MOEEDGE_NO_INSTANCE, "The context is closed.");
    }
    const auto cache = find(id);
    if (id != 0 && !cache) {
        return no_cache();
    }
    moeedge::set_cache(instance, cache);
    return MOEEDGE_OK;
}

} // extern "C"
