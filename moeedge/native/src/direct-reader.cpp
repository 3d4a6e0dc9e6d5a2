#include "direct-reader.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include "timing.h"

namespace moeedge {

// By measurement: docs/log.md
static constexpr int    default_threads     = 4;
static constexpr size_t default_piece_bytes = 1u << 20;
// how long a failed read waits for the next attempt; then the request fails
static constexpr int64_t retry_after_ns[] = { 1'000'000, 10'000'000, 100'000'000 };

direct_reader::direct_reader(double bytes_per_s)
    : rate(bytes_per_s), wanted_threads(default_threads), wanted_piece_bytes(default_piece_bytes) {}

direct_reader::~direct_reader() {
    cancel_all();
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_stopped = true;
    }
    work.notify_all();
    stopped.notify_all();
    for (std::thread & thread : threads) {
        thread.join();
    }
}

bool direct_reader::open(const char * const * paths, int n_paths, bool is_buffered, std::string & error) {
    for (int i = 0; i < n_paths; i++) {
        files.push_back(std::make_unique<direct_file>());
        if (!files.back()->open(paths[i], is_buffered, error)) {
            return false;
        }
    }
    return true;
}

void direct_reader::set(int n_threads, size_t piece_bytes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        wanted_threads.store(n_threads);
        wanted_piece_bytes.store(piece_bytes);
    }
    work.notify_all();
}

// with the mutex
void direct_reader::start_threads() {
    if (faults.denies_threads()) {
        throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    }
    while ((int) threads.size() < wanted_threads.load()) {
        try {
            const int i_thread = (int) threads.size();
            threads.emplace_back([this, i_thread] { serve(i_thread); });
        } catch (const std::system_error &) { // no resources for another thread: those that there are do it
            if (threads.empty()) {
                throw;
            }
            return;
        }
    }
}

int64_t direct_reader::enqueue(std::vector<read_range> ranges, int priority, end_call ended) {
    auto r      = std::make_shared<request>();
    r->begin_ns = now_ns();
    r->priority = priority;
    r->ranges   = std::move(ranges);
    r->ended    = std::move(ended);
    {
        std::lock_guard<std::mutex> lock(mutex);
        start_threads();
        r->id = ++last_id;
        live.emplace(r->id, r);
        queue.emplace(place_of(*r), r);
    }
    work.notify_all();
    return r->id;
}

void direct_reader::raise(int64_t id, int priority) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto                  found = live.find(id);
    if (found == live.end() || found->second->priority >= priority) {
        return;
    }
    const std::shared_ptr<request> r         = found->second;
    const bool                     is_queued = queue.erase(place_of(*r)) > 0;
    r->priority                              = priority;
    if (is_queued) {
        queue.emplace(place_of(*r), r);
    }
}

void direct_reader::cancel_all() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!queue.empty()) {
        const std::shared_ptr<request> r = queue.begin()->second;
        drop_rest(*r, { READ_CANCELLED, 0, 0 });
        end_if_over(lock, r);
    }
}

void direct_reader::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex);
    idle.wait(lock, [this] { return live.empty(); });
}

void direct_reader::drop_rest(request & r, const read_end & end) {
    queue.erase(place_of(r));
    r.i_range = r.ranges.size();
    if (r.end.result == READ_DONE) {
        r.end = end;
    }
}

// calls what is to be called once no piece is left and none is under way; without the lock
void direct_reader::end_if_over(std::unique_lock<std::mutex> & lock, const std::shared_ptr<request> & r) {
    if (!r->is_cut() || r->n_running > 0 || r->is_ended) {
        return;
    }
    r->is_ended = true;
    lock.unlock();
    r->ended(r->end);
    lock.lock();
    live.erase(r->id);
    if (live.empty()) {
        idle.notify_all();
    }
}

