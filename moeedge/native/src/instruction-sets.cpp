// Which sets of kernels this processor runs (kernel-choice.h).

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#    include <cpuid.h>
#endif

#include "kernel-choice.h"

namespace moeedge {

// where the library was compiled for another kind of processor, or by a compiler that does not know the instructions
__attribute__((weak)) dot_kernels avx512_kernels() { return {}; }
__attribute__((weak)) dot_kernels avx512bf16_kernels() { return {}; }
__attribute__((weak)) attention_kernels avx512fp16_attention() { return {}; }
__attribute__((weak)) dot_kernels avxvnni_kernels() { return {}; }
__attribute__((weak)) dot_kernels avx2_kernels() { return {}; }

#if defined(__x86_64__)
// for instructions that older compilers' __builtin_cpu_supports does not know
static bool has_cpuid_7(unsigned leaf, bool in_edx, int bit) {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid_count(7, leaf, &eax, &ebx, &ecx, &edx) && ((in_edx ? edx : eax) & 1u << bit) != 0;
}
#endif

// to measure as on an older processor; a name that is none of these limits nothing
static bool is_left_out(const char * instructions) {
    static const char * const in_order[] = { "none", "avx2", "avxvnni", "avx512vnni", "avx512bf16" };
    const auto                place_of   = [&](const char * name) {
        return std::find_if(std::begin(in_order), std::end(in_order), [&](const char * other) { return std::strcmp(name, other) == 0; });
    };
    const char * newest = std::getenv("MOEEDGE_INSTRUCTIONS");
    return newest != nullptr && place_of(instructions) > place_of(newest);
}

// the newest instructions first
static std::vector<dot_kernels> find_runnable_sets() {
    std::vector<dot_kernels> found;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("bmi2")) {
            found.push_back(avx512_kernels());
            if (has_cpuid_7(1, false, 5)) { // BF16
                found.push_back(avx512bf16_kernels());
                found.back().attention = has_cpuid_7(0, true, 23) ? avx512fp16_attention() : attention_kernels{};
            }
        }
        if (has_cpuid_7(1, false, 4)) { // AVX-VNNI
            found.push_back(avxvnni_kernels());
        }
        found.push_back(avx2_kernels());
    }
#endif
    const auto is_missing = [](const dot_kernels & set) { return set.n == 0 || is_left_out(set.first->instructions); }; // 0: of another compiler
    found.erase(std::remove_if(found.begin(), found.end(), is_missing), found.end());
    return found;
}

const std::vector<dot_kernels> & runnable_sets() {
    static const std::vector<dot_kernels> found = find_runnable_sets();
    return found;
}

multiply_function fastest_multiply() {
    const std::vector<dot_kernels> & sets = runnable_sets();
    return sets.empty() ? nullptr : sets.front().multiply;
}

} // namespace moeedge
