#include "expert-source.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moeedge {

expert_source::~expert_source() {
    for (int file : files) {
        ::close(file);
    }
}

// bytes of a file, -1 if unknown
static int64_t size_of(int file) {
    struct stat status;
    return fstat(file, &status) == 0 ? (int64_t) status.st_size : -1;
}

bool expert_source::open(const moeedge_cache_config & config, const expert_layout & of, std::string & error) {
    layout = &of;
    std::vector<int64_t> sizes;
    for (int i = 0; i < config.n_files; i++) {
        const int file = ::open(config.files[i], O_RDONLY | O_CLOEXEC);
        if (file < 0) {
            error = std::string(config.files[i]) + " cannot be opened: " + std::strerror(errno) + ".";
            return false;
        }
        files.push_back(file);
        sizes.push_back(size_of(file));
    }
    ranges.resize(files.size());
    for (int layer = 0; layer < of.n_layers; layer++) {
        for (const expert_slice & slice : of.slices[layer]) {
            file_range & range = ranges[slice.file];
            range.begin        = std::min(range.begin, slice.offset);
            range.end          = std::max(range.end, slice.of(of.n_experts - 1) + (int64_t) slice.bytes);
            if (range.end > sizes[slice.file]) {
                error = std::string(config.files[slice.file]) + " ends before the experts of layer " +
                        std::to_string(layer) + " do.";
                return false;
            }
        }
    }
    return true;
}

void expert_source::set_other(other_source from) {
    std::lock_guard<std::mutex> lock(mutex);
    other.swap(from);
}

expert_source::other_source expert_source::get_other() const {
    std::lock_guard<std::mutex> lock(mutex);
    return other;
}

bool expert_source::read(int layer, int role, int expert, size_t begin, size_t size, bool is_urgent, void * out) const {
    const other_source from = get_other();
    if (!from) {
        return read_file(layer, role, expert, begin, size, out);
    }
    const size_t each = layout->slices[layer][role].bytes;
    char *       to   = (char *) out;
    while (size > 0) {
        const int           at     = expert + (int) (begin / each);
        const size_t        within = begin % each;
        const size_t        n      = std::min(size, each - within);
        const source_result result = from(layer, role, at, within, n, is_urgent, to);
        if (result == SOURCE_FAILED || (result == SOURCE_NOT_THERE && !read_file(layer, role, at, within, n, to))) {
            return false;
        }
        begin += n;
        to += n;
        size -= n;
    }
    return true;
}

bool expert_source::read_file(int layer, int role, int expert, size_t begin, size_t size, void * out) const {
    const expert_slice & slice  = layout->slices[layer][role];
    int64_t              offset = slice.of(expert) + (int64_t) begin;
    char *               to     = (char *) out;
    while (size > 0) {
        const ssize_t n = pread(files[slice.file], to, size, offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return false;
        }
        to += n;
        offset += n;
        size -= (size_t) n;
    }
    return true;
}

using register_call   = bool (*)(void *, size_t);
using unregister_call = void (*)(void *);

void expert_source::pin(ggml_backend_reg_t driver) {
    const auto pin_pages = (register_call) ggml_backend_reg_get_proc_address(driver, "ggml_backend_register_host_buffer");
    unregister = (unregister_call) ggml_backend_reg_get_proc_address(driver, "ggml_backend_unregister_host_buffer");
    if (pin_pages == nullptr || unregister == nullptr) {
        return;
    }
    const int64_t page = sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < files.size(); i++) {
        file_range & range = ranges[i];
        if (range.end == 0) {
            continue;
        }
        range.begin = range.begin / page * page;
        void * data = mmap(nullptr, range.size(), PROT_READ, MAP_SHARED, files[i], range.begin);
        if (data != MAP_FAILED && pin_pages(data, range.size())) {
            range.data = (char *) data;
        } else { // all or none
            if (data != MAP_FAILED) {
                munmap(data, range.size());
            }
            unpin();
            return;
        }
    }
}

void expert_source::unpin() {
    for (file_range & range : ranges) {
        if (range.data) {
            unregister(range.data);
            munmap(range.data, range.size());
            range.data = nullptr;
        }
    }
}

const char * expert_source::pinned(int layer, int role, int expert, size_t begin) const {
    const expert_slice & slice = layout->slices[layer][role];
    const file_range &   range = ranges[slice.file];
    return range.data == nullptr || get_other() ? nullptr : range.data + (slice.of(expert) - range.begin) + begin;
}

int64_t expert_source::pinned_bytes() const {
    int64_t bytes = 0;
    for (const file_range & range : ranges) {
        bytes += range.data ? (int64_t) range.size() : 0;
    }
    return bytes;
}

bool expert_source::is_dense(int layer) const {
    const std::vector<expert_slice> & slices = layout->slices[layer];
    return std::all_of(slices.begin(), slices.end(), [](const expert_slice & slice) { return slice.stride == (int64_t) slice.bytes; });
}

void expert_source::announce(int layer, int expert) const {
    if (get_other()) { // it does not read by way of the page cache
        return;
    }
#if defined(POSIX_FADV_WILLNEED)
    for (const expert_slice & slice : layout->slices[layer]) {
        posix_fadvise(files[slice.file], slice.of(expert), (off_t) slice.bytes, POSIX_FADV_WILLNEED);
    }
#else
    (void) layer;
    (void) expert;
#endif
}

} // namespace moeedge
