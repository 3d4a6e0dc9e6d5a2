#include <algorithm>
#include <mutex>
#include <vector>

#include "compute.h"
#include "instance.h"

namespace moeedge {

namespace {

struct registry {
    std::mutex              mutex;
    std::vector<instance *> live; // ascending id
    int64_t                 last_id        = 0;
    int                     default_claims = MOEEDGE_CLAIMS_BLOCK;
};

// never destroyed: a program may free its contexts after static destructors ran
registry & get_registry() {
    static registry * r = new registry;
    return *r;
}

} // namespace

int64_t registry_add(instance * self) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    self->id = ++r.last_id;
    self->claims.store(r.default_claims);
    r.live.push_back(self);
    return self->id;
}

void registry_remove(instance * self) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.live.erase(std::remove(r.live.begin(), r.live.end(), self), r.live.end());
}

instance * registry_find(int64_t id) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (instance * self : r.live) {
        if (self->id == id) {
            return self;
        }
    }
    return nullptr;
}

int64_t registry_newest_of(std::thread::id creator) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (auto it = r.live.rbegin(); it != r.live.rend(); ++it) {
        if ((*it)->creator == creator) {
            return (*it)->id;
        }
    }
    return 0;
}

int registry_size() {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    return (int) r.live.size();
}

void registry_detach(const expert_cache * cache) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (instance * self : r.live) {
        if (self->cache.get() == cache) {
            set_cache(self, nullptr);
        }
    }
}

int registry_default_claims() {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    return r.default_claims;
}

void registry_set_default_claims(int claims) {
    registry & r = get_registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    r.default_claims = claims;
}

} // namespace moeedge
