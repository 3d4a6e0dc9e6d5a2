#include "prompt-attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "cache-device.h"
#include "fused-nodes.h"
#include "ggml-backend.h"
#include "kernel-choice.h"
#include "timing.h"

namespace moeedge {

static float parameter(const ggml_tensor * node, int i) {
    float value;
    std::memcpy(&value, (const float *) node->op_params + i, sizeof(value));
    return value;
}

static bool has_whole_rows(const ggml_tensor * t) {
    return t->nb[0] == ggml_type_size(t->type) && t->ne[3] == 1;
}

static bool fits(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !is_operation(node)) {
        return false;
    }
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3];
    const auto          has_width = [](const ggml_tensor * t) { return t->ne[0] % 16 == 0 && t->ne[0] <= n_attention_max; };
    // the parameters are the scale, ALiBi's slope and the cap of scores
    return parameter(node, 1) == 0 && parameter(node, 2) == 0 && q->type == GGML_TYPE_F32 && q->ne[1] >= n_attention_tokens &&
           (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_F32) && k->type == v->type && has_width(k) && has_width(v) &&
           k->ne[1] % n_attention_tokens == 0 && k->ne[2] == v->ne[2] && has_whole_rows(q) && has_whole_rows(k) && has_whole_rows(v) &&
           (mask == nullptr || (mask->type == GGML_TYPE_F16 && has_whole_rows(mask))) && ggml_is_contiguous(node);
}

void prompt_attention::compute(int, int) {
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3], * sinks = node->src[4];
    const int64_t       n_tokens = q->ne[1], n_heads = q->ne[2], n_shared = n_heads / k->ne[2];
    const int64_t       n_tiles  = (n_tokens + n_attention_tokens - 1) / n_attention_tokens; // of a head
    const auto          rows     = [](const ggml_tensor * t, int64_t head, int64_t first) {
        return attention_rows{ (const char *) t->data + head * (int64_t) t->nb[2] + first * (int64_t) t->nb[1], t->nb[1] };
    };
    for (int64_t i = next.fetch_add(1); i < n_tiles * n_heads; i = next.fetch_add(1)) {
        const int64_t  head  = i % n_heads;
        const int64_t  first = (n_tiles - 1 - i / n_heads) * n_attention_tokens; // those that see the most keys come first
        attention_tile tile  = {};
        tile.q               = rows(q, head, first);
        tile.k               = rows(k, head / n_shared, 0);
        tile.v               = rows(v, head / n_shared, 0);
        tile.mask            = mask ? rows(mask, head % mask->ne[2], first) : attention_rows{};
        tile.out             = { (const char *) node->data + (head + first * n_heads) * (int64_t) node->nb[1], (size_t) n_heads * node->nb[1] };
        tile.sink            = sinks ? (const float *) sinks->data + head : nullptr;
        tile.is_half         = k->type == GGML_TYPE_F16;
        tile.n_tokens        = (int) std::min((int64_t) n_attention_tokens, n_tokens - first);
        tile.n_key           = (int) k->ne[0];
        tile.n_value         = (int) v->ne[0];
        tile.n_kv            = k->ne[1];
        tile.scale           = parameter(node, 0);
        compute_tile(tile);
    }
}

// checks

template <typename T, void (*F)(T *)> struct freed_by {
    void operator()(T * t) const { F(t); }
};

// the attention of a check: two heads of one key head, a window of keys, rests of tiles
struct attention_case {
    static constexpr int64_t n_key = 128, n_tokens = 150, n_kv = 768, n_heads = 2, n_window = 500, n_timings = 3;

    std::unique_ptr<ggml_backend, freed_by<ggml_backend, ggml_backend_free>> cpu;
    std::unique_ptr<ggml_context, freed_by<ggml_context, ggml_free>>         ctx;
    ggml_tensor *                                                            node  = nullptr;
    ggml_cgraph *                                                            graph = nullptr;
    uint32_t                                                                 state = 1;

