#include "file-readers.h"

#include <algorithm>
#include <system_error>

namespace moeedge {

file_readers::~file_readers() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_over = true;
    }
    begun.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

void file_readers::take_pieces() {
    for (size_t i = next.fetch_add(1); i < n_pieces; i = next.fetch_add(1)) {
        if (!(*read)(i)) {
            is_read.store(false);
        }
    }
}

void file_readers::serve() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        begun.wait(lock, [this] { return is_over || n_wanted > 0; });
        if (is_over) {
            return;
        }
        n_wanted--;
        n_busy++;
        lock.unlock();
        take_pieces();
        lock.lock();
        if (--n_busy == 0) {
            ended.notify_one();
        }
    }
}

bool file_readers::run(size_t n, int n_threads, const std::function<bool(size_t)> & call) {
    const int n_helpers = (int) std::min<size_t>((size_t) n_threads, n) - 1;
    try {
        while ((int) threads.size() < n_helpers) {
            threads.emplace_back([this] { serve(); });
        }
    } catch (const std::system_error &) { // no resources for another thread: those that there are do it
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        read     = &call;
        n_pieces = n;
        next.store(0);
        is_read.store(true);
        n_wanted = std::min((int) threads.size(), n_helpers);
    }
    if (n_helpers > 0) {
        begun.notify_all();
    }
    take_pieces();
    std::unique_lock<std::mutex> lock(mutex);
    n_wanted = 0; // a thread that wakes up later finds no piece left
    ended.wait(lock, [this] { return n_busy == 0; });
    return is_read.load();
}

} // namespace moeedge
