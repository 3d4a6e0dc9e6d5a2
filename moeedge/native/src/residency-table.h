// Residency table: which expert is in which slot, which experts are to be moved, and which slots must not be touched.
//
// One mutex guards all state; every section under it is short, and pinning and releasing slots allocate nothing. An expert is
// absent, in flight (it has a slot whose bytes are not valid yet) or resident. A slot is free, or belongs to one expert; a
// pinned slot is in use by a computation and stays. Experts are named by their flat index, layer * n_experts + expert.
//
// residency-table.cpp has the computing side, residency-moves.cpp the mover's side, residency-plan.cpp the planning side,
// residency-limit.cpp what happens when memory runs short.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "expert-layout.h"

namespace moeedge {

struct expert_id {
    int layer, expert;
};

struct upload {
    expert_id id;
    int       slot;
    int64_t   bytes;
    int64_t   ready_ns;   // time from which it could have begun
    expert_id read_ahead; // an expert that follows some uploads later, layer -1: none
    uint8_t   priority;
};

// experts that may be evicted: pairs [n, 2] (layer, expert), the lowest utility first
struct victim_list {
    const int32_t * pairs;
    const float *   utility;
    int             n;
};

// whether who waits should stop
using stop_call = std::function<bool()>;

// what is done to the memory of a group's slots where it is given back (`limit`)
struct slot_memory {
    std::function<void(int group, int from, int to)>   copy;
    std::function<void(int group, int begin, int end)> give_back; // slots [begin, end), whose bytes are not needed any more
};

enum take_result { TAKE_UPLOADS, TAKE_NONE, TAKE_STOPPED };

class residency_table {
  public:
    static constexpr int     no_slot         = -1;
    static constexpr int     await_stopped   = -1;
    static constexpr int     await_closed    = -2;
    static constexpr uint8_t demand_priority = UINT8_MAX; // above every priority of a plan
    static constexpr uint8_t ahead_priority  = demand_priority - 1;
    // how often a thread that waits for experts asks whether it should stop
    static constexpr auto    stop_interval   = std::chrono::milliseconds(25);

    // capacity [n_groups], in slots
    residency_table(const expert_layout & layout, const std::vector<int> & capacity, slot_memory memory);

    // computing side; see expert_cache

    int  acquire(int layer, const int32_t * experts, int n, int32_t * slots);
    void release(int layer, const int32_t * slots, int n);
    bool has_resident(int layer) const;

    // computing side of a cache that loads on demand; one thread computes

    // Queues the absent ones of a layer's experts [n] before all else. None of them is evicted until it is released or
    // forgotten; the unpinned expert of the lowest utility goes for them, of equal ones the one that was used longest ago.
    // shares [n]: for a batch that needs nearly all experts of each layer, the share of its tokens that uses each; null for
    // others. Such a batch uses an expert of a later layer sooner than those of the layers that it has passed: these go first,
    // and a share counts as utility until the next set_utilities.
    void want(int layer, const int32_t * experts, int n, const float * shares = nullptr);
    // Queues the absent ones of a coming layer's experts [n] after what is wanted, before all plans. Until that layer's turn,
    // one of them is evicted only for a wanted expert that finds no other. What such a batch needs in a later layer does not
    // go for them.
    void read_ahead(int layer, const int32_t * experts, int n);
    // the next layer whose experts are in the cache, the first after the last
    int  layer_after(int layer) const;
    // Waits until some of the wanted experts [n] are resident, and pins these as acquire does. Returns how many; 0: one cannot
    // be loaded; await_closed: the table is stopped; await_stopped: should_stop, asked now and then without the lock, says so
    int  await(int layer, const int32_t * experts, int n, int32_t * slots, const stop_call & should_stop);
    // experts [n] that were wanted may be evicted, and those that are queued need not be loaded
    void forget(int layer, const int32_t * experts, int n);

    // planning side; see the moeedge_cache_* functions. They return a moeedge_status, demand a count as well

    int  plan(const int32_t * uploads, const uint8_t * priority, int n_uploads, const victim_list & victims);
    int  demand(int layer, const int32_t * experts, int n, const victim_list & victims, double timeout_s);
    int  drain(double timeout_s);
    int  clear(double timeout_s);
    // [n_layers * n_experts], zeros at first
    void set_utilities(const float * values);
    // Uses only the first slots of each group from now on, about n_slots in all and at least one of each; the most useful experts
    // stay, by copies if need be, and all others are evicted; what a computation uses or waits for, once it no longer does. A
    // larger number takes slots into use again. Returns how many there are now; from any thread, and no other one waits for it
    int  limit(int n_slots);
    std::vector<int> limits(); // [n_groups]
    void copy_residency(uint8_t * out);
    void add_stats(moeedge_cache_stats & stats);

    // mover's side

    // The uploads to do next, whose experts are now in flight: the first one, and up to `n_max` of its layer in all, experts
    // and slots both ascending. Waits for one if `may_wait`.
    take_result take(std::vector<upload> & out, int n_max, bool may_wait);
    // The same for loads that other threads finish, one at a time: waits while n_in_flight_max are in flight, except for a
    // demanded one. `hastened`: experts in flight that a demand waits for. Never TAKE_NONE, but either may be empty
    take_result take_one(std::vector<upload> & out, std::vector<expert_id> & hastened, int n_in_flight_max);
    void        finish(const upload & done, bool has_arrived); // from any thread
    // waits until that time, or until stopped
    void        wait_until(std::chrono::steady_clock::time_point time);
    // waits until no slot is pinned, but not longer than that
    void        wait_unpinned(std::chrono::milliseconds at_most);

