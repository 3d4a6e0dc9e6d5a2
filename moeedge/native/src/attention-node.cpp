#include "attention-node.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <new>

#include "cache-device.h"
#include "fused-nodes.h"
#include "kernel-checks.h"
#include "kernel-choice.h"

namespace moeedge {

static float parameter(const ggml_tensor * node, int i) {
    float value;
    std::memcpy(&value, (const float *) node->op_params + i, sizeof(value));
    return value;
}

static bool has_whole_rows(const ggml_tensor * t) {
    return t->nb[0] == ggml_type_size(t->type) && t->ne[3] == 1;
}

// what both ways have in common: the parameters are the scale, ALiBi's slope and the cap of scores
static bool is_usual(const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !is_operation(node)) {
        return false;
    }
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3];
    return parameter(node, 1) == 0 && parameter(node, 2) == 0 && q->type == GGML_TYPE_F32 && k->type == v->type && k->ne[2] == v->ne[2] &&
           k->ne[0] <= n_attention_max && v->ne[0] <= n_attention_max && has_whole_rows(q) && has_whole_rows(k) && has_whole_rows(v) &&
           (mask == nullptr || (mask->type == GGML_TYPE_F16 && has_whole_rows(mask))) && ggml_is_contiguous(node);
}

static bool has_multiples_of(const ggml_tensor * node, int64_t n) {
    return node->src[1]->ne[0] % n == 0 && node->src[2]->ne[0] % n == 0;
}

static bool is_prompt(const ggml_tensor * node) {
    return node->src[0]->ne[1] >= n_attention_tokens;
}

static bool fits_prompt(const ggml_tensor * node) {
    const ggml_tensor * k = node->src[1];
    return (k->type == GGML_TYPE_F16 || k->type == GGML_TYPE_F32) && k->ne[1] % n_attention_tokens == 0 && has_multiples_of(node, 16);
}

// one token's keys are split between the threads
static bool is_split(const ggml_tensor * node) {
    return node->src[0]->ne[1] == 1 && node->src[1]->ne[1] >= 512;
}

static bool fits_few(const ggml_tensor * node, int n_threads) {
    return node->src[1]->type == GGML_TYPE_F16 && has_multiples_of(node, 64) && (n_threads > 0 || !is_split(node));
}

static int64_t part_floats(const ggml_tensor * node) {
    return 2 + node->src[2]->ne[0];
}

static attention_rows rows_of(const ggml_tensor * t, int64_t head, int64_t first) {
    return { (const char *) t->data + head * (int64_t) t->nb[2] + first * (int64_t) t->nb[1], t->nb[1] };
}

// of a token's head
static char * output_of(const ggml_tensor * node, int64_t head, int64_t token) {
    return (char *) node->data + (head + token * node->src[0]->ne[2]) * (int64_t) node->nb[1];
}

attention_node::attention_node(const ggml_tensor * of, const attention_kernels & with, std::vector<float> & all_parts, int n_threads) :
    node(of), kernels(with), parts(all_parts) {
    if (is_split(node)) {
        const int64_t n_heads = node->src[0]->ne[2];
        parts.resize(std::max(parts.size(), (size_t) (n_heads * n_threads * part_floats(node))));
        n_done.resize((size_t) n_heads); // no more pieces of rows
    }
}

void attention_node::compute_tiles() {
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3], * sinks = node->src[4];
    const int64_t       n_tokens = q->ne[1], n_heads = q->ne[2], n_shared = n_heads / k->ne[2];
    const int64_t       n_tiles  = (n_tokens + n_attention_tokens - 1) / n_attention_tokens; // of a head
    for (int64_t i = next.fetch_add(1); i < n_tiles * n_heads; i = next.fetch_add(1)) {
        const int64_t  head  = i % n_heads;
        const int64_t  first = (n_tiles - 1 - i / n_heads) * n_attention_tokens; // those that see the most keys come first
        attention_tile tile  = {};
        tile.q               = rows_of(q, head, first);
        tile.k               = rows_of(k, head / n_shared, 0);
        tile.v               = rows_of(v, head / n_shared, 0);
        tile.mask            = mask ? rows_of(mask, head % mask->ne[2], first) : attention_rows{};
        tile.out             = { output_of(node, head, first), (size_t) n_heads * node->nb[1] };
        tile.sink            = sinks ? (const float *) sinks->data + head : nullptr;
        tile.is_half         = k->type == GGML_TYPE_F16;
        tile.n_tokens        = (int) std::min((int64_t) n_attention_tokens, n_tokens - first);
        tile.n_key           = (int) k->ne[0];
        tile.n_value         = (int) v->ne[0];
        tile.n_kv            = k->ne[1];
        tile.scale           = parameter(node, 0);
        kernels.tile(tile);
    }
}

