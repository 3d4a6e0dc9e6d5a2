#include "kernel-choice.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <mutex>
#include <vector>

#include <dlfcn.h>
#if defined(__x86_64__)
#    include <emmintrin.h>
#endif

#include "attention-node.h"
#include "c-calls.h"
#include "cache-device.h"
#include "expert-matmuls.h"
#include "ggml-alloc.h"
#include "ggml-cpu.h"
#include "kernel-checks.h"

namespace moeedge {

// the matmul of a check
static constexpr int64_t n_in = 2304, n_rows = 256, n_experts = 2; // more values than kernels take of a row at once
static constexpr int64_t n_tall_rows = 768; // of the dense matrix whose one column is timed: what a matmul costs once is small next to its rows
static constexpr int64_t n_distinct_rows = 16; // the others repeat them: some types are quantized slowly
static constexpr int     n_timings       = 7;
static constexpr int64_t n_timed_columns = 16, n_timed_dense_columns = 32;

static const char repacked_name[] = "CPU_REPACK";

static std::atomic<int> choice{ MOEEDGE_KERNEL_CHOICE_MEASURED };

// a kernel's check
struct kernel_check {
    std::once_flag once;
    moeedge_kernel found = {};
    dots_function  many_dots = nullptr; // with ggml's bits for experts with many columns; null: neither of the kernel's has them
};

// whether a matrix is in this layout: ggml has one for its shape
static bool is_repacked(const ggml_tensor * matrix) {
    return matrix->extra && std::strcmp(ggml_backend_buft_name(ggml_backend_buffer_get_type(matrix->buffer)), repacked_name) == 0;
}

ggml_from_float_t quantizer(ggml_type type) {
    // in the library of the CPU backend, which ours is linked to by way of others
    using get_traits    = const ggml_type_traits_cpu * (*) (ggml_type);
    static const auto f = (get_traits) dlsym(RTLD_DEFAULT, "ggml_get_type_traits_cpu");
    return f ? f(type)->from_float : nullptr;
}

static std::vector<const dot_kernel *> find_runnable_kernels() {
    std::vector<const dot_kernel *> found;
    for (const dot_kernels & kernels : runnable_sets()) {
        for (int i = 0; quantizer(GGML_TYPE_Q8_0) != nullptr && i < kernels.n; i++) {
            found.push_back(&kernels.first[i]);
        }
    }
    return found;
}

static const std::vector<const dot_kernel *> & runnable_kernels() {
    static const std::vector<const dot_kernel *> found = find_runnable_kernels();
    return found;
}

// the experts of a model come from memory rather than from a cache
static void drop_from_caches(const void * memory, size_t size) {
#if defined(__x86_64__)
    constexpr size_t line_bytes = 64;
    for (size_t at = 0; at < size; at += line_bytes) {
        _mm_clflush((const char *) memory + at);
    }
    _mm_mfence();
#else
    GGML_UNUSED(memory);
    GGML_UNUSED(size);
#endif
}

// Drops ggml's log while it lives: ggml tells of every tensor that it repacks.
class quiet_log : no_copy {
  public:
    quiet_log() : lock(one_at_a_time) {
        ggml_log_get(&callback, &data);
        ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    }
    ~quiet_log() { ggml_log_set(callback, data); }

  private:
    inline static std::mutex    one_at_a_time;  // two would restore each other's callbacks
    std::lock_guard<std::mutex> lock;
    ggml_log_callback           callback = nullptr;
    void *                      data     = nullptr;
};

// what a batch is multiplied with
enum check_matrix { EXPERTS, DENSE, TALL };

// MUL_MAT_ID of some tokens that use both experts, on one thread of a CPU backend of its own
class check_case : kernel_case {
  public:
    explicit check_case(const dot_kernel & dots) : kernel_case(1), kernel(dots) {
        if (!cpu) {
            return;
        }
        matrix_ctx.reset(ggml_init({ 4 * ggml_tensor_overhead(), nullptr, true }));
        ggml_backend_buffer_type_t buft = kernel.is_repacked ? extra_buffer_type(ggml_backend_get_device(cpu.get()), repacked_name) : ggml_backend_cpu_buffer_type();
        if (!matrix_ctx || buft == nullptr) {
            return;
        }
        matrices[EXPERTS] = ggml_new_tensor_3d(matrix_ctx.get(), kernel.type, n_in, n_rows, n_experts);
        matrices[DENSE]   = ggml_new_tensor_2d(matrix_ctx.get(), kernel.type, n_in, n_rows);
        matrices[TALL]    = ggml_new_tensor_2d(matrix_ctx.get(), kernel.type, n_in, n_tall_rows);
        matrix_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(matrix_ctx.get(), buft));
        if (matrix_buffer && is_repacked(matrices[EXPERTS]) == kernel.is_repacked) {
            fill_matrices();
            is_complete = true;
        }
    }

