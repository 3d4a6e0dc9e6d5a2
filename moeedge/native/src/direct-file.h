// Direct file: a model file that is read past the system's page cache and watched for changes.
//
// A model larger than memory would fill the page cache with copies of what the slots hold. So a file is opened for direct
// reads of whole blocks into a buffer of ours; where the file system has none, its pages are given back after each read.

#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include <sys/stat.h>

#include "no-copy.h"
#include "read-faults.h"

namespace moeedge {

// file offsets, sizes and memory of direct reads are multiples of it: no file system here asks for more
static constexpr size_t direct_alignment = 4096;

// memory for direct reads; of one thread
class bounce_buffer {
  public:
    // at least that many bytes; null: no memory
    char * reserve(size_t size);

  private:
    struct release {
        void operator()(char * data) const;
    };

    std::unique_ptr<char, release> data;
    size_t                         capacity = 0;
};

// what a read returns besides an errno: 0 is success
enum direct_file_error {
    DIRECT_FILE_ENDED    = -1, // no bytes came before what should be its end
    DIRECT_FILE_CHANGED  = -2, // its size or time of modification is another
    DIRECT_FILE_REPLACED = -3, // its path names another file, or none
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
