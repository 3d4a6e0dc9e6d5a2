// The cache as a whole: made from its parts, and seen by the computing side and by the C interface.

#include "cache.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "mover.h"
#include "records.h"

namespace moeedge {

struct expert_cache::impl {
    std::shared_ptr<cache_core> core;
    block_records               records;
    int64_t                     slots_wanted = 0;
    int                         n_stage      = 0;

    std::mutex             closing;
    std::unique_ptr<mover> moving; // null once closed
};

namespace {

bool is_valid(const moeedge_cache_config & config) {
    const bool has_arrays = config.device && config.files && config.tensors && config.n_files > 0 && config.n_tensors > 0;
    // a comparison with NaN is false
    const bool has_ranges = config.ratio >= 0.0 && config.ratio <= 1.0 && config.link_bytes_per_s >= 0.0 &&
                            config.link_latency_s >= 0.0;
    return has_arrays && has_ranges && config.n_layers > 0 && config.n_experts > 0 && config.n_stage >= 0;
}

// slots per group: the same share of each, at least one where there are to be any
std::vector<int> wanted_slots(const expert_layout & layout, double ratio) {
    std::vector<int> wanted;
    for (const expert_group & group : layout.groups) {
        const int n_experts = group.n_layers * layout.n_experts;
        const int n_slots   = (int) std::lround(ratio * n_experts);
        wanted.push_back(ratio > 0.0 ? std::clamp(n_slots, 1, n_experts) : 0);
    }
    return wanted;
}

// the model's layout, its files and the device; null with the reason
std::shared_ptr<cache_core> open_core(const moeedge_cache_config & config, std::string & error, int & status) {
    auto core = std::make_shared<cache_core>();
    status    = MOEEDGE_BAD_ARGUMENT;
    if (!core->layout.read(config, error)) {
        return nullptr;
    }
    status = MOEEDGE_FILE_ERROR;
    if (!core->source.open(config, core->layout, error)) {
        return nullptr;
    }
    status       = MOEEDGE_NO_DEVICE;
    core->device = cache_device::open(config, error);
    return core->device ? core : nullptr;
}

// everything that talks to the device while the cache is made
bool allocate(cache_core & core, const std::vector<int> & wanted, int n_stage) {
    cache_device & device = *core.device;
    core.pools.reset(new slot_pools(core.device, core.layout, n_stage));
    core.moving.reset(new uploader(device, device.transfer, core.source, core.layout, *core.pools));
    if (n_stage > 0) {
        core.streaming.reset(new uploader(device, device.stream, core.source, core.layout, *core.pools));
    }
    return core.moving->allocate() && (n_stage == 0 || core.streaming->allocate()) && core.pools->allocate(wanted);
}

// of a worker that was told to free its memory
constexpr auto freeing_patience = std::chrono::seconds(30);

// frees what the core holds on the device, if nobody else (a thread that was left behind) still does
void release_core(std::shared_ptr<cache_core> & core) {
    const std::shared_ptr<device_loss> loss = core->device->loss;
    // the thread that may be left behind holds the last reference, so that it is the one that waits for the device
    auto last = std::make_shared<std::shared_ptr<cache_core>>(std::move(core));
    loss->run([last] { last->reset(); }, freeing_patience);
}

} // namespace

// allocates in a thread that can be left behind; false with the reason
static bool allocate_or_lose(std::shared_ptr<cache_core> & core, const std::vector<int> & wanted, int n_stage,
                             std::string & error, int & status) {
    const std::shared_ptr<cache_device> device       = core->device;
    auto                                is_allocated = std::make_shared<bool>(false);
    if (!device->loss->run([core, wanted, n_stage, is_allocated] { *is_allocated = allocate(*core, wanted, n_stage); })) {
        status = MOEEDGE_DEVICE_LOST;
        error  = "The device " + device->name + " is lost: " + device->loss->reason() + ".";
        return false;
    }
    if (!*is_allocated) {
        status = MOEEDGE_OUT_OF_MEMORY;
        error  = "The device " + device->name + " has no memory for even one expert.";
        release_core(core);
        return false;
    }
    return true;
}

expert_cache::expert_cache(std::unique_ptr<impl> parts) : self(std::move(parts)) {}

std::shared_ptr<expert_cache> expert_cache::create(const moeedge_cache_config & config, std::string & error, int & status) {
    if (!is_valid(config)) {
        status = MOEEDGE_BAD_ARGUMENT;
        error  = "The expert cache needs a device, files, expert tensors, a ratio from 0 to 1 and no negative sizes.";
        return nullptr;
    }
    std::shared_ptr<cache_core> core = open_core(config, error, status);
    if (!core) {
        return nullptr;
    }
    const std::vector<int> wanted = wanted_slots(core->layout, config.ratio);
    if (!allocate_or_lose(core, wanted, config.n_stage, error, status)) {
        return nullptr;
    }
    auto             parts = std::make_unique<impl>();
    std::vector<int> capacity;
    for (size_t g = 0; g < wanted.size(); g++) {
        capacity.push_back(core->pools->capacity((int) g));
        parts->slots_wanted += wanted[g];
    }
    core->table.reset(new residency_table(core->layout, capacity));
    core->link_bytes_per_s = core->device->is_emulated ? config.link_bytes_per_s : 0.0;
    core->link_latency_s   = core->device->is_emulated ? config.link_latency_s : 0.0;
    core->device->loss->on_lost([weak = std::weak_ptr<cache_core>(core)] {
        if (auto live = weak.lock()) {
            live->table->stop();
        }
    });
    parts->n_stage = config.n_stage;
    parts->moving.reset(new mover(core));
    parts->core = std::move(core);
    status      = MOEEDGE_OK;
    return std::shared_ptr<expert_cache>(new expert_cache(std::move(parts)));
}

void expert_cache::close() {
    std::lock_guard<std::mutex> lock(self->closing);
    self->moving.reset();
}

expert_cache::~expert_cache() {
    close();
    release_core(self->core);
}

// the computing side

int expert_cache::group_of(int layer) const {
    const expert_layout & layout = self->core->layout;
    return layer >= 0 && layer < layout.n_layers ? layout.group_of[layer] : -1;
}

int expert_cache::n_groups() const {
    return (int) self->core->layout.groups.size();
}

ggml_tensor * expert_cache::pool(int group, const char * role) const {
    const int index = self->core->layout.role_index(group, role);
    return index < 0 ? nullptr : self->core->pools->tensor(group, index);
}

int expert_cache::acquire(int layer, const int32_t * experts, int n, int32_t * slots) {
    if (group_of(layer) < 0) {
        std::fill(slots, slots + n, not_resident);
        return 0;
    }
    return self->core->table->acquire(layer, experts, n, slots);
}

void expert_cache::release(int layer, const int32_t * slots, int n) {
    if (group_of(layer) >= 0) {
        self->core->table->release(layer, slots, n);
    }
}

bool expert_cache::has_resident(int layer) const {
    return group_of(layer) >= 0 && self->core->table->has_resident(layer);
}

ggml_backend_t expert_cache::compute_backend() const {
    return self->core->device->compute;
}

ggml_backend_buffer_type_t expert_cache::compute_buft() const {
    return self->core->device->buft;
}

ggml_backend_buffer_type_t expert_cache::staging_buft() const {
    return self->core->device->staging_buft;
}

bool expert_cache::is_host() const {
    return self->core->device->is_host;
}

bool expert_cache::is_async() const {
    return self->core->device->is_async;
}

int expert_cache::host_threads() const {
    return self->core->device->n_threads;
}

int expert_cache::n_stage() const {
    return self->n_stage;
}

int expert_cache::first_stage(int group) const {
    return self->core->pools->capacity(group);
}

bool expert_cache::stage(int layer, const int32_t * experts, int n, const int32_t * slots) {
    struct request {
        std::vector<int32_t> experts, slots;
        bool                 is_done = false;
    };
    auto asked     = std::make_shared<request>();
    asked->experts.assign(experts, experts + n);
    asked->slots.assign(slots, slots + n);
    const bool is_answered = self->core->device->loss->run([core = self->core, layer, asked] {
        uploader & up     = *core->streaming;
        int64_t    ticket = 0;
        for (size_t i = 0; i < asked->experts.size() && ticket >= 0; i++) {
            ticket = up.send(layer, asked->experts[i], asked->slots[i]);
        }
        up.wait(ticket);
        asked->is_done = ticket >= 0;
    });
    return is_answered && asked->is_done;
}

bool expert_cache::lost() const {
    return self->core->device->loss->is_lost();
}

void expert_cache::mark_lost(const char * reason) {
    self->core->device->loss->mark(reason);
}

bool expert_cache::run_on_device(std::function<void()> work) {
    return self->core->device->loss->run(std::move(work));
}

std::string expert_cache::loss_reason() const {
    return "The device " + self->core->device->name + " is lost: " + self->core->device->loss->reason() + ".";
}

void expert_cache::record_block(const moeedge_block_record & record) {
    self->records.add(record);
}

void expert_cache::count_unknown_block() {
    self->records.add_unknown();
}

// the planning side

void expert_cache::get_info(moeedge_cache_info & out) const {
    const cache_core & core = *self->core;
    out                     = {};
    out.n_groups            = n_groups();
    out.n_layers            = core.layout.n_layers;
    out.n_experts           = core.layout.n_experts;
    out.n_stage             = self->n_stage;
    for (int g = 0; g < out.n_groups; g++) {
        out.n_slots += core.pools->capacity(g);
    }
    out.slots_wanted  = self->slots_wanted;
    out.pool_bytes    = core.pools->bytes();
    out.staging_bytes = (int64_t) (core.moving->staging_bytes() + (core.streaming ? core.streaming->staging_bytes() : 0));
    out.unpinned      = core.moving->is_unpinned() || (core.streaming && core.streaming->is_unpinned());
    out.is_host       = core.device->is_host;
    out.lost          = lost();
    std::snprintf(out.device, sizeof(out.device), "%s", core.device->name.c_str());
    std::snprintf(out.description, sizeof(out.description), "%s", core.device->description.c_str());
}

void expert_cache::get_groups(int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) const {
    const expert_layout & layout = self->core->layout;
    std::copy(layout.group_of.begin(), layout.group_of.end(), layer_group);
    for (int g = 0; g < n_groups(); g++) {
        capacity[g]     = self->core->pools->capacity(g);
        expert_bytes[g] = (int64_t) layout.groups[g].expert_bytes;
    }
}

int expert_cache::plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
                       const float * utility, int n_victims) {
    const bool is_taken = self->core->table->plan(uploads, levels, n_uploads, victims, utility, n_victims);
    return is_taken ? MOEEDGE_OK : MOEEDGE_BAD_ARGUMENT;
}

