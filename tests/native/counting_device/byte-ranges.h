// A set of byte ranges, of the device's and the host's addresses alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace counting {

class byte_ranges {
  public:
    void add(const void * begin, size_t bytes) {
        if (bytes > 0) {
            ranges.push_back({ (uintptr_t) begin, (uintptr_t) begin + bytes });
            is_sorted = false;
        }
    }

    void add(const byte_ranges & other) {
        ranges.insert(ranges.end(), other.ranges.begin(), other.ranges.end());
        is_sorted = false;
    }

    bool empty() const { return ranges.empty(); }

    bool overlaps(const byte_ranges & other) const { return !intersection(other).empty(); }

    byte_ranges intersection(const byte_ranges & other) const {
        sort();
        other.sort();
        byte_ranges shared;
        for (size_t i = 0, k = 0; i < ranges.size() && k < other.ranges.size();) {
            const uintptr_t begin = std::max(ranges[i].begin, other.ranges[k].begin);
            const uintptr_t end   = std::min(ranges[i].end, other.ranges[k].end);
            if (begin < end) {
                shared.ranges.push_back({ begin, end });
            }
            (ranges[i].end < other.ranges[k].end ? i : k)++;
        }
        return shared;
    }

  private:
    struct range {
        uintptr_t begin, end;
    };

    // ascending and disjoint
    void sort() const {
        if (is_sorted || ranges.empty()) {
            return;
        }
        std::sort(ranges.begin(), ranges.end(), [](const range & a, const range & b) { return a.begin < b.begin; });
        size_t n = 0;
        for (const range & next : ranges) {
            if (n > 0 && next.begin <= ranges[n - 1].end) {
                ranges[n - 1].end = std::max(ranges[n - 1].end, next.end);
            } else {
                ranges[n++] = next;
            }
        }
        ranges.resize(n);
        is_sorted = true;
    }

    mutable std::vector<range> ranges;
    mutable bool               is_sorted = true;
};

} // namespace counting
