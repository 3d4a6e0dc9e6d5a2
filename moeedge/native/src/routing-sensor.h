// Routing sensor: counts expert activations and keeps the routing of the last graphs of one llama.cpp context.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moeedge.h"

struct ggml_tensor;

namespace moeedge {

struct sensor_shape {
    int n_layers;
    int n_experts;
    int n_used;       // experts per token
    int n_tokens_max; // per graph
};

class routing_sensor {
  public:
    // frames in the ring: a prompt batch of 2048 tokens is 4 graphs of 512, so two such batches fit
    static constexpr int n_frames = 8;

    explicit routing_sensor(const sensor_shape & shape);

    // ids [n_used, n_tokens] int32 and weights [1, n_used, n_tokens] float32 or nullptr, as the graph has them
    void observe(int layer, int phase, const ggml_tensor * ids, const ggml_tensor * weights);
    // the next block of any layer opens a new frame
    void end_frame();

    void read_counts(uint32_t * out);
    int  read_frames(int64_t after, moeedge_frame * out, int n_max) const;

  private:
    struct frame {
        int64_t              serial   = 0;
        int32_t              phase    = 0;
        int32_t              n_tokens = 0; // of its first layer: later layers have as many or fewer
        std::vector<int32_t> layer_tokens;
        // not value-initialised: pages that a short batch never touches are never mapped
        std::unique_ptr<int32_t[]> ids;
        std::unique_ptr<float[]>   weights;
    };

    frame & open_frame(int layer, int phase, int n_tokens);

    const sensor_shape    dims;
    std::vector<uint32_t> counts; // [n_layers, n_experts]
    frame                 ring[n_frames];
    int64_t               serial     = 0;
    int                   last_layer = -1; // of the open frame, -1: none is open
};

} // namespace moeedge
