#include "expert-loader.h"

#include <algorithm>
#include <exception>
#include <future>
#include <memory>

namespace moeedge {

expert_loader::expert_loader(const expert_layout & of, const slot_pools & to, double bytes_per_s)
    : reader(bytes_per_s), layout(of), pools(to), requests((size_t) of.n_layers * of.n_experts, 0) {}

bool expert_loader::open(const moeedge_cache_config & config, std::string & error) {
    return reader.open(config.files, config.n_files, config.disk_buffered != 0, error);
}

void expert_loader::load(int layer, int expert, int slot, int priority, end_call ended) {
    const int               group = layout.group_of[layer];
    std::vector<read_range> ranges;
    for (size_t r = 0; r < layout.slices[layer].size(); r++) {
        const expert_slice & slice = layout.slices[layer][r];
        ggml_tensor *        pool  = pools.tensor(group, (int) r);
        ranges.push_back({ slice.file, slice.of(expert), slice.bytes, (char *) pool->data + slot * slice.bytes });
    }
    const auto at_end = [this, layer, expert, call = std::move(ended)](const read_end & end) {
        if (end.result == READ_FAILED) {
            note_failure(layer, expert, end);
        }
        call(end.result == READ_DONE);
    };
    requests[(size_t) layer * layout.n_experts + expert] = reader.enqueue(std::move(ranges), priority, at_end);
}

void expert_loader::hasten(int layer, int expert, int priority) {
    reader.raise(requests[(size_t) layer * layout.n_experts + expert], priority);
}

source_result expert_loader::read_part(int layer, int role, int expert, size_t begin, size_t size, int priority, char * out) {
    const expert_slice &    slice = layout.slices[layer][role];
    std::vector<read_range> range = { { slice.file, slice.of(expert) + (int64_t) begin, size, out } };
    auto                    ended = std::make_shared<std::promise<read_end>>(); // it may be set while the waiting thread goes on
    std::future<read_end>   end   = ended->get_future();
    try {
        reader.enqueue(std::move(range), priority, [ended](const read_end & how) { ended->set_value(how); });
    } catch (const std::exception &) { // no resources for a thread that reads
        return SOURCE_FAILED;
    }
    switch (end.get().result) {
        case READ_DONE:      return SOURCE_READ;
        case READ_CANCELLED: return SOURCE_NOT_THERE;
        default:             return SOURCE_FAILED;
    }
}

void expert_loader::end() {
    reader.cancel_all();
    reader.wait_idle();
}

int expert_loader::loads_ahead() const {
    size_t smallest = SIZE_MAX;
    for (const expert_group & group : layout.groups) {
        smallest = std::min(smallest, group.expert_bytes);
    }
    const size_t under_way = (size_t) reader.n_threads() * reader.piece_bytes();
    return 1 + (int) std::min<size_t>(2 * under_way / smallest + 1, 64);
}

void expert_loader::note_failure(int layer, int expert, const read_end & end) {
    const std::string what = reader.describe(end);
    std::lock_guard<std::mutex> lock(mutex);
    failure = "Expert " + std::to_string(expert) + " of layer " + std::to_string(layer) + " could not be loaded: " + what + ".";
}

std::string expert_loader::error() const {
    std::lock_guard<std::mutex> lock(mutex);
    return failure;
}

} // namespace moeedge
