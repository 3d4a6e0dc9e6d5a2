// Direct reader: threads that read ranges of files into memory past the page cache, several at once.
//
// A disk gives its full rate to several requests under way of about a megabyte each, which is less than an expert has. So a
// request is cut into pieces, and a thread that is free takes the next piece of the request that comes first: by priority, then
// in the order of arrival. A request of higher priority overtakes others between two of their pieces.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "direct-file.h"

namespace moeedge {

struct read_range {
    int     file;
    int64_t offset;
    size_t  size;
    char *  to;
};

enum read_result { READ_DONE, READ_FAILED, READ_CANCELLED };

// how a request ended
struct read_end {
    read_result result;
    int         error; // see direct_file::read; 0 unless the read failed
    int         file;  // whose read failed
};

class direct_reader : no_copy {
  public:
    using end_call = std::function<void(const read_end &)>;

    // bytes_per_s: the most that all threads read together, 0: not limited
    explicit direct_reader(double bytes_per_s);
    // cancels all requests and waits for the pieces under way
    ~direct_reader();

    // false with the reason in `error`
    bool open(const char * const * paths, int n_paths, bool is_buffered, std::string & error);
    // threads, which is the number of pieces under way, and bytes of a piece, about; from any thread
    void set(int n_threads, size_t piece_bytes);

    // Starts to read; `ended` is called once, without a lock, by a thread of the reader or by the one that cancels. Returns the
    // request's id. Neither the ranges nor what they are read into may be empty
    int64_t enqueue(std::vector<read_range> ranges, int priority, end_call ended);
    // moves a request forward; one that has ended, or has as high a priority, stays
    void raise(int64_t id, int priority);
    // drops what of all requests is not under way; they end after the pieces that are
    void cancel_all();
    // waits until no request is queued or under way, and its call has returned
    void wait_idle();

    read_faults faults;

    int         n_threads() const { return wanted_threads.load(); }
    size_t      piece_bytes() const { return wanted_piece_bytes.load(); }
    int64_t     bytes_read() const; // blocks as a whole
    int64_t     retries() const { return n_retries.load(); }
    // whether all files are read past the page cache
    bool        is_direct() const;
    // one sentence without its full stop: what went wrong with a file
    std::string describe(const read_end & end) const;

  private:
    struct request {
        int64_t                 id;
        int64_t                 begin_ns; // when it was enqueued
        int                     priority;
        std::vector<read_range> ranges;
        size_t                  i_range   = 0; // the next piece: range, and byte in it
        size_t                  begin     = 0;
        int                     n_running = 0; // pieces
        end_call                ended;
        read_end                end      = { READ_DONE, 0, 0 };
        bool                    is_ended = false; // its call has begun

        bool is_cut() const { return i_range == ranges.size(); } // no piece is left
    };
    using place = std::pair<int, int64_t>; // -priority, id: the first one is read first

    static place place_of(const request & r) { return { -r.priority, r.id }; }

    void       start_threads();
    void       serve(int i_thread);
    read_range cut_piece(request & r) const;
    int        read_piece(const read_range & piece, int64_t begin_ns, bounce_buffer & bounce);
    int64_t    paced_end(size_t size, int64_t begin_ns);
    bool       sleep_until(std::unique_lock<std::mutex> & lock, int64_t time_ns);
    void       drop_rest(request & r, const read_end & end);
    void       end_if_over(std::unique_lock<std::mutex> & lock, const std::shared_ptr<request> & r);

    std::vector<std::unique_ptr<direct_file>> files;
    const double                              rate; // bytes per s; 0: not limited

    std::atomic<int>     wanted_threads;
    std::atomic<size_t>  wanted_piece_bytes;
    std::atomic<int64_t> n_retries{ 0 };

    std::mutex                                           mutex; // guards the members below
    std::condition_variable                              work;
    std::condition_variable                              stopped;
    std::condition_variable                              idle;
    std::vector<std::thread>                             threads;
    std::map<place, std::shared_ptr<request>>            queue; // requests with pieces that are not under way
    std::unordered_map<int64_t, std::shared_ptr<request>> live; // that have not ended, and those whose call is under way
    int64_t                                              last_id    = 0;
    int64_t                                              free_ns    = 0; // when a paced disk is free again
    bool                                                 is_stopped = false;
};

} // namespace moeedge
