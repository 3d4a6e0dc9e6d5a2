#include "ledger.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <map>

namespace counting {

static constexpr size_t n_records_max = 1 << 20; // later ones are counted only
static constexpr size_t n_hazards_max = 64;

struct setting_entry {
    const char * name;
    int64_t settings::*member;
};

static constexpr setting_entry entries[] = {
    { "defer", &settings::defer },
    { "other_bytes", &settings::other_bytes },
    { "max_buffer_bytes", &settings::max_buffer_bytes },
    { "fail_graph", &settings::fail_graph },
    { "fail_mode", &settings::fail_mode },
};

static settings read_environment() {
    settings found;
    for (const setting_entry & entry : entries) {
        std::string name = "COUNTING_";
        for (const char * c = entry.name; *c; c++) {
            name += (char) std::toupper((unsigned char) *c);
        }
        if (const char * value = std::getenv(name.c_str())) {
            found.*entry.member = std::strtoll(value, nullptr, 10);
        }
    }
    return found;
}

struct ledger {
    settings                       values = read_environment();
    std::vector<counting_record>   records;
    int64_t                        n_records = 0;
    std::vector<std::string>       hazards;
    int64_t                        n_hazards = 0;
    int64_t                        allocated = 0;
    std::map<const char *, size_t> pinned;
};

// never destroyed: a program may free its contexts after static destructors ran
static ledger & the_ledger() {
    static ledger * all = new ledger;
    return *all;
}

std::mutex & device_lock() {
    static std::mutex * lock = new std::mutex;
    return *lock;
}

settings & current_settings() {
    return the_ledger().values;
}

int64_t & allocated_bytes() {
    return the_ledger().allocated;
}

void add_record(enum counting_kind kind, int instance, const char * name, size_t bytes, int flags, int n_nodes) {
    ledger & all = the_ledger();
    all.n_records++;
    if (all.records.size() >= n_records_max) {
        return;
    }
    counting_record record = {};
    record.kind            = kind;
    record.instance        = instance;
    record.bytes           = (int64_t) bytes;
    record.flags           = flags;
    record.n_nodes         = n_nodes;
    std::strncpy(record.name, name, sizeof(record.name) - 1);
    all.records.push_back(record);
}

void add_hazard(const std::string & text) {
    ledger & all = the_ledger();
    all.n_hazards++;
    if (all.hazards.size() < n_hazards_max) {
        all.hazards.push_back(text);
    }
}

void add_pinned(const void * address, size_t bytes) {
    the_ledger().pinned[(const char *) address] = bytes;
}

void remove_pinned(const void * address) {
    the_ledger().pinned.erase((const char *) address);
}

bool is_pinned(const void * address) {
    const auto & pinned = the_ledger().pinned;
    auto         after  = pinned.upper_bound((const char *) address);
    if (after == pinned.begin()) {
        return false;
    }
    --after;
    return (const char *) address < after->first + after->second;
}

} // namespace counting

using namespace counting;

int counting_set(const char * name, int64_t value) {
    std::lock_guard<std::mutex> lock(device_lock());
    for (const setting_entry & entry : entries) {
        if (std::strcmp(entry.name, name) == 0) {
            current_settings().*entry.member = value;
            return 0;
        }
    }
    return -1;
}

void counting_reset() {
    std::lock_guard<std::mutex> lock(device_lock());
    the_ledger().records.clear();
    the_ledger().hazards.clear();
    the_ledger().n_records = the_ledger().n_hazards = 0;
}

int64_t counting_timeline(counting_record * out, int64_t n_max) {
    std::lock_guard<std::mutex> lock(device_lock());
    const ledger &              all = the_ledger();
    const size_t                n   = std::min((size_t) n_max, all.records.size());
    if (n > 0) {
        std::memcpy(out, all.records.data(), n * sizeof(out[0]));
    }
    return all.n_records;
}

int64_t counting_hazards() {
    std::lock_guard<std::mutex> lock(device_lock());
    return the_ledger().n_hazards;
}

const char * counting_hazard(int64_t i) {
    std::lock_guard<std::mutex> lock(device_lock());
    const auto &                hazards = the_ledger().hazards;
    return i >= 0 && (size_t) i < hazards.size() ? hazards[(size_t) i].c_str() : nullptr;
}

int64_t counting_allocated() {
    std::lock_guard<std::mutex> lock(device_lock());
    return allocated_bytes();
}
