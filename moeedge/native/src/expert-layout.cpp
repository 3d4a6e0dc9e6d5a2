#include "expert-layout.h"

#include <algorithm>
#include <cstring>

namespace moeedge {

struct named_slice {
    expert_role  role;
    expert_slice slice;
};

static const char matrix_suffix[] = ".weight";

// "ffn_up_exps.weight" of "blk.3.ffn_up_exps.weight"; empty if the name is not one of this layer
static std::string role_of(const moeedge_expert_tensor & tensor) {
    const std::string name(tensor.name, strnlen(tensor.name, sizeof(tensor.name)));
    const std::string prefix = "blk." + std::to_string(tensor.layer) + ".";
    return name.compare(0, prefix.size(), prefix) == 0 ? name.substr(prefix.size()) : std::string();
}

// why a tensor cannot be cached, null if it can
static const char * fault_of(const moeedge_expert_tensor & t, const moeedge_cache_config & config) {
    if (t.layer < 0 || t.layer >= config.n_layers || role_of(t).empty()) {
        return "its name and its layer do not agree";
    }
    if (t.n_experts != config.n_experts) {
        return "its number of experts is not the model's";
    }
    if (t.type < 0 || t.type >= GGML_TYPE_COUNT || ggml_type_size((ggml_type) t.type) == 0) {
        return "its type is unknown";
    }
    if (t.ne0 <= 0 || t.ne1 <= 0 || t.ne0 % ggml_blck_size((ggml_type) t.type) != 0) {
        return "its shape is not that of a table of experts";
    }
    const int64_t bytes = (int64_t) ggml_row_size((ggml_type) t.type, t.ne0) * t.ne1;
    if (t.file < 0 || t.file >= config.n_files || t.offset < 0 || t.stride < bytes) {
        return "its place in the file is invalid";
    }
    return nullptr;
}

static named_slice read_tensor(const moeedge_expert_tensor & t) {
    const ggml_type type  = (ggml_type) t.type;
    const size_t    bytes = ggml_row_size(type, t.ne0) * (size_t) t.ne1;
    return { { role_of(t), type, t.ne0, t.ne1, bytes }, { t.file, t.offset, t.stride, bytes } };
}

bool expert_role::is_matrix() const {
    const size_t n = sizeof(matrix_suffix) - 1;
    return name.size() > n && name.compare(name.size() - n, n, matrix_suffix) == 0;
}

bool expert_role::operator==(const expert_role & other) const {
    return name == other.name && type == other.type && ne0 == other.ne0 && ne1 == other.ne1;
}

static int group_with(std::vector<expert_group> & groups, const std::vector<expert_role> & roles) {
    for (size_t g = 0; g < groups.size(); g++) {
        if (groups[g].roles == roles) {
            return (int) g;
        }
    }
    groups.emplace_back();
    groups.back().roles = roles;
    groups.back().kind  = (int) groups.size() - 1;
    for (const expert_role & role : roles) {
        groups.back().expert_bytes += role.bytes;
    }
    return (int) groups.size() - 1;
}

bool expert_layout::read(const moeedge_cache_config & config, std::string & error) {
    n_layers  = config.n_layers;
    n_experts = config.n_experts;
    group_of.assign(n_layers, -1);
    slices.assign(n_layers, {});

    std::vector<std::vector<named_slice>> found(n_layers);
    for (int i = 0; i < config.n_tensors; i++) {
        const moeedge_expert_tensor & tensor = config.tensors[i];
        if (const char * fault = fault_of(tensor, config)) {
            error = "The expert tensor " + std::string(tensor.name, strnlen(tensor.name, sizeof(tensor.name))) +
                    " cannot be cached: " + fault + ".";
            return false;
        }
        found[tensor.layer].push_back(read_tensor(tensor));
    }
    for (int layer = 0; layer < n_layers; layer++) {
        std::vector<named_slice> & parts = found[layer];
        if (parts.empty()) {
            continue;
        }
        std::sort(parts.begin(), parts.end(),
                  [](const named_slice & a, const named_slice & b) { return a.role.name < b.role.name; });
        std::vector<expert_role> roles;
        for (const named_slice & part : parts) {
            roles.push_back(part.role);
            slices[layer].push_back(part.slice);
        }
        group_of[layer] = group_with(groups, roles);
        groups[group_of[layer]].n_layers++;
    }
    return true;
}

void expert_layout::cut(const std::function<int(const expert_group &)> & count_parts) {
    std::vector<expert_group> parts;
    std::vector<int>          part_of(group_of);
    for (size_t g = 0; g < groups.size(); g++) {
        const int first   = (int) parts.size();
        const int n_parts = count_parts(groups[g]);
        parts.insert(parts.end(), (size_t) n_parts, groups[g]);
        for (int i = 0; i < n_parts; i++) {
            parts[first + i].n_layers = 0;
        }
        int n_before = 0; // layers of this group
        for (int layer = 0; layer < n_layers; layer++) {
            if (group_of[layer] == (int) g) {
                part_of[layer] = first + (int) ((int64_t) n_before++ * n_parts / groups[g].n_layers);
                parts[part_of[layer]].n_layers++;
            }
        }
    }
    groups.swap(parts);
    group_of.swap(part_of);
}

int expert_layout::role_index(int group, const char * role) const {
    const std::vector<expert_role> & roles = groups[group].roles;
    for (size_t r = 0; r < roles.size(); r++) {
        if (roles[r].name == role) {
            return (int) r;
        }
    }
    return -1;
}

} // namespace moeedge
