// Graph snapshot: what a GPU takes over when a graph is launched. The caller may change or free its graph and tensors
// afterwards; the snapshot has copies, whose data are where the device's memory really is.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "byte-ranges.h"
#include "ggml-impl.h"

namespace counting {

class graph_snapshot {
  public:
    explicit graph_snapshot(const ggml_cgraph * graph);
    ~graph_snapshot();
    graph_snapshot(const graph_snapshot &)             = delete;
    graph_snapshot & operator=(const graph_snapshot &) = delete;

    ggml_cgraph * graph() { return &copy; }

    // nodes that compute something
    int                 n_computing = 0;
    const std::string & name() const { return last_name; }
    // a tensor that is not in the device's memory; empty: all are
    std::string foreign;

    // what the graph reads and writes, as the caller addresses it
    byte_ranges reads, writes;
    // tables of which a computed index picks the parts that are read (experts by MUL_MAT_ID, biases by ADD_ID)
    byte_ranges tables;
    // after the graph has run: the parts
    byte_ranges picked() const;

  private:
    ggml_tensor * copy_tensor(const ggml_tensor * tensor);
    void          add_ranges(const ggml_tensor * node);

    struct lookup {
        const ggml_tensor * ids;   // the copy
        const char *        table; // as the caller addresses it
        size_t              stride, bytes;
        int64_t             n;
    };

    ggml_cgraph                copy = {};
    std::deque<ggml_tensor>    tensors;
    std::vector<ggml_tensor *> nodes;
    std::vector<int32_t>       use_counts;
    std::vector<lookup>        lookups;
    std::string                last_name;
};

} // namespace counting
