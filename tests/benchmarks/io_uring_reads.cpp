// Reads random ranges of a file past the page cache, with threads or with io_uring; compiled and run by io_uring_speed.py.
//
// io_uring_reads FILE threads|uring DEPTH N_RANGES RANGE_BYTES PIECE_BYTES SEED: prints seconds, processor seconds, bytes.
// Each range goes to memory of its own, which was written before; its pieces are read in order, DEPTH at a time. One io_uring is
// used by one thread, without options.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct piece {
    int64_t offset;
    size_t  size;
    char *  to;
};

[[noreturn]] static void fail(const char * what) {
    std::perror(what);
    std::exit(1);
}

static void read_with_threads(int file, const std::vector<piece> & pieces, int depth) {
    std::atomic<size_t>      next{ 0 };
    std::vector<std::thread> threads;
    for (int t = 0; t < depth; t++) {
        threads.emplace_back([&] {
            for (size_t i = next++; i < pieces.size(); i = next++) {
                if (pread(file, pieces[i].to, pieces[i].size, pieces[i].offset) != (ssize_t) pieces[i].size) {
                    fail("pread");
                }
            }
        });
    }
    for (std::thread & thread : threads) {
        thread.join();
    }
}

template <typename T> static T * at(void * base, uint32_t offset) {
    return (T *) ((char *) base + offset);
}

static void * map_ring(int ring, size_t size, uint64_t which) {
    void * found = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, (off_t) which);
    if (found == MAP_FAILED) {
        fail("mmap of a ring");
    }
    return found;
}

static void read_with_uring(int file, const std::vector<piece> & pieces, int depth) {
    io_uring_params about = {};
    const int       ring  = (int) syscall(SYS_io_uring_setup, depth, &about);
    if (ring < 0) {
        fail("io_uring_setup");
    }
    const size_t   sq_bytes  = about.sq_off.array + about.sq_entries * sizeof(uint32_t);
    const size_t   cq_bytes  = about.cq_off.cqes + about.cq_entries * sizeof(io_uring_cqe);
    const size_t   sqe_bytes = about.sq_entries * sizeof(io_uring_sqe);
    void *         sq        = map_ring(ring, sq_bytes, IORING_OFF_SQ_RING);
    void *         cq        = map_ring(ring, cq_bytes, IORING_OFF_CQ_RING);
    io_uring_sqe * entries   = (io_uring_sqe *) map_ring(ring, sqe_bytes, IORING_OFF_SQES);
    uint32_t *     sq_tail   = at<uint32_t>(sq, about.sq_off.tail);
    uint32_t *     sq_array  = at<uint32_t>(sq, about.sq_off.array);
    const uint32_t sq_mask   = *at<uint32_t>(sq, about.sq_off.ring_mask);
    uint32_t *     cq_head   = at<uint32_t>(cq, about.cq_off.head);
    uint32_t *     cq_tail   = at<uint32_t>(cq, about.cq_off.tail);
    const uint32_t cq_mask   = *at<uint32_t>(cq, about.cq_off.ring_mask);
    io_uring_cqe * results   = at<io_uring_cqe>(cq, about.cq_off.cqes);

    size_t n_begun = 0, n_done = 0;
    while (n_done < pieces.size()) {
        uint32_t n_new = 0;
        uint32_t tail  = *sq_tail;
        for (; n_begun < pieces.size() && n_begun - n_done < (size_t) depth; n_begun++, n_new++, tail++) {
            const uint32_t index = tail & sq_mask;
            io_uring_sqe & entry = entries[index];
            std::memset(&entry, 0, sizeof(entry));
            entry.opcode    = IORING_OP_READ;
            entry.fd        = file;
            entry.off       = (uint64_t) pieces[n_begun].offset;
            entry.addr      = (uint64_t) pieces[n_begun].to;
            entry.len       = (uint32_t) pieces[n_begun].size;
            entry.user_data = n_begun;
            sq_array[index] = index;
        }
        __atomic_store_n(sq_tail, tail, __ATOMIC_RELEASE);
        if (syscall(SYS_io_uring_enter, ring, n_new, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 && errno != EINTR) {
            fail("io_uring_enter");
        }
        uint32_t head = *cq_head;
        for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); head++, n_done++) {
            const io_uring_cqe & result = results[head & cq_mask];
            if (result.res != (int32_t) pieces[result.user_data].size) {
                errno = result.res < 0 ? -result.res : EIO;
                fail("a read of io_uring");
            }
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
    close(ring);
}

static double cpu_s() {
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double) (used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e-6 * (double) (used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

int main(int argc, char ** argv) {
    if (argc != 8) {
        return 2;
    }
    const bool    has_ring    = std::string(argv[2]) == "uring";
    const int     depth       = std::atoi(argv[3]);
    const size_t  n_ranges    = std::strtoull(argv[4], nullptr, 10);
    const int64_t range_bytes = std::atoll(argv[5]);
    const int64_t piece_bytes = std::atoll(argv[6]);
    const int     file        = open(argv[1], O_RDONLY | O_DIRECT);
    struct stat   status;
    if (file < 0 || fstat(file, &status) != 0) {
        fail(argv[1]);
    }
    std::vector<int64_t> places((size_t) (status.st_size / range_bytes));
    for (size_t i = 0; i < places.size(); i++) {
        places[i] = (int64_t) i * range_bytes;
    }
    std::shuffle(places.begin(), places.end(), std::mt19937_64(std::strtoull(argv[7], nullptr, 10)));
    places.resize(std::min(places.size(), n_ranges));

    const size_t size   = places.size() * (size_t) range_bytes;
    char *       memory = (char *) std::aligned_alloc(4096, size);
    std::memset(memory, 1, size);
    std::vector<piece> pieces;
    for (size_t i = 0; i < places.size(); i++) {
        for (int64_t begin = 0; begin < range_bytes; begin += piece_bytes) {
            const int64_t n = std::min(piece_bytes, range_bytes - begin);
            pieces.push_back({ places[i] + begin, (size_t) n, memory + (int64_t) i * range_bytes + begin });
        }
    }
    const double before_cpu_s = cpu_s();
    const auto   before       = std::chrono::steady_clock::now();
    (has_ring ? read_with_uring : read_with_threads)(file, pieces, depth);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - before;
    std::printf("%.6f %.6f %zu\n", seconds.count(), cpu_s() - before_cpu_s, size);
    return 0;
}
