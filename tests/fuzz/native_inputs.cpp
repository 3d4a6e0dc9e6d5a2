// libFuzzer's entry: bytes as arguments of the native library's functions that take what a file or a user says.
//
// tests/fuzz/test_native_inputs.py compiles it with clang and the address sanitizer, and runs it for a moment. The first byte says
// which function; a refusal is a result like any other.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "gguf.h"
#include "moeedge-cache.h"

namespace {

// the next values of the input, zeros after its end
struct reader {
    const uint8_t * data;
    size_t          size;

    template <typename T> T next() {
        T            value{};
        const size_t n = size < sizeof(T) ? size : sizeof(T);
        std::memcpy(&value, data, n);
        data += n;
        size -= n;
        return value;
    }

    template <typename T> std::vector<T> many(size_t n) {
        std::vector<T> values(n);
        for (auto & value : values) {
            value = next<T>();
        }
        return values;
    }
};

void header(const reader & input) {
    const int file = memfd_create("case", 0);
    if (file >= 0 && write(file, input.data, input.size) >= 0) {
        char path[64];
        std::snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
        gguf_free((gguf_context *) moeedge_open_gguf(path));
    }
    close(file);
}

std::vector<int32_t> per_layer(reader & input, int n_layers) {
    return input.many<int32_t>((size_t) n_layers);
}

void budget(reader & input) {
    const int  n_layers  = input.next<uint8_t>() % 9;
    const int  n_experts = input.next<int16_t>();
    const auto n_used    = per_layer(input, n_layers);
    if (auto * made = moeedge_budget_create(n_layers, n_experts, n_used.data())) {
        const auto                  budgets = per_layer(input, n_layers);
        const moeedge_budget_config config{ input.next<int32_t>(), input.next<int32_t>(), budgets.data() };
        moeedge_budget_configure(made, &config);
        moeedge_budget_set_active(made, input.next<uint8_t>());
        moeedge_budget_set_capture(made, input.next<uint8_t>());
        moeedge_budget_routing routing;
        moeedge_budget_get_routing(made, input.next<int32_t>(), &routing);
        std::vector<moeedge_budget_layer> layers((size_t) n_layers);
        moeedge_budget_read(made, layers.data());
        moeedge_budget_destroy(made);
    }
}

void routing(reader & input) {
    const int  n_layers  = input.next<uint8_t>() % 9;
    const int  n_experts = input.next<int16_t>();
    const int  n_ubatch  = input.next<int16_t>();
    const auto n_used    = per_layer(input, n_layers);
    if (auto * made = moeedge_routing_create(n_layers, n_experts, n_used.data(), n_ubatch)) {
        int32_t n_most = 0;
        for (const int32_t n : n_used) {
            n_most = n > n_most ? n : n_most;
        }
        const int32_t               n_tokens = input.next<uint8_t>();
        const auto                  ids = input.many<int32_t>(n_most > 64 ? 0 : (size_t) n_tokens * (size_t) n_layers * (size_t) n_most);
        const moeedge_routing_batch batch{ input.next<int32_t>(), ids.empty() ? 0 : n_tokens, ids.data() };
        moeedge_routing_set(made, &batch);
        moeedge_routing_set_capture(made, input.next<uint8_t>());
        int32_t out[64];
        moeedge_routing_captured(made, input.next<int32_t>(), out, 64);
        moeedge_routing_destroy(made);
    }
}

void largest(reader & input) {
    const auto           k      = (int64_t) input.next<uint8_t>();
    const auto           values = input.many<float>(input.size / sizeof(float));
    std::vector<int32_t> ids((size_t) k);
    std::vector<float>   found((size_t) k);
    const int64_t        n = moeedge_largest_values(values.data(), (int64_t) values.size(), k, ids.data(), found.data());
    for (int64_t i = 0; i < n; ++i) {
        if (ids[i] < 0 || (size_t) ids[i] >= values.size() || values[ids[i]] != found[i] || (i && found[i] > found[i - 1])) {
            __builtin_trap();
        }
    }
}

void unknown_objects(reader & input) {
    const auto id   = input.next<int64_t>();
    const auto data = input.many<int32_t>(16);
    moeedge_instance_configure(id, data[0], data[1], data[2], data[3]);
    moeedge_cache_limit(id, data[4]);
    moeedge_cache_set_batch(id, data[5]);
    moeedge_cache_set_prefill(id, data[6], data[7]);
    moeedge_cache_destroy(id);
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    reader input{ data, size };
    switch (input.next<uint8_t>() % 5) {
        case 0: header(input); break;
        case 1: budget(input); break;
        case 2: routing(input); break;
        case 3: largest(input); break;
        case 4: unknown_objects(input); break;
    }
    return 0;
}