    attention_case() {
        ggml_backend_dev_t dev = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        cpu.reset(dev ? ggml_backend_dev_init(dev, nullptr) : nullptr);
        ctx.reset(ggml_init({ 4 << 20, nullptr, false }));
        if (!cpu || !ctx) {
            return;
        }
        set_n_threads(cpu.get(), 1);
        ggml_context * in    = ctx.get();
        ggml_tensor *  q     = ggml_new_tensor_3d(in, GGML_TYPE_F32, n_key, n_tokens, n_heads);
        ggml_tensor *  k     = ggml_new_tensor_3d(in, GGML_TYPE_F16, n_key, n_kv, 1);
        ggml_tensor *  v     = ggml_new_tensor_3d(in, GGML_TYPE_F16, n_key, n_kv, 1);
        ggml_tensor *  mask  = ggml_new_tensor_3d(in, GGML_TYPE_F16, n_kv, n_tokens, 1);
        ggml_tensor *  sinks = ggml_new_tensor_1d(in, GGML_TYPE_F32, n_heads);
        for (int64_t i = 0; i < ggml_nelements(q); i++) {
            ((float *) q->data)[i] = next_random() * 4;
        }
        for (int64_t i = 0; i < ggml_nelements(k); i++) {
            ((ggml_fp16_t *) k->data)[i] = ggml_fp32_to_fp16(next_random());
            ((ggml_fp16_t *) v->data)[i] = ggml_fp32_to_fp16(next_random());
        }
        for (int64_t i = 0; i < ggml_nelements(mask); i++) {
            const int64_t at                = i % n_kv - (n_kv - n_tokens) - i / n_kv; // of the key, 0: the token's own
            ((ggml_fp16_t *) mask->data)[i] = ggml_fp32_to_fp16(at <= 0 && at > -n_window ? 0 : -INFINITY);
        }
        ((float *) sinks->data)[0] = -2;
        ((float *) sinks->data)[1] = 40; // larger than all scores
        node                       = ggml_flash_attn_ext(in, q, k, v, mask, 0.3f, 0, 0);
        ggml_flash_attn_ext_add_sinks(node, sinks);
        graph = ggml_new_graph_custom(in, 8, false);
        ggml_build_forward_expand(graph, node);
    }

    float next_random() { // uniform in -1 to 1
        state = state * 1664525u + 1013904223u;
        return (float) (int32_t) state / 2147483648.0f;
    }

    bool compute_theirs() const { return graph && ggml_backend_graph_compute(cpu.get(), graph) == GGML_STATUS_SUCCESS; }

    bool is_equal(attention_function ours) const {
        if (!compute_theirs()) {
            return false;
        }
        const std::vector<char> theirs((const char *) node->data, (const char *) node->data + ggml_nbytes(node));
        std::memset(node->data, 0xff, theirs.size());
        prompt_attention(node, ours).compute(0, 1);
        return std::memcmp(theirs.data(), node->data, theirs.size()) == 0;
    }

    // ggml's time over ours
    double speed(attention_function ours) const {
        int64_t best_ns[2] = { std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::max() };
        for (int64_t i = 0; i < 2 * n_timings; i++) {
            const int64_t begin_ns = now_ns();
            i % 2 == 1 ? prompt_attention(node, ours).compute(0, 1) : (void) compute_theirs();
            best_ns[i % 2] = std::min(best_ns[i % 2], now_ns() - begin_ns);
        }
        return (double) best_ns[0] / (double) std::max(best_ns[1], (int64_t) 1);
    }
};

struct attention_check {
    std::once_flag once;
    double         speed = 0; // ggml's time over ours; 0: other bits
};

double attention_speed(size_t i) {
    static std::deque<attention_check> checks(runnable_sets().size());
    const attention_function           ours = runnable_sets()[i].attention;
    std::call_once(checks[i].once, [&] {
        const attention_case found;
        checks[i].speed = ours && found.is_equal(ours) ? found.speed(ours) : 0;
    });
    return checks[i].speed;
}

attention_function choose_attention(const ggml_tensor * node) {
    if (!may_replace() || !fits(node)) {
        return nullptr;
    }
    for (size_t i = 0; i < runnable_sets().size(); i++) {
        const dot_kernels & set = runnable_sets()[i];
        if (is_allowed(set.first[0].instructions) && attention_speed(i) > least_speed()) {
            return set.attention;
        }
    }
    return nullptr;
}

} // namespace moeedge