void direct_reader::serve(int i_thread) {
    bounce_buffer                bounce;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
        work.wait(lock, [&] { return is_stopped || (i_thread < wanted_threads.load() && !queue.empty()); });
        if (is_stopped) {
            return;
        }
        const std::shared_ptr<request> r     = queue.begin()->second;
        const read_range               piece = cut_piece(*r);
        if (r->is_cut()) {
            queue.erase(queue.begin());
        }
        r->n_running++;
        lock.unlock();
        const int error = read_piece(piece, r->begin_ns, bounce);
        lock.lock();
        r->n_running--;
        if (error != 0) {
            drop_rest(*r, { READ_FAILED, error, piece.file });
        }
        end_if_over(lock, r);
    }
}

// The next piece of a request. Pieces of a range are about equally long, and begin where a block does.
read_range direct_reader::cut_piece(request & r) const {
    const read_range & range    = r.ranges[r.i_range];
    const size_t       left     = range.size - r.begin;
    const size_t       most     = wanted_piece_bytes.load();
    const size_t       n_pieces = (left + most - 1) / most;
    read_range         piece    = { range.file, range.offset + (int64_t) r.begin, left, range.to + r.begin };
    if (n_pieces > 1) {
        const int64_t unit = (int64_t) direct_alignment;
        const int64_t end  = piece.offset + (int64_t) (left / n_pieces);
        piece.size         = std::min(left, (size_t) ((end + unit - 1) / unit * unit - piece.offset));
    }
    r.begin += piece.size;
    if (r.begin == range.size) {
        r.begin = 0;
        r.i_range++;
    }
    return piece;
}

int direct_reader::read_piece(const read_range & piece, int64_t begin_ns, bounce_buffer & bounce) {
    const int64_t end_ns = rate > 0 ? paced_end(piece.size, begin_ns) : 0;
    int           error  = 0;
    for (size_t attempt = 0;; attempt++) {
        error = files[piece.file]->read(piece.offset, piece.size, piece.to, bounce, faults);
        if (error == 0 || error == DIRECT_FILE_CHANGED || error == DIRECT_FILE_REPLACED ||
            attempt == std::size(retry_after_ns)) {
            break;
        }
        n_retries.fetch_add(1);
        std::unique_lock<std::mutex> lock(mutex);
        if (!sleep_until(lock, now_ns() + retry_after_ns[attempt])) {
            return error;
        }
    }
    if (end_ns > now_ns()) {
        std::unique_lock<std::mutex> lock(mutex);
        sleep_until(lock, end_ns);
    }
    return error;
}

// When a disk of the given rate would have read that many more bytes. It begins when it is free and the request is there, not
// when a thread that overslept comes to it.
int64_t direct_reader::paced_end(size_t size, int64_t begin_ns) {
    std::lock_guard<std::mutex> lock(mutex);
    free_ns = std::max(free_ns, begin_ns) + (int64_t) ((double) size / rate * 1e9);
    return free_ns;
}

bool direct_reader::sleep_until(std::unique_lock<std::mutex> & lock, int64_t time_ns) {
    const std::chrono::steady_clock::time_point time{ std::chrono::nanoseconds(time_ns) };
    return !stopped.wait_until(lock, time, [this] { return is_stopped; });
}

int64_t direct_reader::bytes_read() const {
    int64_t sum = 0;
    for (const auto & file : files) {
        sum += file->bytes_read();
    }
    return sum;
}

bool direct_reader::is_direct() const {
    return std::all_of(files.begin(), files.end(), [](const auto & file) { return file->is_direct(); });
}

std::string direct_reader::describe(const read_end & end) const {
    const std::string & path = files[end.file]->path;
    switch (end.error) {
        case DIRECT_FILE_ENDED:
            return path + " ended before its experts do";
        case DIRECT_FILE_CHANGED:
            return path + " was changed while it was in use";
        case DIRECT_FILE_REPLACED:
            return path + " was deleted or replaced while it was in use";
        default:
            return path + " cannot be read: " + std::generic_category().message(end.error);
    }
}

} // namespace moeedge
