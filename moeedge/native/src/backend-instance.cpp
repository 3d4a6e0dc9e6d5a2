#include "backend-instance.h"

#include <algorithm>
#include <mutex>

#include "fork-mark.h"

namespace moeedge {

static void set_ram(instance * self, std::shared_ptr<expert_cache> cache) {
    if (self->hybrid) {
        self->hybrid->set_ram(nullptr);
    }
    self->from_ram.reset();
    self->ram.reset();
    if (cache) {
        self->from_ram.reset(new ram_executor(cache, self->cpu, self->cpu_dev)); // may throw
        self->from_ram->should_stop = [self] { return self->abort && self->abort(self->abort_data); };
        self->ram = std::move(cache);
    }
    if (self->hybrid) {
        self->hybrid->set_ram(self->from_ram.get());
    }
}

static void set_device_cache(instance * self, std::shared_ptr<expert_cache> cache) {
    if (self->cache && self->cache->is_foreign()) {
        self->hybrid.release(); // its threads and its device stayed in the process that forked this one
    }
    self->hybrid.reset();
    self->cache.reset();
    if (cache) {
        self->hybrid.reset(new hybrid_executor(cache, self->cpu, self->cpu_dev)); // may throw
        self->cache = std::move(cache);
        self->hybrid->set_n_threads(self->n_threads);
        self->hybrid->set_ram(self->from_ram.get());
    }
}

void set_cache(instance * self, std::shared_ptr<expert_cache> cache) {
    self->parsed.clear(); // they name the old cache's pools
    cache->device().is_ram ? set_ram(self, std::move(cache)) : set_device_cache(self, std::move(cache));
}

void remove_cache(instance * self, const expert_cache * cache) {
    self->parsed.clear();
    if (cache && self->ram.get() == cache) {
        set_ram(self, nullptr);
    } else if (cache && self->cache.get() == cache) {
        set_device_cache(self, nullptr);
    }
}

struct instance_list {
    std::mutex              mutex;
    std::vector<instance *> live; // ascending id
    int64_t                 last_id = 0;
};

// never destroyed: a program may free its contexts after static destructors ran
static instance_list & instances() {
    static instance_list * list = new instance_list;
    return *list;
}

static std::mutex & list_mutex() {
    return instances().mutex;
}

// when the library is loaded: at the first use another thread might be forking already
[[maybe_unused]] static const int registered = keep_free_in_children<list_mutex>();

void instances_add(instance * self) {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    list.live.push_back(self);
    self->id = ++list.last_id;
    self->offload_scope.store(defaults.offload_scope);
    ggml_backend_buffer_type_t buft = defaults.host_buft.load();
    self->buft = buft ? buft : ggml_backend_cpu_buffer_type();
}

void instances_remove(instance * self) {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    list.live.erase(std::remove(list.live.begin(), list.live.end(), self), list.live.end());
}

instance * instances_find(int64_t id) {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    for (instance * self : list.live) {
        if (self->id == id) {
            return self;
        }
    }
    return nullptr;
}

int64_t instances_newest_of(std::thread::id creator) {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    for (auto it = list.live.rbegin(); it != list.live.rend(); ++it) {
        if ((*it)->creator == creator) {
            return (*it)->id;
        }
    }
    return 0;
}

int instances_count() {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    return (int) list.live.size();
}

void instances_detach(const expert_cache * cache) {
    instance_list &             list = instances();
    std::lock_guard<std::mutex> lock(list.mutex);
    for (instance * self : list.live) {
        if (self->cache.get() == cache || self->ram.get() == cache) {
            remove_cache(self, cache);
        }
    }
}

} // namespace moeedge
