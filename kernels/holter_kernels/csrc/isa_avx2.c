/* AVX2 with FMA and F16C: every x86 server since 2013 (Intel) and 2017 (AMD). */
#include "pass.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#include "vector_avx2.h"

static int is_supported(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#define ISA isa_avx2
#define ISA_NAME "avx2"
#define FLUSHES_SUBNORMALS 1
#include "isa.inc"

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
