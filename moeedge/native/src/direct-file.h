// Direct file: a model file that is read past the system's page cache and watched for changes.
//
// A model larger than memory would fill the page cache with copies of what the slots hold. So a file is opened for direct
// reads of whole blocks into a buffer of ours; where the file system has none, its pages are given back after each read.

#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "moeedge-cache.h"
#include "no-copy.h"

namespace moeedge {

// file offsets, sizes and memory of direct reads are multiples of it: no file system here asks for more
static constexpr size_t direct_alignment = 4096;

// memory for direct reads; of one thread
class bounce_buffer {
  public:
    // at least that many bytes; null: no memory
    char * reserve(size_t size);

  private:
    std::unique_ptr<void, void (*)(void *)> data{ nullptr, std::free };
    size_t                                  capacity = 0;
};

// what a read returns besides an errno: 0 is success
enum direct_file_error {
    DIRECT_FILE_ENDED    = -1, // no bytes came before what should be its end
    DIRECT_FILE_CHANGED  = -2, // its size or time of modification is another
    DIRECT_FILE_REPLACED = -3, // its path names another file, or none
};

// what can go wrong with a disk, on purpose, for tests
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

class direct_file : no_copy {
  public:
    ~direct_file();

    // false with the reason in `error`
    bool open(const char * path, bool is_buffered, std::string & error);
    // Reads `size` bytes; from any thread. Returns 0, an errno or a direct_file_error: never 0 for bytes of a file
    // that was changed after it was opened
    int  read(int64_t offset, size_t size, char * to, bounce_buffer & bounce, read_faults & faults);
    // whether reads bypass the page cache
    bool is_direct() const { return direct.load(std::memory_order_relaxed); }
    // bytes that reads have asked the system for so far, blocks as a whole
    int64_t bytes_read() const { return n_bytes.load(std::memory_order_relaxed); }

    std::string path;

  private:
    int read_direct(int64_t offset, size_t size, char * to, bounce_buffer & bounce, read_faults & faults);
    int read_buffered(int64_t offset, size_t size, char * to, read_faults & faults);
    int check();

    int                  descriptor = -1;
    struct stat          opened     = {};
    std::atomic<bool>    direct{ false };
    std::atomic<int64_t> n_bytes{ 0 };
    std::atomic<int64_t> checked_ns{ 0 }; // when the path was looked up last
};

} // namespace moeedge
