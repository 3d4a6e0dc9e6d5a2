#include "sensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml.h"

namespace moeedge {

sensor::sensor(const sensor_shape & shape) : dims(shape), counts((size_t) shape.n_layers * shape.n_experts, 0) {
    const size_t n_pairs = (size_t) dims.n_layers * dims.n_tokens_max * dims.n_used;
    for (frame & f : ring) {
        f.layer_tokens.assign(dims.n_layers, 0);
        f.ids.reset(new int32_t[n_pairs]);
        f.weights.reset(new float[n_pairs]);
    }
}

void sensor::end_frame() {
    last_layer = -1;
}

sensor::frame & sensor::open_frame(int layer, int phase, int n_tokens) {
    // layers come in ascending order within a graph, so an earlier or equal one belongs to the next graph
    if (last_layer < 0 || layer <= last_layer) {
        serial++;
        frame & f  = ring[serial % n_frames];
        f.serial   = serial;
        f.phase    = phase != MOEEDGE_PHASE_AUTO ? phase : n_tokens > 1 ? MOEEDGE_PHASE_PREFILL : MOEEDGE_PHASE_DECODE;
        f.n_tokens = 0;
        std::fill(f.layer_tokens.begin(), f.layer_tokens.end(), 0);
    }
    last_layer = layer;
    frame & f  = ring[serial % n_frames];
    f.n_tokens = std::max(f.n_tokens, n_tokens);
    return f;
}

void sensor::observe(int layer, int phase, const ggml_tensor * ids, const ggml_tensor * weights) {
    if (layer < 0 || layer >= dims.n_layers) {
        return;
    }
    const int n_tokens = (int) std::min<int64_t>(ids->ne[1], dims.n_tokens_max);
    const int n_ids    = (int) std::min<int64_t>(ids->ne[0], dims.n_used);

    frame &    f      = open_frame(layer, phase, n_tokens);
    uint32_t * count  = counts.data() + (size_t) layer * dims.n_experts;
    f.layer_tokens[layer] = n_tokens;

    for (int t = 0; t < n_tokens; t++) {
        const size_t row     = ((size_t) layer * dims.n_tokens_max + t) * dims.n_used;
        int32_t *    out_ids = f.ids.get() + row;
        float *      out_w   = f.weights.get() + row;
        const char * in_ids  = (const char *) ids->data + t * ids->nb[1];
        for (int i = 0; i < dims.n_used; i++) {
            if (i >= n_ids) {
                out_ids[i] = -1;
                out_w[i]   = 0.0f;
                continue;
            }
            int32_t id;
            std::memcpy(&id, in_ids + i * ids->nb[0], sizeof(id));
            out_ids[i] = id;
            if (id >= 0 && id < dims.n_experts) {
                count[id]++;
            }
            out_w[i] = NAN;
            if (weights) {
                std::memcpy(&out_w[i], (const char *) weights->data + i * weights->nb[1] + t * weights->nb[2],
                            sizeof(float));
            }
        }
    }
}

void sensor::read_counts(uint32_t * out) {
    std::memcpy(out, counts.data(), counts.size() * sizeof(uint32_t));
    std::fill(counts.begin(), counts.end(), 0);
}

int sensor::read_frames(int64_t after, moeedge_frame * out, int n_max) const {
    const int64_t oldest = std::max<int64_t>(serial - n_frames + 1, 1);
    int           n      = 0;
    for (int64_t s = std::max(after + 1, oldest); s <= serial && n < n_max; s++) {
        const frame & f = ring[s % n_frames];
        out[n++]        = { f.serial,          f.phase,     f.n_tokens, f.layer_tokens.data(),
                            f.ids.get(), f.weights.get() };
    }
    return n;
}

} // namespace moeedge
