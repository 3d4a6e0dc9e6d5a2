// Block records: counters and the newest block records of the computing side.

#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "moeedge.h"

namespace moeedge {

class block_records {
  public:
    static constexpr int n_kept           = 4096;
    static constexpr int n_tokens_counted = 64; // larger batches use nearly every expert under any policy

    void add(const moeedge_block_record & record);
    void add_unknown();

    int  read(int64_t after, moeedge_block_record * out, int n_max);
    void add_stats(moeedge_cache_stats & stats);

  private:
    std::mutex                        mutex; // the computing thread adds, others read
    std::vector<moeedge_block_record> ring = std::vector<moeedge_block_record>(n_kept);
    int64_t                           serial = 0;
    struct {
        int64_t blocks, blocks_unknown;
        int64_t pairs, pairs_hit, unique, unique_hit;
        int64_t partition_ns, cpu_ns, device_ns, wait_ns, wait_bytes;
    } sums = {};
};

} // namespace moeedge
