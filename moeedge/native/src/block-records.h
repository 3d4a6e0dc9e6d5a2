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
    moeedge_cache_stats stats(); // of these, the others are 0

  private:
    std::mutex                        mutex; // the computing thread adds, others read
    std::vector<moeedge_block_record> ring = std::vector<moeedge_block_record>(n_kept);
    int64_t                           serial = 0;
    moeedge_cache_stats               sums   = {};
};

} // namespace moeedge