int expert_cache::demand(int layer, const int32_t * experts, int n, const int32_t * victims, const float * utility,
                         int n_victims, double timeout_s) {
    const int n_resident = self->core->table->demand(layer, experts, n, victims, utility, n_victims, timeout_s);
    return n_resident < 0 ? MOEEDGE_BAD_ARGUMENT : n_resident;
}

void expert_cache::set_batch(int n_experts) {
    self->core->batch.store(n_experts);
}

void expert_cache::copy_residency(uint8_t * out) const {
    self->core->table->copy_residency(out);
}

void expert_cache::get_stats(moeedge_cache_stats & out) const {
    out = {};
    self->core->table->add_stats(out);
    self->records.add_stats(out);
    out.lost = lost();
}

int expert_cache::read_blocks(int64_t after, moeedge_block_record * out, int n_max) {
    return self->records.read(after, out, n_max);
}

static int status_of(residency_table::outcome outcome) {
    switch (outcome) {
        case residency_table::outcome::done:
            return MOEEDGE_OK;
        case residency_table::outcome::timeout:
            return MOEEDGE_TIMEOUT;
        default:
            return MOEEDGE_DEVICE_LOST;
    }
}

int expert_cache::drain(double timeout_s) {
    return status_of(self->core->table->drain(timeout_s));
}