    // the batch of the next runs; false: out of memory
    bool set_batch(int64_t n_tokens, check_matrix with = EXPERTS) {
        matrix = matrices[with];
        buffer.reset();
        ctx.reset(ggml_init({ 16 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false), nullptr, true }));
        if (!ctx) {
            return false;
        }
        if (with != EXPERTS) {
            x   = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, n_in, n_tokens);
            ids = nullptr;
            node = ggml_mul_mat(ctx.get(), matrix, x);
        } else {
            x   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, n_in, 1, n_tokens);
            ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_experts, n_tokens);
            node = ggml_mul_mat_id(ctx.get(), matrix, x, ids);
        }
        graph = ggml_new_graph_custom(ctx.get(), 8, false);
        ggml_build_forward_expand(graph, node);
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
        if (!buffer) {
            return false;
        }
        fill_batch();
        return true;
    }

    // false: it cannot be set up, or ggml has no such layout here
    bool is_ready() const { return is_complete; }

    bool is_equal(dots_function dots) {
        return is_equal_to([&] { return compute(dots); });
    }

    // ggml's time over ours, with rows from memory
    double speed(dots_function dots) {
        return speed_of(n_timings, [&] { drop_from_caches(matrix->data, ggml_nbytes(matrix)); }, [&] { run_theirs(); },
                        [&] { run([&] { return compute(dots); }); });
    }

  private:
    void fill_matrices() {
        std::vector<float> values((size_t) (n_distinct_rows * n_in));
        for (float & value : values) {
            value = random.next();
        }
        const size_t      row_bytes = matrices[EXPERTS]->nb[1];
        std::vector<char> rows((size_t) std::max(n_rows * n_experts, n_tall_rows) * row_bytes);
        ggml_quantize_chunk(kernel.type, values.data(), rows.data(), 0, n_distinct_rows, n_in, nullptr);
        const size_t distinct_bytes = (size_t) n_distinct_rows * row_bytes;
        for (size_t at = distinct_bytes; at < rows.size(); at += distinct_bytes) {
            std::memcpy(rows.data() + at, rows.data(), distinct_bytes);
        }
        const quiet_log quiet;
        for (ggml_tensor * each : matrices) {
            ggml_backend_tensor_set(each, rows.data(), 0, ggml_nbytes(each));
        }
    }

    void fill_batch() {
        float * columns = (float *) x->data;
        for (int64_t i = 0; i < ggml_nelements(x); i++) {
            const float value = random.next();
            columns[i]        = value * value * value * 8; // unlike scales
        }
        for (int64_t i = 0; ids && i < ggml_nelements(ids); i++) {
            ((int32_t *) ids->data)[i] = (int32_t) (i % n_experts);
        }
    }

    ggml_status compute(dots_function dots) {
        const chosen_dots only = { &kernel, kernel.few, dots };
        return ours.compute(cpu.get(), graph, nullptr, &only);
    }

    const dot_kernel &      kernel;
    ggml_context_ptr        ctx, matrix_ctx;
    ggml_backend_buffer_ptr buffer, matrix_buffer;
    ggml_tensor *           matrices[TALL + 1] = {};
    ggml_tensor *           matrix = nullptr, *x = nullptr, *ids = nullptr;
    bool                    is_complete = false;
    expert_matmuls          ours;
};

// whether the dots have ggml's bits for each of these numbers of columns
static bool has_bits(check_case & found, dots_function dots, check_matrix with, std::initializer_list<int64_t> counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return found.set_batch(n, with) && found.is_equal(dots); });
}

