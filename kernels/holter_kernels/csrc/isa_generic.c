/* The baseline of the architecture the compiler builds for. */
#include "pass.h"

#include "vector_generic.h"

static int is_supported(void) { return 1; }

#define ISA isa_generic
#if defined(__aarch64__)
#define ISA_NAME "neon"
#else
#define ISA_NAME "portable"
#endif
#define FLUSHES_SUBNORMALS 0
#include "isa.inc"
