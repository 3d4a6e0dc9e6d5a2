// AMX check: ggml compiled by GCC 12 loads its tile configuration before all of it is written (the compiler takes the
// instruction to read 8 of the 64 bytes), so stock llama.cpp ends with a signal at the first prompt of a quantized model on a
// processor with AMX. Here a child process tries ggml's matmul; if it dies or computes something else, ggml is kept from its AMX
// buffer type, which it lists once.

#include "moeedge.h"

#if defined(__x86_64__) && defined(__linux__)

#    include <cerrno>
#    include <cmath>
#    include <csignal>
#    include <cstdint>
#    include <dlfcn.h>
#    include <fcntl.h>
#    include <sys/wait.h>
#    include <unistd.h>
#    include <vector>

#    include "cache-device.h"
#    include "ggml-alloc.h"
#    include "ggml-backend.h"
#    include "ggml-cpu.h"

namespace moeedge {

static constexpr int64_t n_in = 256, n_out = 64, n_columns = 32;
static constexpr unsigned timeout_s = 10;

// what is on the stack is not zero by chance
__attribute__((noinline)) static void fill_stack() {
    volatile char bytes[64 * 1024];
    for (volatile char & byte : bytes) {
        byte = 0x55;
    }
}

// a matmul of ggml's with the matrix in that type of buffer; leaked: the process ends
static std::vector<float> multiply(ggml_backend_t cpu, ggml_backend_buffer_type_t buft) {
    ggml_context *    ctx    = ggml_init({ 8 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true });
    ggml_context *    own    = ggml_init({ ggml_tensor_overhead(), nullptr, true });
    ggml_tensor *     matrix = ggml_new_tensor_2d(own, GGML_TYPE_Q8_0, n_in, n_out);
    ggml_tensor *     x      = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_in, n_columns);
    ggml_backend_alloc_ctx_tensors_from_buft(own, buft);
    ggml_tensor *     out    = ggml_mul_mat(ctx, matrix, x);
    ggml_cgraph *     graph  = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_alloc_ctx_tensors(ctx, cpu);
    std::vector<float> values((size_t) (n_in * n_out));
    for (size_t i = 0; i < values.size(); i++) {
        values[i] = (float) (i * 37 % 101) - 50;
    }
    std::vector<char> rows(ggml_nbytes(matrix));
    ggml_quantize_chunk(GGML_TYPE_Q8_0, values.data(), rows.data(), 0, n_out, n_in, nullptr);
    ggml_backend_tensor_set(matrix, rows.data(), 0, rows.size());
    ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    fill_stack();
    ggml_backend_graph_compute(cpu, graph);
    std::vector<float> found((size_t) (n_out * n_columns));
    ggml_backend_tensor_get(out, found.data(), 0, ggml_nbytes(out));
    return found;
}

static bool is_amx_right(ggml_backend_dev_t dev) {
    ggml_backend_buffer_type_t buft = extra_buffer_type(dev, "AMX");
    if (buft == nullptr) {
        return true;
    }
    ggml_backend_t cpu         = ggml_backend_dev_init(dev, nullptr);
    set_n_threads(cpu, 1); // a forked process has no others
    const std::vector<float> theirs = multiply(cpu, buft);
    const std::vector<float> plain  = multiply(cpu, ggml_backend_cpu_buffer_type());
    double                   error = 0, norm = 0;
    for (size_t i = 0; i < plain.size(); i++) {
        error += std::pow(theirs[i] - plain[i], 2);
        norm += std::pow(plain[i], 2);
    }
    return error < 1e-4 * norm;
}

// The child's answer comes through a pipe: its exit status is lost to a program that ignores SIGCHLD.
static bool passes_in_child(ggml_backend_dev_t dev) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) {
        return true;
    }
    const pid_t child = fork();
    if (child == 0) {
        for (int name = 1; name < NSIG; name++) {
            signal(name, SIG_DFL);
        }
        alarm(timeout_s);
        dup2(open("/dev/null", O_WRONLY), STDERR_FILENO); // ggml's log
        _exit(is_amx_right(dev) && write(ends[1], "", 1) == 1 ? 0 : 1);
    }
    close(ends[1]);
    char    answer;
    ssize_t n_read;
    do {
        n_read = read(ends[0], &answer, 1);
    } while (n_read < 0 && errno == EINTR);
    close(ends[0]);
    while (child > 0 && waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
    }
    return child < 0 || n_read == 1;
}

// Lets ggml list its buffer types while its request to use AMX fails: Linux refuses it to a process with a signal stack too small
// for the tiles. ggml prints a line about that, which would be misread.
static void list_without_amx(ggml_backend_dev_t dev) {
    static char small[8192];
    stack_t     before = {};
    stack_t     during = {};
    during.ss_sp       = small;
    during.ss_size     = sizeof(small);
    if (sigaltstack(&during, &before) != 0) {
        return;
    }
    const int error_output = dup(STDERR_FILENO);
    const int nowhere      = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(nowhere, STDERR_FILENO);
    extra_buffer_type(dev, "");
    dup2(error_output, STDERR_FILENO);
    close(error_output);
    close(nowhere);
    sigaltstack(&before, nullptr);
}

} // namespace moeedge

int moeedge_disable_broken_amx(void) {
    static const bool is_broken = [] {
        const auto         has_amx = (int (*)()) dlsym(RTLD_DEFAULT, "ggml_cpu_has_amx_int8"); // in the CPU backend's library
        ggml_backend_dev_t dev     = has_amx && has_amx() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : nullptr;
        const bool         found   = dev && !moeedge::passes_in_child(dev);
        if (found) {
            moeedge::list_without_amx(dev);
        }
        return found;
    }();
    return is_broken;
}

#else

int moeedge_disable_broken_amx(void) {
    return 0;
}

#endif
