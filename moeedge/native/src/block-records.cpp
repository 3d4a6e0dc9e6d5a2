#include "block-records.h"

#include <algorithm>

namespace moeedge {

void block_records::add(const moeedge_block_record & record) {
    std::lock_guard<std::mutex> lock(mutex);
    moeedge_block_record &      kept = ring[++serial % n_kept];
    kept        = record;
    kept.serial = serial;

    sums.blocks++;
    if (record.n_tokens <= n_tokens_counted && record.phase != MOEEDGE_PHASE_PREFILL) {
        sums.pairs += record.pairs_cpu + record.pairs_device;
        sums.pairs_hit += record.pairs_device;
        sums.unique += record.unique_cpu + record.unique_device;
        sums.unique_hit += record.unique_device;
    }
    sums.partition_s += (double) record.partition_ns * 1e-9;
    sums.cpu_s += (double) record.cpu_ns * 1e-9;
    sums.device_s += (double) record.device_ns * 1e-9;
    sums.wait_s += (double) record.wait_ns * 1e-9;
    sums.wait_bytes += record.wait_bytes;
}

void block_records::add_unknown() {
    std::lock_guard<std::mutex> lock(mutex);
    sums.blocks_unknown++;
}

int block_records::read(int64_t after, moeedge_block_record * out, int n_max) {
    std::lock_guard<std::mutex> lock(mutex);
    const int64_t               oldest = std::max<int64_t>(serial - n_kept + 1, 1);
    int                         n      = 0;
    for (int64_t s = std::max(after + 1, oldest); s <= serial && n < n_max; s++) {
        out[n++] = ring[s % n_kept];
    }
    return n;
}

moeedge_cache_stats block_records::stats() {
    std::lock_guard<std::mutex> lock(mutex);
    return sums;
}

} // namespace moeedge
