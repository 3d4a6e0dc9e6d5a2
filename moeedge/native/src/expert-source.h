// Expert source: the bytes of single experts, read from the model's own files.
//
// llama.cpp may keep experts repacked for the CPU's kernels, in a form that no device can use. Reads are positioned ones
// into the caller's memory: unlike a second mapping they do not add to the process's resident memory, and a file that is
// truncated while in use makes a read fail instead of ending the process. Only where a device's driver pins the pages they are
// mapped, for the device alone.

#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "expert-layout.h"
#include "ggml-backend.h"
#include "no-copy.h"

namespace moeedge {

enum source_result { SOURCE_READ, SOURCE_FAILED, SOURCE_NOT_THERE };

class expert_source : no_copy {
  public:
    // another place of the experts' bytes: part of one role of one expert. SOURCE_NOT_THERE: it is closed
    using other_source = std::function<source_result(int layer, int role, int expert, size_t begin, size_t size, bool is_urgent, void * out)>;

    ~expert_source();

    // opens the files and checks that they hold all of the layout; false with the reason in `error`
    bool open(const moeedge_cache_config & config, const expert_layout & layout, std::string & error);

    // lets that place be read instead of the files, also while others read; empty: the files
    void set_other(other_source from);

    // `size` bytes of an expert's role from byte `begin` on, continuing into the next experts; false if the file cannot be
    // read. is_urgent: a computation waits for them
    bool read(int layer, int role, int expert, size_t begin, size_t size, bool is_urgent, void * out) const;
    // whether the next expert's bytes follow an expert's directly, in every role
    bool is_dense(int layer) const;
    // Maps the experts' part of each file and has the driver of a device pin its pages, so that the device reads them by
    // itself. Nothing changes where it cannot.
    void pin(ggml_backend_reg_t driver);
    // unpins, when nothing reads them any more
    void unpin();
    // bytes of a role of experts, as `read` gives, for the device to read; null: they are not pinned, or elsewhere
    const char * pinned(int layer, int role, int expert, size_t begin) const;
    int64_t      pinned_bytes() const;
    // asks the system to read an expert's bytes soon; does not wait
    void announce(int layer, int expert) const;

  private:
    other_source get_other() const;
    bool         read_file(int layer, int role, int expert, size_t begin, size_t size, void * out) const;

    mutable std::mutex    mutex; // guards `other`
    other_source          other;
    const expert_layout * layout = nullptr;
    std::vector<int>      files; // descriptors

    struct file_range {
        int64_t begin = INT64_MAX;
        int64_t end   = 0;
        char *  data  = nullptr; // pinned

        size_t size() const { return (size_t) (end - begin); }
    };
    std::vector<file_range> ranges; // by file; what experts have of it
    void (*unregister)(void *) = nullptr;
};

} // namespace moeedge