int expert_cache::clear() {
    return status_of(self->core->table->clear());
}

// bytes of a slot; false if the device is lost
static bool read_slot(const std::shared_ptr<cache_core> & core, ggml_tensor * pool, size_t offset, void * out, size_t size) {
    if (core->device->is_host) {
        std::memcpy(out, (const char *) pool->data + offset, size);
        return true;
    }
    auto bytes = std::make_shared<std::vector<char>>(size);
    if (!core->device->loss->run(
            [core, bytes, pool, offset] { ggml_backend_tensor_get(pool, bytes->data(), offset, bytes->size()); })) {
        return false;
    }
    std::memcpy(out, bytes->data(), size);
    return true;
}

int expert_cache::read(int layer, int expert, const char * role, void * out, int64_t size) {
    const cache_core & core  = *self->core;
    const int          group = group_of(layer);
    const int          index = group < 0 ? -1 : core.layout.role_index(group, role);
    if (index < 0 || size != (int64_t) core.layout.groups[group].roles[index].bytes) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    int32_t slot;
    if (acquire(layer, &expert, 1, &slot) == 0) {
        return MOEEDGE_BAD_ARGUMENT;
    }
    ggml_tensor * pool    = core.pools->tensor(group, index);
    const bool    is_read = read_slot(self->core, pool, (size_t) slot * (size_t) size, out, (size_t) size);
    release(layer, &slot, 1);
    return is_read ? MOEEDGE_OK : MOEEDGE_DEVICE_LOST;
}

} // namespace moeedge
