// The kernels of expert-dots.h for AVX-VNNI, which processors without AVX-512 have, too: those for AVX2, with VPDPBUSD and VPDPWSSD
// in place of several instructions.

#include "expert-dots.h"

#if defined(__AVXVNNI__)

#    define KERNELS avxvnni_kernels
#    include "expert-dots-avx2.cpp"

#endif
