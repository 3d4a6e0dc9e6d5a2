#include "routing-sensor.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml.h"

namespace moeedge {

static constexpr int n_rows_ahead = 16; // enough to hide a cache miss during the copies of 16 rows

// copies n values of 4 bytes that are `stride` bytes apart
template <typename T> static void copy_row(T * out, const char * in, size_t stride, int n) {
    static_assert(sizeof(T) == 4, "ids and weights have 4 bytes");
    if (stride == sizeof(T)) {
        std::memcpy(out, in, n * sizeof(T));
        return;
    }
    for (int i = 0; i < n; i++) {
        std::memcpy(&out[i], in + i * stride, sizeof(T));
    }
}

routing_sensor::routing_sensor(const sensor_shape & shape) : dims(shape), counts((size_t) shape.n_layers * shape.n_experts, 0) {
    const size_t n_pairs = (size_t) dims.n_layers * dims.n_tokens_max * dims.n_used;
    for (frame & f : ring) {
        f.layer_tokens.assign(dims.n_layers, 0);
        f.ids.reset(new int32_t[n_pairs]);
        f.weights.reset(new float[n_pairs]);
    }
}

void routing_sensor::end_frame() {
    last_layer = -1;
}

routing_sensor::frame & routing_sensor::open_frame(int layer, int phase, int n_tokens) {
    // layers come in ascending order within a graph, so an earlier or equal one belongs to the next graph
    if (last_layer < 0 || layer <= last_layer) {
        serial++;
        frame & f  = ring[serial % n_frames];
        f.serial   = serial;
        f.phase    = phase != MOEEDGE_PHASE_AUTO ? phase : n_tokens > 1 ? MOEEDGE_PHASE_PREFILL : MOEEDGE_PHASE_DECODE;
        f.n_tokens = n_tokens;
        std::fill(f.layer_tokens.begin(), f.layer_tokens.end(), 0);
    }
    last_layer = layer;
    return ring[serial % n_frames];
}

void routing_sensor::observe(int layer, int phase, const ggml_tensor * ids, const ggml_tensor * weights) {
    if (layer < 0 || layer >= dims.n_layers) {
        return;
    }
    frame &    f        = open_frame(layer, phase, (int) std::min<int64_t>(ids->ne[1], dims.n_tokens_max));
    const int  n_tokens = (int) std::min<int64_t>(ids->ne[1], f.n_tokens);
    const int  n_ids    = (int) std::min<int64_t>(ids->ne[0], dims.n_used);
    uint32_t * count    = counts.data() + (size_t) layer * dims.n_experts;
    f.layer_tokens[layer] = n_tokens;

    for (int t = 0; t < n_tokens; t++) {
        const size_t row     = ((size_t) layer * f.n_tokens + t) * dims.n_used;
        int32_t *    out_ids = f.ids.get() + row;
        float *      out_w   = f.weights.get() + row;
        // rows of ids are a row of all experts apart, and have left the processor's caches
        if (t + n_rows_ahead < n_tokens) {
            __builtin_prefetch((const char *) ids->data + (t + n_rows_ahead) * ids->nb[1]);
        }
        copy_row(out_ids, (const char *) ids->data + t * ids->nb[1], ids->nb[0], n_ids);
        for (int i = 0; i < n_ids; i++) {
            if ((uint32_t) out_ids[i] < (uint32_t) dims.n_experts) {
                count[out_ids[i]]++;
            }
        }
        if (weights) {
            copy_row(out_w, (const char *) weights->data + t * weights->nb[2], weights->nb[1], n_ids);
        } else {
            std::fill(out_w, out_w + n_ids, NAN);
        }
        std::fill(out_ids + n_ids, out_ids + dims.n_used, -1);
        std::fill(out_w + n_ids, out_w + dims.n_used, 0.0f);
    }
}

void routing_sensor::read_counts(uint32_t * out) {
    std::memcpy(out, counts.data(), counts.size() * sizeof(uint32_t));
    std::fill(counts.begin(), counts.end(), 0);
}

int routing_sensor::read_frames(int64_t after, moeedge_frame * out, int n_max) const {
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