void attention_node::compute_few(int nth) {
    const ggml_tensor * q = node->src[0], * k = node->src[1], * v = node->src[2], * mask = node->src[3], * sinks = node->src[4];
    const int64_t       n_kv = k->ne[1], n_key_heads = k->ne[2], n_shared = q->ne[2] / n_key_heads;
    const int64_t       n_rows   = n_shared * q->ne[1]; // of a key head
    const int64_t       n_parts  = n_done.empty() ? 1 : nth, n_part_keys = (n_kv + n_parts - 1) / n_parts;
    const int64_t       n_even   = n_rows * n_key_heads / (4 * nth); // so that threads end at about the same time
    const int64_t       n_wanted = n_parts > 1 ? n_rows : std::max(n_even, (int64_t) 8);
    const int64_t       n_taken  = std::min(std::min(n_wanted, n_rows), (int64_t) n_attention_rows);
    const int64_t       n_groups = (n_rows + n_taken - 1) / n_taken; // of a key head's rows
    for (int64_t i = next.fetch_add(1); i < n_key_heads * n_groups * n_parts; i = next.fetch_add(1)) {
        const int64_t part = i % n_parts, group = i / n_parts % n_groups, key_head = i / n_parts / n_groups;
        const int64_t first = group * n_taken;
        few_attention task  = {};
        task.k              = rows_of(k, key_head, 0);
        task.v              = rows_of(v, key_head, 0);
        task.begin          = part * n_part_keys;
        task.end            = std::min(task.begin + n_part_keys, n_kv);
        task.n_rows         = (int) std::min(n_taken, n_rows - first);
        task.n_key          = (int) k->ne[0];
        task.n_value        = (int) v->ne[0];
        task.scale          = parameter(node, 0);
        task.is_part        = !n_done.empty();
        const auto part_of  = [&](int64_t head, int64_t p) { return parts.data() + (head * n_parts + p) * part_floats(node); };
        for (int r = 0; r < task.n_rows; r++) {
            const int64_t token = (first + r) / n_shared, head = key_head * n_shared + (first + r) % n_shared;
            task.q[r]           = (const float *) rows_of(q, head, token).first;
            task.mask[r]        = mask ? (const uint16_t *) rows_of(mask, head % mask->ne[2], token).first : nullptr;
            task.sink[r]        = sinks && part == 0 ? (const float *) sinks->data + head : nullptr;
            task.out[r]         = task.is_part ? part_of(head, part) : (float *) output_of(node, head, token);
        }
        kernels.few(task);
        if (task.is_part && n_done[(size_t) (key_head * n_groups + group)].fetch_add(1) == n_parts - 1) {
            for (int r = 0; r < task.n_rows; r++) {
                const int64_t head = key_head * n_shared + first + r;
                kernels.merge({ part_of(head, 0), (int) n_parts, task.n_value, (float *) output_of(node, head, 0) });
            }
        }
    }
}

static std::atomic<int64_t> n_computed{ 0 };

void attention_node::compute(int ith, int nth) {
    n_computed.fetch_add(ith == 0);
    is_prompt(node) ? compute_tiles() : compute_few(nth);
}

// checks

// a batch of a check: heads that share keys, a window of them, some masks that are neither 0 nor infinite, sinks about the largest scores
struct attention_case : kernel_case {
    static constexpr int64_t n_key = 128, n_heads = 4;

    ggml_context_ptr   ctx;
    std::vector<float> parts;
    const int          n_threads;

