#include "expert-cache.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <exception>
#include <numeric>

namespace moeedge {

// records

void block_records::add(const moeedge_block_record & record) {
    std::lock_guard<std::mutex> lock(mutex);
    moeedge_block_record &      kept = ring[++serial % n_kept];
    kept        = record;
    kept.serial = serial;

    sums.blocks++;
    if (record.n_tokens <= n_tokens_counted && record.phase != MOEEDGE_PHASE_PREFILL) {
        sums.pairs += record.pairs_cpu + record.pairs_device;
        sums.pairs_hit += record.pairs_device;
        sums.unique += record.unique_cpu + record.unique_device;
        sums.unique_hit += record.unique_device;
    }
    sums.partition_s += (double) record.partition_ns * 1e-9;
    sums.cpu_s += (double) record.cpu_ns * 1e-9;
    sums.device_s += (double) record.device_ns * 1e-9;
    sums.wait_s += (double) record.wait_ns * 1e-9;
    sums.wait_bytes += record.wait_bytes;
}

void block_records::add_unknown() {
    std::lock_guard<std::mutex> lock(mutex);
    sums.blocks_unknown++;
}

int block_records::read(int64_t after, moeedge_block_record * out, int n_max) {
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t               oldest = std::max<int64_t>(serial - n_kept + 1, 1);
    int                         n      = 0;
    for (int64_t s = std::max(after + 1, oldest); s <= serial && n < n_max; s++) {
        out[n++] = ring[s % n_kept];
    }
    return n;
}

moeedge_cache_stats block_records::stats() {
    std::lock_guard<std::mutex> lock(mutex);
    return sums;
}

// of reads for another cache: those that computations wait for come first
static constexpr int upload_priority = 1;

static bool is_valid(const moeedge_cache_config & config) {
    const bool has_arrays = config.device && config.files && config.tensors && config.n_files > 0 && config.n_tensors > 0;
    // a comparison with NaN is false
    const bool has_ranges = config.ratio >= 0.0 && config.ratio <= 1.0 && config.link_bytes_per_s >= 0.0 &&
                            config.link_latency_s >= 0.0 && config.pool_bytes_max >= 0 && config.disk_bytes_per_s >= 0.0;
    return has_arrays && has_ranges && config.n_layers > 0 && config.n_experts > 0 && config.n_stage >= 0;
}

// Slots per group: the same share of each, at least one unless the share is 0. The parts of a group have as many together as
// it would have uncut.
static std::vector<int> wanted_slots(const expert_layout & layout, double ratio) {
    std::vector<int> wanted;
    int              n_before = 0; // experts of the earlier parts
    for (size_t g = 0; g < layout.groups.size(); g++) {
        const bool is_first  = g == 0 || layout.groups[g].kind != layout.groups[g - 1].kind;
        const int  n_experts = layout.groups[g].n_layers * layout.n_experts;
        n_before             = is_first ? 0 : n_before;
        const long n_slots   = std::lround(ratio * (n_before + n_experts)) - std::lround(ratio * n_before);
        wanted.push_back(ratio > 0.0 ? std::clamp((int) n_slots, 1, n_experts) : 0);
        n_before += n_experts;
    }
    return wanted;
}

// the model's layout, its files and the device; null with the reason
static std::shared_ptr<cache_core> open_core(const moeedge_cache_config & config, std::string & error, int & status) {
    auto core = std::make_shared<cache_core>();
    status    = MOEEDGE_STATUS_BAD_ARGUMENT;
    if (!core->layout.read(config, error)) {
        return nullptr;
    }
    status = MOEEDGE_STATUS_FILE_ERROR;
    if (!core->source.open(config, core->layout, error)) {
        return nullptr;
    }
    status       = MOEEDGE_STATUS_NO_DEVICE;
    core->device = cache_device::open(config, error);
    return core->device ? core : nullptr;
}

// pools, staging memory and table; talks to the device
static bool allocate(cache_core & core, const moeedge_cache_config & config) {
    cache_device &    device = *core.device;
    const pool_limits limits(device, config.pool_bytes_max);
    core.layout.cut([&](const expert_group & group) { return limits.count_parts(group, core.layout.n_experts, config.ratio); });
    const std::vector<int> wanted = wanted_slots(core.layout, config.ratio);
    core.slots_wanted             = std::accumulate(wanted.begin(), wanted.end(), (int64_t) 0);
    core.pools.reset(new slot_pools(core.device, core.layout, limits, config.n_stage));
    const auto new_uploader = [&](ggml_backend_t backend, bool is_staging) {
        return std::make_unique<expert_uploader>(device, backend, core.source, core.layout, *core.pools, is_staging);
    };
    if (config.pin_files && device.is_async) {
        core.source.pin(ggml_backend_dev_backend_reg(device.dev));
    }
    core.moving = new_uploader(device.transfer, /* is_staging = */ false);
    if (config.n_stage > 0) {
        core.streaming = new_uploader(device.stream, /* is_staging = */ true);
    }
    if (!core.moving->allocate() || (core.streaming && !core.streaming->allocate()) || !core.pools->allocate(wanted)) {
        return false;
    }
    std::vector<int> capacity;
    for (size_t g = 0; g < wanted.size(); g++) {
        capacity.push_back(core.pools->capacity((int) g));
    }
    const slot_pools & pools = *core.pools;
    core.table.reset(new residency_table(core.layout, capacity,
                                         { [&pools](int group, int from, int to) { pools.copy(group, from, to); },
                                           [&pools](int group, int begin, int end) { pools.give_back(group, begin, end); } }));
    return true;
}

// Frees the core's memory on the device unless an abandoned thread still holds it. The thread that talks to the device owns
// the last reference, so that it is the one that waits.
static void release_core(std::shared_ptr<cache_core> core) {
    const std::shared_ptr<device_health> health = core->device->health;
    health->run([last = std::move(core)]() mutable { last.reset(); }, device_health::free_limit);
}

std::shared_ptr<expert_cache> expert_cache::create(const moeedge_cache_config & config, std::string & error, int & status) {
    if (!is_valid(config)) {
        status = MOEEDGE_STATUS_BAD_ARGUMENT;
        error  = "The expert cache needs a device, files, expert tensors, a ratio from 0 to 1 and no negative sizes.";
        return nullptr;
    }
    std::shared_ptr<cache_core> core = open_core(config, error, status);
    if (!core) {
        return nullptr;
    }
    const std::shared_ptr<cache_device> device       = core->device;
    auto                                is_allocated = std::make_shared<bool>(false);
    const bool                          is_answered  = device->health->run([core, config, is_allocated] { *is_allocated = allocate(*core, config); });
    if (!is_answered) {
        status = MOEEDGE_STATUS_DEVICE_LOST;
        error  = device->lost_message();
        return nullptr;
    }
    if (!*is_allocated) {
        status = MOEEDGE_STATUS_OUT_OF_MEMORY;
        error  = "The device " + device->name + " has no memory for even one expert.";
        release_core(std::move(core));
        return nullptr;
    }
    if (device->is_emulated) {
        core->link_bytes_per_s = config.link_bytes_per_s;
        core->link_latency_s   = config.link_latency_s;
    }
    if (device->is_ram) {
        core->loader.reset(new expert_loader(core->layout, *core->pools, config.disk_bytes_per_s));
        if (!core->loader->open(config, error)) {
            status = MOEEDGE_STATUS_FILE_ERROR;
            return nullptr;
        }
    }
    device->health->on_lost([weak = std::weak_ptr<cache_core>(core)] {
        if (auto live = weak.lock()) {
            live->table->stop();
        }
    });
    status = MOEEDGE_STATUS_OK;
    return std::make_shared<expert_cache>(std::move(core));
}

expert_cache::expert_cache(std::shared_ptr<cache_core> c)
    : n_stage(c->pools->n_staging()), core(std::move(c)), mover([kept = core] { run_mover(*kept); }) {}

expert_cache::~expert_cache() {
    if (is_foreign()) { // its thread is not in this process: it can neither be joined nor detached
        new std::thread(std::move(mover));
        new std::shared_ptr<cache_core>(std::move(core));
        return;
    }
    close();
    try {
        release_core(std::move(core));
    } catch (const std::exception &) { // no memory for the thread that frees: the device keeps its buffers
    }
}

void expert_cache::close() {
    if (is_foreign()) {
        return;
    }
    std::lock_guard<std::mutex> lock(closing);
    if (!mover.joinable()) {
        return;
    }
    core->table->stop();
    if (device().health->wait(core->has_mover_ended, device_health::free_limit)) {
        mover.join();
    } else {
        mover.detach();
    }
}

// computing side

int expert_cache::group_of(int layer) const {
    return layer >= 0 && layer < core->layout.n_layers ? core->layout.group_of[layer] : -1;
}

ggml_tensor * expert_cache::pool(int group, const char * role) const {
    const int index = core->layout.role_index(group, role);
    return index < 0 ? nullptr : core->pools->tensor(group, index);
}

ggml_tensor * expert_cache::stage(int group, const char * role) const {
    const int index = core->layout.role_index(group, role);
    return index < 0 ? nullptr : core->pools->stage(group, index);
}

int expert_cache::acquire(int layer, const int32_t * experts, int n, int32_t * slots) {
    if (group_of(layer) < 0 || is_foreign()) {
        std::fill(slots, slots + n, not_resident);
        return 0;
    }
    return core->table->acquire(layer, experts, n, slots);
}

void expert_cache::release(int layer, const int32_t * slots, int n) {
    if (group_of(layer) >= 0 && !is_foreign()) {
        core->table->release(layer, slots, n);
    }
}

bool expert_cache::stage(int layer, const std::vector<int32_t> & experts, const std::vector<int32_t> & slots, const stop_flag & stops) try {
    auto       is_done     = std::make_shared<bool>(false);
    const bool is_answered = run_on_device([kept = core, layer, experts, slots, stops, is_done] {
        expert_uploader & uploader = *kept->streaming;
        int64_t           ticket   = 0;
        size_t            n_sent   = 0;
        for (; n_sent < experts.size() && ticket >= 0 && !*stops; n_sent++) {
            ticket = uploader.send(layer, experts[n_sent], slots[n_sent]);
        }
        uploader.wait(ticket);
        *is_done = ticket >= 0 && n_sent == experts.size();
    });
    return is_answered && *is_done;
} catch (const std::exception & error) { // a backend that throws
    mark_lost(error.what());
    return false;
}

std::string expert_cache::load_error() const {
    const std::string reason = core->loader ? core->loader->error() : "";
    return reason.empty() ? "The expert cache is closed." : reason;
}

// planning side

void expert_cache::set_readers(int n, int64_t piece_bytes) {
    if (core->loader) {
        core->loader->reader.set(n, piece_bytes > 0 ? (size_t) piece_bytes : core->loader->reader.piece_bytes());
    }
    core->moving->set_readers(n);
    if (core->streaming) {
        core->streaming->set_readers(n);
    }
}

// whether the other cache has the same tensors for all experts of this one
bool expert_cache::has_experts_of(const expert_cache & other) const {
    const expert_layout & ours   = core->layout;
    const expert_layout & theirs = other.core->layout;
    if (ours.n_layers != theirs.n_layers || ours.n_experts != theirs.n_experts) {
        return false;
    }
    for (int layer = 0; layer < theirs.n_layers; layer++) {
        const int group = theirs.group_of[layer];
        if (group >= 0 && (ours.group_of[layer] < 0 || !(ours.groups[ours.group_of[layer]].roles == theirs.groups[group].roles))) {
            return false;
        }
    }
    return true;
}

int expert_cache::set_ram(const std::shared_ptr<expert_cache> & ram) {
    if (!ram) {
        core->source.set_other(nullptr);
        return MOEEDGE_STATUS_OK;
    }
    if (!ram->core->loader || core->loader || !ram->has_experts_of(*this)) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    core->source.set_other([weak = std::weak_ptr<expert_cache>(ram)](int layer, int role, int expert, size_t begin, size_t size,
                                                                     bool is_urgent, void * out) {
        const std::shared_ptr<expert_cache> live = weak.lock();
        return live ? live->copy_part(layer, role, expert, begin, size, is_urgent, out) : SOURCE_NOT_THERE;
    });
    return MOEEDGE_STATUS_OK;
}

// a part of one role of an expert, from its slot or else from the file
source_result expert_cache::copy_part(int layer, int role, int expert, size_t begin, size_t size, bool is_urgent, void * out) {
    if (is_foreign()) {
        return SOURCE_NOT_THERE;
    }
    int32_t slot = not_resident;
    if (acquire(layer, &expert, 1, &slot) == 0) {
        const int priority = is_urgent ? residency_table::demand_priority : upload_priority;
        return core->loader->read_part(layer, role, expert, begin, size, priority, (char *) out);
    }
    const size_t each = core->layout.slices[layer][role].bytes;
    std::memcpy(out, (const char *) core->pools->tensor(group_of(layer), role)->data + (size_t) slot * each + begin, size);
    release(layer, &slot, 1);
    return SOURCE_READ;
}

int expert_cache::set_read_faults(int kind, int every, double delay_s) {
    if (!core->loader) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    core->loader->reader.faults.set(kind, every, delay_s);
    return MOEEDGE_STATUS_OK;
}

int expert_cache::get_reader(moeedge_reader_info & out) {
    if (!core->loader) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    const direct_reader & reader = core->loader->reader;
    out                          = {};
    out.n_threads                = reader.n_threads();
    out.is_direct                = reader.is_direct();
    out.piece_bytes              = (int64_t) reader.piece_bytes();
    out.bytes_read               = reader.bytes_read();
    out.retries                  = reader.retries();
    std::snprintf(out.error, sizeof(out.error), "%s", core->loader->error().c_str());
    return MOEEDGE_STATUS_OK;
}

void expert_cache::get_info(moeedge_cache_info & out) const {
    const expert_uploader * streaming = core->streaming.get();
    out                               = {};
    out.n_groups                      = (int32_t) core->layout.groups.size();
    out.n_layers                      = core->layout.n_layers;
    out.n_experts                     = core->layout.n_experts;
    out.n_stage                       = n_stage;
    const std::vector<int> limits     = core->table->limits();
    out.slots_wanted                  = core->slots_wanted;
    out.pool_bytes                    = core->pools->bytes();
    for (int g = 0; g < out.n_groups; g++) {
        out.n_slots += limits[g];
        out.pool_bytes -= (int64_t) core->layout.groups[g].expert_bytes * (core->pools->capacity(g) - limits[g]);
    }
    out.staging_bytes = (int64_t) (core->moving->staging_bytes() + (streaming ? streaming->staging_bytes() : 0));
    out.pinned_bytes  = core->source.pinned_bytes();
    out.unpinned      = core->moving->is_unpinned() || (streaming && streaming->is_unpinned());
    out.is_host       = device().is_host;
    out.lost          = is_lost();
    std::snprintf(out.device, sizeof(out.device), "%s", device().name.c_str());
    std::snprintf(out.description, sizeof(out.description), "%s", device().description.c_str());
}

void expert_cache::get_groups(int32_t * layer_group, int32_t * capacity, int64_t * expert_bytes) const {
    const expert_layout & layout = core->layout;
    std::copy(layout.group_of.begin(), layout.group_of.end(), layer_group);
    const std::vector<int> limits = core->table->limits();
    for (size_t g = 0; g < layout.groups.size(); g++) {
        capacity[g]     = limits[g];
        expert_bytes[g] = (int64_t) layout.groups[g].expert_bytes;
    }
}

void expert_cache::get_stats(moeedge_cache_stats & out) {
    out = records.stats();
    core->table->add_stats(out);
    out.lost = is_lost();
}

int expert_cache::limit(int n_slots) {
    if (!core->loader || n_slots < 0) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return core->table->limit(n_slots);
}

int expert_cache::read(int layer, int expert, const char * role, void * out, int64_t size) {
    const int group = group_of(layer);
    const int index = group < 0 ? -1 : core->layout.role_index(group, role);
    if (index < 0 || size != (int64_t) core->layout.slices[layer][index].bytes) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    ggml_tensor * pool = core->pools->tensor(group, index);
    // a remote device's thread may be abandoned: it owns the memory that it writes. Allocated before the slot is pinned
    const auto    bytes = std::make_shared<std::vector<char>>(device().is_remote() ? size : 0);
    int32_t       slot  = not_resident;
    if (acquire(layer, &expert, 1, &slot) == 0) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    const size_t offset  = (size_t) slot * (size_t) size;
    bool         is_read = true;
    if (device().is_remote()) {
        is_read = run_on_device([kept = core, bytes, pool, offset] {
            ggml_backend_tensor_get(pool, bytes->data(), offset, bytes->size());
        });
        std::copy(bytes->begin(), is_read ? bytes->end() : bytes->begin(), (char *) out);
    } else {
        ggml_backend_tensor_get(pool, out, offset, (size_t) size);
    }
    release(layer, &slot, 1);
    return is_read ? MOEEDGE_STATUS_OK : MOEEDGE_STATUS_DEVICE_LOST;
}

} // namespace moeedge
