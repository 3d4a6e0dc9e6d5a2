// Table: which expert is in which slot, what is to be moved, and what must not be touched.
//
// One mutex guards everything; every section under it is short and none allocates but to take a plan over. An expert is
// absent, in flight (it has a slot whose bytes are not valid yet) or resident. A slot is free, or belongs to one expert; a
// pinned one is being computed with and stays.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "layout.h"

namespace moeedge {

enum residency : uint8_t { absent = 0, resident = 1, in_flight = 2 };

struct expert_id {
    int layer, expert;
};

struct upload {
    expert_id what;
    int       slot;
    int64_t   bytes;
    int64_t   ready_ns; // it could have begun then
    expert_id ahead;    // one that follows some uploads later, layer -1: none
};

class residency_table {
  public:
    static constexpr int no_slot = -1;

    // capacity [n_groups], in slots
    residency_table(const expert_layout & layout, const std::vector<int> & capacity);

    // the computing side; see cache.h
    int  acquire(int layer, const int32_t * experts, int n, int32_t * slots);
    void release(int layer, const int32_t * slots, int n);
    bool has_resident(int layer) const;

    // the planning side

    // see moeedge_cache_plan; false: an expert in it does not exist, and nothing has changed
    bool plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
              const float * utility, int n_victims);
    // see moeedge_cache_demand; how many of the experts are resident in the end, or -1: one of them does not exist
    int  demand(int layer, const int32_t * experts, int n, const int32_t * victims, const float * utility, int n_victims,
                double timeout_s);
    void copy_residency(uint8_t * out);
    void add_stats(moeedge_cache_stats & stats);
    enum class outcome { done, timeout, stopped };
    outcome drain(double timeout_s);
    outcome clear();

    // the mover

    enum class found { upload, nothing, stopped };
    // the uploads to do next, whose experts are now in flight: the first one, and up to `n_max` of its layer in all, experts
    // and slots both ascending; waits for one if `may_wait`
    found take(std::vector<upload> & out, int n_max, bool may_wait);
    void  finish(const upload & done, bool arrived);
    // or until stopped
    void wait_until(std::chrono::steady_clock::time_point time);
    // until nothing is computed with, but not longer than that
    void wait_unpinned(std::chrono::milliseconds at_most);

    // nothing is taken, found or pinned any more
    void stop();

  private:
    struct queued {
        int32_t entry; // layer * n_experts + expert
        uint8_t level;
    };
    struct victim {
        int32_t entry;
        float   utility;
        int32_t rank; // in the plan, for equal utilities
        bool    by_demand = false; // may go as long as that waits
        bool    operator<(const victim & other) const; // as the standard heap has it: the greatest is evicted first
    };
    struct group_state {
        int64_t              expert_bytes = 0;
        std::vector<int32_t> owner;    // [n_slots] entry, -1: free or on its way
        std::vector<int32_t> pins;     // [n_slots]
        std::vector<int32_t> free;     // slots, the next one last
        std::vector<queued>  queue;    // from `head` on
        size_t               head = 0;
        std::vector<victim>  victims;  // heap
        std::vector<victim>  deferred; // would have been next, but for their pins
    };
    struct new_plan {
        std::vector<std::vector<queued>> queues;  // [n_groups]
        std::vector<std::vector<victim>> victims; // [n_groups]
    };

    int       layer_of(int32_t entry) const { return entry / n_experts; }
    expert_id id_of(int32_t entry) const { return { entry / n_experts, entry % n_experts }; }
    int  entry_of(const int32_t * pair) const; // -1: there is no such expert
    bool sort_plan(const int32_t * uploads, const uint8_t * levels, int n_uploads, const int32_t * victims,
                   const float * utility, int n_victims, new_plan & out);
    void cancel_queue(group_state & group);

    group_state * next_group();
    bool          skip_to_absent(group_state & group);
    bool          find_room(group_state & group);
    upload        start(group_state & group);
    void          pair_in_order(std::vector<upload> & uploads);
    void          spare(group_state & group, const std::vector<int32_t> & entries);
    void          end_demand(group_state & group);
    void          evict(group_state & group, int32_t entry);
    void          restore_deferred(group_state & group, int32_t slot);
    bool          is_idle() const;

    const int        n_experts;
    std::vector<int> group_of; // [n_layers]

    std::mutex                    plan_mutex; // one plan at a time
    std::vector<int64_t>          asked;      // [entries] the last plan that wants it; under plan_mutex
    std::vector<int64_t>          offered;    // [entries] the last plan that gives it up; under plan_mutex
    int64_t                       n_plans = 0;

    std::mutex                    mutex; // everything below
    std::condition_variable       work;  // for the mover
    std::condition_variable       rest;  // for drain and clear
    std::vector<group_state>      groups;
    std::vector<uint8_t>          state; // [entries] residency
    std::vector<int32_t>          slot;  // [entries] no_slot: absent
    std::vector<std::atomic<int>> n_resident; // [n_layers], read without the mutex
    std::atomic<bool>             is_stopped{ false };
    bool                          is_resting  = false; // the mover found nothing to do
    int64_t                       n_in_flight = 0;
    int64_t                       n_pins      = 0;
    int                           n_demands   = 0; // callers that wait for single experts
    int64_t                       busy_from_ns = 0;
    int64_t                       ready_ns     = 0; // when a plan or a free slot came last
    moeedge_cache_stats           counts = {};
};

} // namespace moeedge
