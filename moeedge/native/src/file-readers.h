// File readers: threads that help another one to read a file. One thread copies some 8 to 10 GB/s out of the page cache, less
// than a link takes.

#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "no-copy.h"
namespace moeedge {

class file_readers : no_copy {
  public:
    ~file_readers();

    // Calls read(i) for each i in [0, n) from the calling thread and n_threads - 1 others; whether all returned true. Called
    // by one thread at a time; `read` must not throw.
    bool run(size_t n, int n_threads, const std::function<bool(size_t)> & read);

  private:
    void serve();
    void take_pieces();

    std::vector<std::thread> threads;
    std::mutex               mutex;
    std::condition_variable  begun;
    std::condition_variable  ended;
    // of the current run; `read` is written while no thread is busy
    const std::function<bool(size_t)> * read = nullptr;
    std::atomic<size_t>                 next{ 0 };
    size_t                              n_pieces = 0;
    std::atomic<bool>                   is_read{ true };
    int                                 n_wanted = 0; // threads that may still join
    int                                 n_busy   = 0;
    bool                                is_over  = false;
};

} // namespace moeedge
