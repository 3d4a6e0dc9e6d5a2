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
    for (int layer = 0; layer < of.n_layers; layer++) {
        for (size_t r = 0; r < of.slices[layer].size(); r++) {
            const expert_slice & slice = of.slices[layer][r];
            const int64_t        bytes = (int64_t) of.groups[of.group_of[layer]].roles[r].bytes;
            if (slice.offset + (of.n_experts - 1) * slice.stride + bytes > sizes[slice.file]) {
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
    const size_t each = layout->groups[layout->group_of[layer]].roles[role].bytes;
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
    int64_t              offset = slice.offset + expert * slice.stride + (int64_t) begin;
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
    std::vector<int64_t> begins(files.size(), INT64_MAX), ends(files.size(), 0);
    for (int layer = 0; layer < layout->n_layers; layer++) {
        for (size_t r = 0; r < layout->slices[layer].size(); r++) {
            const expert_slice & slice = layout->slices[layer][r];
            const int64_t        bytes = (int64_t) layout->groups[layout->group_of[layer]].roles[r].bytes;
            begins[slice.file]         = std::min(begins[slice.file], slice.offset);
            ends[slice.file]           = std::max(ends[slice.file], slice.offset + (layout->n_experts - 1) * slice.stride + bytes);
        }
    }
    const int64_t page = sysconf(_SC_PAGESIZE);
    ranges.resize(files.size());
    for (size_t i = 0; i < files.size(); i++) {
        if (ends[i] == 0) {
            continue;
        }
        const int64_t begin = begins[i] / page * page;
        const size_t  size  = (size_t) (ends[i] - begin);
        void *        data  = mmap(nullptr, size, PROT_READ, MAP_SHARED, files[i], begin);
        if (data != MAP_FAILED && pin_pages(data, size)) {
            ranges[i] = { (char *) data, begin, size };
        } else { // all or none
            if (data != MAP_FAILED) {
                munmap(data, size);
            }
            unpin();
            return;
        }
    }
}

void expert_source::unpin() {
    for (const pinned_range & range : ranges) {
        if (range.data) {
            unregister(range.data);
            munmap(range.data, range.size);
        }
    }
    ranges.clear();
}

const char * expert_source::pinned(int layer, int role, int expert, size_t begin) const {
    if (ranges.empty() || get_other()) {
        return nullptr;
    }
    const expert_slice & slice = layout->slices[layer][role];
    return ranges[slice.file].data + (slice.offset - ranges[slice.file].begin) + expert * slice.stride + (int64_t) begin;
}

int64_t expert_source::pinned_bytes() const {
    int64_t bytes = 0;
    for (const pinned_range & range : ranges) {
        bytes += (int64_t) range.size;
    }
    return bytes;
}

bool expert_source::is_dense(int layer) const {
    const expert_group & group = layout->groups[layout->group_of[layer]];
    for (size_t r = 0; r < group.roles.size(); r++) {
        if (layout->slices[layer][r].stride != (int64_t) group.roles[r].bytes) {
            return false;
        }
    }
    return true;
}

void expert_source::announce(int layer, int expert) const {
    if (get_other()) { // it does not read by way of the page cache
        return;
    }
#if defined(POSIX_FADV_WILLNEED)
    const expert_group & group = layout->groups[layout->group_of[layer]];
    for (size_t r = 0; r < group.roles.size(); r++) {
        const expert_slice & slice = layout->slices[layer][r];
        posix_fadvise(files[slice.file], slice.offset + expert * slice.stride, (off_t) group.roles[r].bytes,
                      POSIX_FADV_WILLNEED);
    }
#else
    (void) layer;
    (void) expert;
#endif
}

} // namespace moeedge
