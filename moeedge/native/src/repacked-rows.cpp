#include "repacked-rows.h"

#include <atomic>
#include <cstring>

#include "ggml.h"

namespace moeedge {

static const char buffer_type_name[] = "CPU_REPACK";
// all layouts of ggml interleave this number of rows, or a divisor of it
static constexpr int64_t n_rows_together = 16;

// ggml logs every tensor that it repacks, and its log is Python's, whose lock the reader's threads should not wait for
static thread_local bool              is_quiet = false;
static std::atomic<ggml_log_callback> log_to{ nullptr };
static std::atomic<void *>            log_data{ nullptr };

static void log_unless_quiet(enum ggml_log_level level, const char * text, void *) {
    const ggml_log_callback callback = log_to.load();
    if (!is_quiet && callback) {
        callback(level, text, log_data.load());
    }
}

static void filter_log() {
    ggml_log_callback current = nullptr;
    void *            data    = nullptr;
    ggml_log_get(&current, &data);
    if (current != log_unless_quiet) {
        log_data.store(data);
        log_to.store(current);
        ggml_log_set(log_unless_quiet, nullptr);
    }
}

// by measurement: docs/log.md
static bool is_cheap(ggml_type type) {
    return type == GGML_TYPE_Q4_0 || type == GGML_TYPE_IQ4_NL || type == GGML_TYPE_MXFP4;
}

ggml_backend_buffer_type_t repacked_buffer_type(ggml_backend_dev_t dev, ggml_type type, moeedge_repack choice) {
    if (choice == MOEEDGE_REPACK_NONE || (choice == MOEEDGE_REPACK_CHEAP && !is_cheap(type))) {
        return nullptr;
    }
    void * get = ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    ggml_backend_buffer_type_t * types = get ? ((ggml_backend_dev_get_extra_bufts_t) get)(dev) : nullptr;
    for (; types && *types; types++) {
        if (std::strcmp(ggml_backend_buft_name(*types), buffer_type_name) == 0) {
            return *types;
        }
    }
    return nullptr;
}

bool is_repacked(const ggml_tensor * tensor) {
    const char * name = ggml_backend_buft_name(ggml_backend_buffer_get_type(tensor->buffer));
    return tensor->extra && std::strcmp(name, buffer_type_name) == 0;
}

repacked_rows::repacked_rows(const ggml_tensor * of) : pool(of), unit((size_t) n_rows_together * of->nb[1]) {
    filter_log();
}

void repacked_rows::write(char * to, const char * from, size_t size) const {
    ggml_tensor rows = *pool;
    rows.ne[1]       = (int64_t) (size / pool->nb[1]);
    rows.ne[2]       = 1;
    rows.nb[2] = rows.nb[3] = size;
    rows.data               = to;
    is_quiet                = true;
    ggml_backend_tensor_set(&rows, from, 0, size);
    is_quiet = false;
}

} // namespace moeedge