static void run_check(const dot_kernel & kernel, kernel_check & check) {
    check_case found(kernel);
    if (!found.is_ready()) {
        return;
    }
    for (int64_t n_tokens = 1; n_tokens < n_many_columns; n_tokens++) { // each number has passes of its own
        if (!found.set_batch(n_tokens) || !found.is_equal(kernel.few)) {
            return;
        }
        if (n_tokens <= 2) {
            (n_tokens == 1 ? check.found.single_speed : check.found.several_speed) = found.speed(kernel.few);
        }
    }
    check.found.is_equal = true;
    if (kernel.n_dense_few > 0 && has_bits(found, kernel.few, TALL, { 1 })) {
        check.found.dense_single_speed = found.speed(kernel.few);
    }
    check.found.n_dense_max = (int32_t) kernel.n_dense_few;
    for (int64_t n_tokens = 2; n_tokens <= check.found.n_dense_max; n_tokens++) {
        if (!has_bits(found, kernel.few, DENSE, { n_tokens })) {
            check.found.n_dense_max = 0;
        }
    }
    for (const dots_function dots : { kernel.many, kernel.few }) {
        // ggml's narrow tiles, wide ones, and all threads' rests
        if (dots && check.many_dots == nullptr && has_bits(found, dots, EXPERTS, { n_many_columns, 15, 16, 17, 41 })) {
            check.many_dots        = dots;
            check.found.many_speed = found.set_batch(n_timed_columns) ? found.speed(dots) : 0;
        }
    }
    if (kernel.dense && has_bits(found, kernel.dense, DENSE, { kernel.n_dense_many, 8, 15, 17, 33, 67 })) {
        check.found.dense_speed = found.set_batch(n_timed_dense_columns, DENSE) ? found.speed(kernel.dense) : 0;
    }
}

// of the runnable kernel with that index, made on first use
static const kernel_check & checked(size_t i) {
    static std::deque<kernel_check> checks(runnable_kernels().size());
    std::call_once(checks[i].once, [i] { run_check(*runnable_kernels()[i], checks[i]); });
    return checks[i];
}

bool may_replace() {
    return choice.load(std::memory_order_relaxed) != MOEEDGE_KERNEL_CHOICE_NONE;
}

static int read_kernels(moeedge_kernel * out, int n_max) {
    const std::vector<const dot_kernel *> & kernels = runnable_kernels();
    int                                     n       = 0;
    const auto add = [&](const char * instructions, const char * layout, const moeedge_kernel & found) {
        if (n++ < n_max) {
            out[n - 1] = found;
            std::strncpy(out[n - 1].instructions, instructions, sizeof(out->instructions) - 1);
            std::strncpy(out[n - 1].layout, layout, sizeof(out->layout) - 1);
        }
    };
    for (size_t i = 0; i < kernels.size(); i++) {
        add(kernels[i]->instructions, kernels[i]->layout, checked(i).found);
    }
    for (size_t i = 0; i < runnable_sets().size(); i++) {
        if (runnable_sets()[i].attention.few) {
            moeedge_kernel found = {};
            found.several_speed  = attention_speed(i, false);
            found.many_speed     = attention_speed(i, true);
            found.is_equal       = found.several_speed > 0 || found.many_speed > 0;
            add(runnable_sets()[i].first->instructions, "attention", found);
        }
    }
    return n;
}

bool has_many_dense(const dot_kernel & kernel, const ggml_tensor * node) {
    return kernel.dense && node->src[1]->ne[1] >= kernel.n_dense_many;
}

static bool fits(const dot_kernel & kernel, const ggml_tensor * node) {
    const ggml_tensor * matrix = node->src[0];
    const ggml_tensor * x      = node->src[1];
    if (node->op == GGML_OP_MUL_MAT && ((x->ne[1] > kernel.n_dense_few && !has_many_dense(kernel, node)) || x->ne[2] != 1 ||
                                        matrix->ne[2] != 1 || matrix->ne[3] != 1 || matrix->ne[1] < 256)) {
        return false;
    }
    if (matrix->type != kernel.type || matrix->ne[0] % kernel.n_values_together != 0 || matrix->ne[1] % kernel.n_rows_together != 0 ||
        matrix->buffer == nullptr || !ggml_is_contiguous(matrix)) {
        return false;
    }
    if (x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || x->ne[3] != 1) {
        return false;
    }
    if (kernel.is_repacked) {
        return is_repacked(matrix);
    }
    return matrix->extra == nullptr && ggml_backend_buffer_is_host(matrix->buffer);
}

