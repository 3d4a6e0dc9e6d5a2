// Expert layout: which tensors make up an expert of each layer, which layers form a group, and where the bytes are in the
// files.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ggml.h"
#include "moeedge-cache.h"

namespace moeedge {

// one tensor of an expert
struct expert_role {
    std::string name; // "ffn_up_exps.weight"
    ggml_type   type;
    int64_t     ne0, ne1; // ne1 = 1 for biases and scales
    size_t      bytes;    // of one expert

    bool is_matrix() const; // its table has three dimensions
    bool operator==(const expert_role & other) const;
};

// layers whose experts have the same tensors, or a part of those layers where one pool cannot hold slots for all of them
struct expert_group {
    std::vector<expert_role> roles; // by name
    int                      n_layers     = 0;
    size_t                   expert_bytes = 0;
    int                      kind         = 0; // groups of one kind have the same roles
};

// where a role of a layer is stored
struct expert_slice {
    int     file;
    int64_t offset; // of expert 0
    int64_t stride; // from one expert to the next
    size_t  bytes;  // of one expert

    int64_t of(int expert) const { return offset + expert * stride; }
};

struct expert_layout {
    int                                    n_layers  = 0;
    int                                    n_experts = 0;
    std::vector<expert_group>              groups;
    std::vector<int>                       group_of; // [n_layers], -1: no experts
    std::vector<std::vector<expert_slice>> slices;   // [n_layers][roles of the layer's group]

    // false with the reason in `error` if the configuration contradicts itself
    bool read(const moeedge_cache_config & config, std::string & error);
    // cuts each group into as many runs of layers as `count_parts` says; before the groups are used
    void cut(const std::function<int(const expert_group &)> & count_parts);

    int role_index(int group, const char * role) const; // -1: none
};

} // namespace moeedge
