#include "direct-file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

#include "timing.h"

namespace moeedge {

// how often a file's path is looked up
static constexpr int64_t look_up_ns = 2'000'000'000;

char * bounce_buffer::reserve(size_t size) {
    if (size > capacity) {
        void * block = nullptr;
        data.reset();
        capacity = 0;
        if (posix_memalign(&block, direct_alignment, size) != 0) {
            return nullptr;
        }
        data.reset(block);
        capacity = size;
    }
    return (char *) data.get();
}

direct_file::~direct_file() {
    if (descriptor >= 0) {
        ::close(descriptor);
    }
}

// what ordinary reads ask of the system: no pages beyond those that are read, and where it can, none that stay
static void avoid_cache(int file) {
#if defined(F_NOCACHE)
    fcntl(file, F_NOCACHE, 1);
#elif defined(POSIX_FADV_RANDOM)
    posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);
#else
    (void) file;
#endif
}

bool direct_file::open(const char * name, bool is_buffered, std::string & error) {
    path = std::filesystem::absolute(name).string(); // the process may change its directory
#if defined(O_DIRECT)
    if (!is_buffered) {
        descriptor = ::open(name, O_RDONLY | O_CLOEXEC | O_DIRECT);
        direct.store(descriptor >= 0);
    }
#else
    (void) is_buffered;
#endif
    if (descriptor < 0) {
        descriptor = ::open(name, O_RDONLY | O_CLOEXEC);
    }
    if (descriptor < 0 || fstat(descriptor, &opened) != 0) {
        error = path + " cannot be opened: " + std::strerror(errno) + ".";
        return false;
    }
    if (!is_direct()) {
        avoid_cache(descriptor);
    }
    checked_ns.store(now_ns());
    return true;
}

static const timespec & modified(const struct stat & status) {
#if defined(__APPLE__)
    return status.st_mtimespec;
#else
    return status.st_mtim;
#endif
}

// Every writer changes the time of modification before it changes a byte. So what was read before this check is of the file
// that was opened, unless the check fails.
int direct_file::check() {
    struct stat status;
    if (fstat(descriptor, &status) != 0) {
        return errno;
    }
    if (status.st_size != opened.st_size || modified(status).tv_sec != modified(opened).tv_sec ||
        modified(status).tv_nsec != modified(opened).tv_nsec) {
        return DIRECT_FILE_CHANGED;
    }
    const int64_t now  = now_ns();
    int64_t       last = checked_ns.load();
    if (now - last < look_up_ns || !checked_ns.compare_exchange_strong(last, now)) {
        return 0;
    }
    const bool is_found = stat(path.c_str(), &status) == 0;
    if (is_found ? status.st_ino != opened.st_ino || status.st_dev != opened.st_dev : errno == ENOENT) {
        checked_ns.store(last); // later reads find the same
        return DIRECT_FILE_REPLACED;
    }
    return 0;
}

int direct_file::read(int64_t offset, size_t size, char * to, bounce_buffer & bounce, read_faults & faults) {
    int result = EINVAL;
    if (is_direct()) {
        result = read_direct(offset, size, to, bounce, faults);
    }
#if defined(O_DIRECT)
    if (result == EINVAL && is_direct()) { // the file system opens files for direct reads and has none
        fcntl(descriptor, F_SETFL, fcntl(descriptor, F_GETFL) & ~O_DIRECT);
        direct.store(false);
        avoid_cache(descriptor);
    }
#endif
    if (result == EINVAL) {
        result = read_buffered(offset, size, to, faults);
    }
    const int state = check(); // a file that was changed explains every error
    return state != 0 ? state : result;
}

int direct_file::read_direct(int64_t offset, size_t size, char * to, bounce_buffer & bounce, read_faults & faults) {
    const int64_t unit  = (int64_t) direct_alignment;
    const int64_t begin = offset / unit * unit;
    const int64_t end   = offset + (int64_t) size;
    const size_t  bytes = (size_t) ((end + unit - 1) / unit * unit - begin);
    char *        data  = bounce.reserve(bytes);
    if (data == nullptr) {
        return ENOMEM;
    }
    for (int64_t at = begin; at < end;) {
        const ssize_t n = faults.read(descriptor, data + (at - begin), bytes - (size_t) (at - begin), at);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return errno;
        }
        n_bytes.fetch_add(n, std::memory_order_relaxed);
        const int64_t next = at + n >= end ? end : (at + n) / unit * unit;
        if (next <= at) {
            return DIRECT_FILE_ENDED;
        }
        at = next;
    }
    std::memcpy(to, data + (offset - begin), size);
    return 0;
}

int direct_file::read_buffered(int64_t offset, size_t size, char * to, read_faults & faults) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = faults.read(descriptor, to + done, size - done, offset + (int64_t) done);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return n < 0 ? errno : DIRECT_FILE_ENDED;
        }
        n_bytes.fetch_add(n, std::memory_order_relaxed);
        done += (size_t) n;
    }
#if defined(POSIX_FADV_DONTNEED)
    posix_fadvise(descriptor, (off_t) offset, (off_t) size, POSIX_FADV_DONTNEED);
#endif
    return 0;
}

} // namespace moeedge
