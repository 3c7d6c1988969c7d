/* AVX-512 with F, BW, DQ and VL: Intel servers since 2017, AMD since 2022. */
#include "pass.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif
#include "vector_avx512.h"

static int is_supported(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

#define ISA isa_avx512
#define ISA_NAME "avx512"
#define FLUSHES_SUBNORMALS 1
#include "isa.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