    attention_case(int64_t n_tokens, int64_t n_kv, int threads = 1, ggml_type type = GGML_TYPE_F16, bool has_mask = true, int64_t n_value = 128) :
        kernel_case(threads), ctx(ggml_init({ 4 << 20, nullptr, false })), n_threads(threads) {
        ggml_context * in    = ctx.get();
        ggml_tensor *  q     = ggml_new_tensor_3d(in, GGML_TYPE_F32, n_key, n_tokens, n_heads);
        ggml_tensor *  k     = ggml_new_tensor_3d(in, type, n_key, n_kv, 1);
        ggml_tensor *  v     = ggml_new_tensor_3d(in, type, n_value, n_kv, 1);
        ggml_tensor *  mask  = ggml_new_tensor_3d(in, GGML_TYPE_F16, n_kv, n_tokens, 1);
        ggml_tensor *  sinks = ggml_new_tensor_1d(in, GGML_TYPE_F32, n_heads);
        fill(q, 4);
        fill(k, 1);
        fill(v, 1);
        for (int64_t i = 0; i < ggml_nelements(mask); i++) {
            const int64_t at                = i % n_kv - (n_kv - n_tokens) - i / n_kv; // of the key, 0: the token's own
            const float   seen              = i % 7 == 0 ? -1.3f : 0;
            ((ggml_fp16_t *) mask->data)[i] = ggml_fp32_to_fp16(at <= 0 && at > -n_kv * 2 / 3 ? seen : -INFINITY);
        }
        for (int64_t i = 0; i < n_heads; i++) {
            ((float *) sinks->data)[i] = 9 + 3 * (float) i;
        }
        node = ggml_flash_attn_ext(in, q, k, v, has_mask ? mask : nullptr, 0.3f, 0, 0);
        ggml_flash_attn_ext_add_sinks(node, sinks);
        graph = ggml_new_graph_custom(in, 8, false);
        ggml_build_forward_expand(graph, node);
    }

    void fill(ggml_tensor * t, float size) { // uniform in -size to size
        for (int64_t i = 0; i < ggml_nelements(t); i++) {
            const float value = size * random.next();
            t->type == GGML_TYPE_F16 ? (void) (((ggml_fp16_t *) t->data)[i] = ggml_fp32_to_fp16(value)) : (void) (((float *) t->data)[i] = value);
        }
    }

    ggml_status compute(const attention_kernels & ours) {
        attention_node(node, ours, parts, n_threads).compute(0, n_threads);
        return GGML_STATUS_SUCCESS;
    }

    bool is_equal(const attention_kernels & ours) {
        return is_equal_to([&] { return compute(ours); });
    }

    // ggml's time over ours; 0: other bits
    double checked_speed(const attention_kernels & ours) {
        return is_equal(ours) ? speed_of(3, [] {}, [&] { run_theirs(); }, [&] { compute(ours); }) : 0;
    }
};

// the cases are those where ggml changes its way, too
static double prompt_speed(const attention_kernels & ours) {
    const bool has_bits = attention_case(64, 256).is_equal(ours) && attention_case(64, 128, 1, GGML_TYPE_F32, false).is_equal(ours);
    return has_bits ? attention_case(130, 256).checked_speed(ours) : 0;
}

static double few_speed(const attention_kernels & ours) {
    bool has_bits = attention_case(63, 192).is_equal(ours) && attention_case(3, 200, 1, GGML_TYPE_F16, false).is_equal(ours) &&
                    attention_case(3, 200, 1, GGML_TYPE_F16, true, 192).is_equal(ours);
    for (const int64_t n_kv : { 511, 512, 768 }) { // of one token two threads take a part each
        has_bits = has_bits && attention_case(1, n_kv, 2).is_equal(ours);
    }
    return has_bits ? std::min(attention_case(9, 192).checked_speed(ours), attention_case(1, 768).checked_speed(ours)) : 0;
}

double attention_speed(size_t i, bool of_prompt) {
    struct check {
        std::once_flag once;
        double         speed = 0;
    };
    static std::deque<std::array<check, 2>> checks(runnable_sets().size());
    check &                                 found = checks[i][of_prompt];
    const attention_kernels &               ours  = runnable_sets()[i].attention;
    std::call_once(found.once, [&] { found.speed = of_prompt ? (ours.tile ? prompt_speed(ours) : 0) : ours.few ? few_speed(ours) : 0; });
    return found.speed;
}

attention_kernels choose_attention(const ggml_tensor * node, int n_threads) {
    if (!may_replace() || !is_usual(node) || !(is_prompt(node) ? fits_prompt(node) : fits_few(node, n_threads))) {
        return {};
    }
    for (size_t i = 0; i < runnable_sets().size(); i++) {
        const dot_kernels & set = runnable_sets()[i];
        if (is_allowed(set.first[0].instructions) && attention_speed(i, is_prompt(node)) > least_speed()) {
            return set.attention;
        }
    }
    return {};
}

} // namespace moeedge

int64_t moeedge_attention_count(void) {
    return moeedge::n_computed.load();
}