// the fastest that is known of ggml's code and the kernel for the node's columns per expert; 1: ggml's
static double known_speed(const dot_kernel & kernel, const moeedge_kernel & check, const ggml_tensor * node) {
    if (node->op == GGML_OP_MUL_MAT) {
        return node->src[1]->ne[1] == 1 ? check.dense_single_speed : has_many_dense(kernel, node) ? check.dense_speed : check.several_speed;
    }
    if (ggml_nelements(node->src[2]) >= n_many_columns * node->src[0]->ne[2]) {
        return check.many_speed;
    }
    return node->src[2]->ne[1] == 1 ? check.single_speed : check.several_speed;
}

bool is_allowed(const char * instructions) {
    const auto is = [](const char * x, const char * y) { return std::strcmp(x, y) == 0; };
    switch (choice.load(std::memory_order_relaxed)) {
        case MOEEDGE_KERNEL_CHOICE_AVX2:    return is(instructions, "avx2");
        case MOEEDGE_KERNEL_CHOICE_AVXVNNI: return is(instructions, "avxvnni");
        default: return !is(instructions, "avxvnni") || !is(runnable_sets().front().first->instructions, "avx512vnni"); // which is faster, and a check takes time
    }
}

double least_speed() {
    return choice.load(std::memory_order_relaxed) == MOEEDGE_KERNEL_CHOICE_MEASURED ? 1 : 0;
}

chosen_dots choose_dots(const ggml_tensor * node) {
    const int chosen = choice.load(std::memory_order_relaxed);
    if (!may_replace() || ggml_is_empty(node)) {
        return {};
    }
    const bool  is_dense    = node->op == GGML_OP_MUL_MAT;
    const bool  may_be_many = !is_dense && ggml_nelements(node->src[2]) >= n_many_columns; // GroveMoE names an expert twice per token
    chosen_dots fastest;
    double      speed = 1; // ggml's
    for (size_t i = 0; i < runnable_kernels().size(); i++) {
        const dot_kernel & kernel = *runnable_kernels()[i];
        if (!fits(kernel, node) || !is_allowed(kernel.instructions)) {
            continue;
        }
        const kernel_check & check    = checked(i);
        const bool           is_many  = is_dense && has_many_dense(kernel, node);
        const bool           is_one   = is_dense && node->src[1]->ne[1] == 1;
        const bool           is_equal = !is_dense ? check.found.is_equal != 0
                                        : is_one  ? check.found.dense_single_speed > 0
                                        : is_many ? check.found.dense_speed > 0
                                                  : check.found.n_dense_max > 0;
        if (!is_equal || (may_be_many && check.many_dots == nullptr)) {
            continue;
        }
        const chosen_dots found = { &kernel, kernel.few, is_dense ? kernel.dense : check.many_dots };
        if (chosen != MOEEDGE_KERNEL_CHOICE_MEASURED) {
            return found;
        }
        const double own_speed = known_speed(kernel, check.found, node);
        if (own_speed > speed) {
            fastest = found;
            speed   = own_speed;
        }
    }
    return fastest;
}

} // namespace moeedge

int moeedge_set_kernel_choice(int choice) {
    if (choice < MOEEDGE_KERNEL_CHOICE_NONE || choice > MOEEDGE_KERNEL_CHOICE_AVXVNNI) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    moeedge::choice.store(choice);
    return MOEEDGE_STATUS_OK;
}

int moeedge_kernels(moeedge_kernel * out, int n_max) {
    if (out == nullptr || n_max < 0) {
        return MOEEDGE_STATUS_BAD_ARGUMENT;
    }
    return moeedge::guarded([&] { return moeedge::read_kernels(out, n_max); });
}
