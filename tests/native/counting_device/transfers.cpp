#include "transfers.h"

#include <cstring>

#include "device-memory.h"

namespace counting {

static constexpr uint8_t poison = 0xFF; // NaN as a float, -1 as an id

static std::string describe(const char * what, const ggml_tensor * tensor) {
    return std::string(what) + " " + tensor->name;
}

// where piece i is on the host, as the caller addresses it on the device, and really there
static char * host_at(const transfer & t, size_t i) {
    return (char *) t.data + i * t.stride_data;
}

static char * device_at(const transfer & t, size_t i) {
    return (char *) t.tensor->data + t.offset + i * t.stride_tensor;
}

static void add_ranges(const transfer & t, byte_ranges & host, byte_ranges & device) {
    for (size_t i = 0; i < t.n; i++) {
        host.add(host_at(t, i), t.size);
        device.add(device_at(t, i), t.size);
    }
}

static uint64_t checksum(const transfer & t) {
    uint64_t sum = 0;
    for (size_t i = 0; i < t.n; i++) {
        const char * from = host_at(t, i);
        for (size_t k = 0; k < t.size; k += sizeof(uint64_t)) {
            uint64_t word = 0;
            std::memcpy(&word, from + k, std::min(sizeof(word), t.size - k));
            sum = sum * 0x100000001b3 + word;
        }
    }
    return sum;
}

// what a queued transfer must know of its tensor, which the caller may free before it is executed
struct resolved_transfer {
    transfer          t;
    std::vector<char *> device; // the pieces' real addresses

    explicit resolved_transfer(const transfer & from) : t(from) {
        for (size_t i = 0; i < t.n; i++) {
            device.push_back((char *) real_address(t.tensor, device_at(t, i)));
        }
    }
};

operation make_set(const transfer & t) {
    operation op;
    op.name = describe("set", t.tensor);
    add_ranges(t, op.reads, op.writes);
    const bool     is_late = current_settings().defer != 0;
    const uint64_t sum     = is_late ? checksum(t) : 0;
    op.run = [r = resolved_transfer(t), name = op.name, is_late, sum] {
        if (is_late && checksum(r.t) != sum) {
            add_hazard(name + ": its source changed before it was copied");
        }
        for (size_t i = 0; i < r.t.n; i++) {
            std::memcpy(r.device[i], host_at(r.t, i), r.t.size);
        }
    };
    return op;
}

operation make_get(const transfer & t) {
    operation op;
    op.name = describe("get", t.tensor);
    add_ranges(t, op.writes, op.reads);
    if (current_settings().defer) {
        for (size_t i = 0; i < t.n; i++) {
            std::memset(host_at(t, i), poison, t.size);
        }
    }
    op.run = [r = resolved_transfer(t)] {
        for (size_t i = 0; i < r.t.n; i++) {
            std::memcpy(host_at(r.t, i), r.device[i], r.t.size);
        }
    };
    return op;
}

operation make_copy(const ggml_tensor * src, const ggml_tensor * dst) {
    operation op;
    op.name = describe("copy", src);
    op.reads.add(src->data, ggml_nbytes(src));
    op.writes.add(dst->data, ggml_nbytes(dst));
    op.run = [to = real_address(dst, dst->data), from = real_address(src, src->data), size = ggml_nbytes(dst)] {
        std::memcpy(to, from, size);
    };
    return op;
}

operation make_fill(const char * name, void * address, void * real, uint8_t value, size_t size) {
    operation op;
    op.name = std::string("clear ") + name;
    op.writes.add(address, size);
    op.run = [real, value, size] { std::memset(real, value, size); };
    return op;
}

void run_blocking(operation op) {
    op.name += " (host)";
    device_queue::check_host(op);
    op.run();
}

} // namespace counting