    // no expert is taken, found or pinned any more
    void stop();

  private:
    struct queued {
        int32_t flat_id;
        uint8_t priority;
        int32_t rank = 0; // in the plan, for equal priorities in a layer
    };
    struct victim {
        int32_t flat_id;
        float   utility;
        int32_t rank; // in the plan, for equal utilities
        bool    by_demand = false; // may go only while that demand waits
        bool    operator<(const victim & other) const; // as the standard heap orders: the greatest is evicted first
    };
    struct group_state {
        int64_t              expert_bytes = 0;
        int                  limit        = 0; // slots from there on are not filled
        bool                 is_moving    = false; // experts move down from there
        std::vector<int32_t> owner;    // [n_slots] flat index, -1: free or in flight
        std::vector<int32_t> pins;     // [n_slots]
        std::vector<int32_t> free;     // slots, the next one last
        std::deque<queued>   queue;
        std::vector<victim>  victims;  // heap
        std::vector<victim>  deferred; // victims that were passed over because they are pinned
    };
    struct new_plan {
        std::vector<std::deque<queued>>  queues;  // [n_groups]
        std::vector<std::vector<victim>> victims; // [n_groups]
    };

    int       layer_of(int32_t flat_id) const { return flat_id / n_experts; }
    expert_id id_of(int32_t flat_id) const { return { flat_id / n_experts, flat_id % n_experts }; }
    int       flat_id_of(int layer, int expert) const; // -1: that expert does not exist
    bool      sort_plan(const int32_t * uploads, const uint8_t * priority, int n_uploads, const victim_list & victims,
                        new_plan & out);
    void      keep_demanded(group_state & group, std::deque<queued> & next);
    void      cancel_queue(group_state & group);
    int       pin_resident(int layer, const int32_t * experts, int n, int32_t * slots);
    void      mark_work();
    // whether it is awaited, or read ahead for a layer whose turn comes
    bool      is_kept(int32_t flat_id) const { return awaited[flat_id] || n_wants < kept_until[flat_id]; }

    group_state * next_group();
    bool          skip_to_absent(group_state & group);
    bool          find_room(group_state & group);
    bool          find_least_useful(group_state & group, bool is_wanted);
    upload        start(group_state & group);
    void          pair_in_order(std::vector<upload> & uploads);
    void          evict(group_state & group, int32_t flat_id);
    void          add_free(group_state & group, int32_t freed);
    bool          is_less_useful(int32_t a, int32_t b) const;
    bool          is_unused(const group_state & group, int32_t flat_id) const;
    std::vector<bool> occupied(int g) const;
    int           set_limits(int n_slots);
    void          list_moves(const group_state & group, std::vector<int32_t> & moving, std::vector<int32_t> & below);
    int32_t       begin_move(group_state & group, int32_t flat_id, std::vector<int32_t> & below);
    void          end_move(group_state & group, int32_t flat_id, int32_t to);
    std::vector<std::pair<int, int>> empty_beyond(int g);
    void          leave_beyond(group_state & group, int32_t s);
    void          restore_deferred(group_state & group, int32_t freed);
    bool          is_idle() const;

    template <typename F> static void remove_victims(group_state & group, F is_removed);

    const int         n_experts;
    std::vector<int>  group_of; // [n_layers]
    const slot_memory memory;
    std::mutex        limiting; // one `limit` at a time; taken before `mutex`

    std::mutex           plan_mutex; // one plan at a time
    std::vector<int64_t> asked;      // [flat_ids] the last plan that uploads it; under plan_mutex
    std::vector<int64_t> offered;    // [flat_ids] the last plan that names it as a victim; under plan_mutex
    int64_t              n_plans = 0;

    std::mutex                    mutex;   // guards the members below
    std::condition_variable       work;    // for the mover
    std::condition_variable       changed; // for drain, clear and demand
    std::vector<group_state>      groups;
    std::vector<uint8_t>          state; // [flat_ids] moeedge_residency
    std::vector<int32_t>          slot;  // [flat_ids] no_slot: absent
    std::vector<uint8_t>          awaited;  // [flat_ids] whether a computation waits for it, or has not used it yet
    std::vector<float>            utility;  // [flat_ids] set_utilities
    std::vector<int64_t>          used;     // [flat_ids] number of the `want` that named it last
    std::vector<int64_t>          kept_until; // [flat_ids] number of the `want` that it was read ahead for
    std::vector<uint8_t>          is_ahead;   // [flat_ids] whether it was read ahead, and was not wanted yet
    int64_t                       n_wants      = 0;
    int                           wanted_layer = -1; // of the last `want`
    bool                          is_scan      = false; // it needed nearly all experts
    bool                          is_unloadable = false; // an upload of a wanted expert failed
    std::vector<std::atomic<int>> n_resident; // [n_layers], read without the mutex
    std::atomic<bool>             is_stopped{ false };
    bool                          is_mover_idle = false; // it found no upload to start
    int64_t                       n_in_flight   = 0;
    int64_t                       n_pins        = 0;
    int                           n_demands     = 0; // callers that wait for single experts
    std::vector<expert_id>        to_hasten;         // for take_one
    int64_t                       busy_from_ns  = 0;
    int64_t                       ready_ns      = 0; // time of the last plan, demand or slot that became free
    struct {
        int64_t uploads, evictions, cancelled, failed, bytes_moved, transfers, transfer_ns, plans, ahead, ahead_used;
    } counts = {};
};

} // namespace moeedge
