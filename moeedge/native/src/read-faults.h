// Read faults: what can go wrong with a disk, on purpose, for tests.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include <cerrno>
#include <sys/types.h>
#include <unistd.h>

#include "moeedge.h"

namespace moeedge {

class read_faults {
  public:
    // every `every`-th read from now on; 0: none
    void set(int new_kind, int new_every, double new_delay_s) {
        every.store(0);
        kind.store(new_kind);
        delay_s.store(new_delay_s);
        n_reads.store(0);
        every.store(new_every);
    }

    // whether no thread can be started for further reads
    bool denies_threads() const { return kind.load() == MOEEDGE_READ_FAULT_THREADS && every.load() > 0; }

    // pread with the faults
    ssize_t read(int file, char * to, size_t size, int64_t offset) {
        // The thread's next read after one that failed is its second attempt. It succeeds, unless all reads fail: with several
        // threads some attempts would fail each time by chance.
        static thread_local bool has_failed = false;

        const int  n     = every.load(std::memory_order_relaxed);
        const bool fails = n > 0 && (n_reads.fetch_add(1) + 1) % n == 0 && (n == 1 || !has_failed);
        has_failed       = fails;
        if (!fails) {
            return pread(file, to, size, (off_t) offset);
        }
        switch (kind.load()) {
            case MOEEDGE_READ_FAULT_EIO:
                errno = EIO;
                return -1;
            case MOEEDGE_READ_FAULT_SHORT: // up to a byte in the middle of a block
                return std::min(pread(file, to, size, (off_t) offset), (ssize_t) (size / 2 + 1));
            case MOEEDGE_READ_FAULT_END:
                return 0;
            case MOEEDGE_READ_FAULT_THREADS:
                return pread(file, to, size, (off_t) offset);
            default:
                std::this_thread::sleep_for(std::chrono::duration<double>(delay_s.load()));
                return pread(file, to, size, (off_t) offset);
        }
    }

  private:
    std::atomic<int>     kind{ MOEEDGE_READ_FAULT_EIO };
    std::atomic<int>     every{ 0 };
    std::atomic<double>  delay_s{ 0.0 };
    std::atomic<int64_t> n_reads{ 0 };
};

} // namespace moeedge
