/* Every dtype, size, misalignment, offset and mode through the native pass, each buffer of exactly its size, so that a sanitizer sees any
 * access beyond it. The fingerprint alone must be that of the full pass; parts of a tensor must add up to it. A digest of all integers and
 * extremes must be the same for every instruction set; it is printed, so that another processor's can be compared. */
#include <stdio.h>
#include <stdlib.h>

#include "pass.h"

static const uint8_t width[NUM_CODES] = {4, 8, 2, 2, 1, 1, 4, 8, 1, 1, 1, 2};
static uint64_t state, digest;

static void digest_bytes(const void *bytes, size_t n)
{
    for (size_t k = 0; k < n; k++)
        digest = (digest ^ ((const uint8_t *)bytes)[k]) * 0x100000001B3;
}

static uint64_t draw(void)
{
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return state >> 17;
}

static void fail(const char *what, unsigned code, size_t n, size_t offset)
{
    printf("%s: code %u, %zu elements at %zu\n", what, code, n, offset);
    exit(1);
}

static uint64_t check(unsigned code, const uint8_t *memory, size_t n, size_t offset, unsigned mode, int threads)
{
    struct chunk chunks[64];
    struct row partials[64], row;
    uint64_t bins[NUM_BINS], first[2] = {0, 0}, jobs[65], at = offset, end = offset + n;
    size_t k = 0;
    for (; at < end; k++) {
        uint64_t room = 65536 - at % 65536, m = room < end - at ? room : end - at;
        chunks[k] = (struct chunk){(uint64_t)(uintptr_t)memory + (at - offset) * width[code], m, at, 0, code};
        jobs[k] = k;
        at += m;
    }
    first[1] = jobs[k] = k;
    memset(&row, 0xFF, sizeof row);
    static const uint64_t base = 0;
    struct plan plan = {chunks, partials, first, jobs, &row, &base, mode & HISTOGRAM ? bins : NULL, k, 1, k, mode, threads};
    run(&plan);
    uint64_t alone = 0;
    for (size_t c = 0; c < k; c++)
        alone += fingerprint(&chunks[c]);
    if (row.numel != n || row.fingerprint != alone)
        fail("fingerprint", code, n, offset);
    if (mode & STATISTICS) {
        double extremes[4] = {row.min, row.max, row.absmax, row.absmin};
        for (int e = 0; e < 4; e++)
            extremes[e] = extremes[e] == extremes[e] ? extremes[e] : -1; /* one NaN is not another */
        digest_bytes(&row, 8 * sizeof row.numel);
        digest_bytes(extremes, sizeof extremes);
    }
    if (mode & HISTOGRAM)
        digest_bytes(bins, sizeof bins);
    return alone;
}

int main(void)
{
    static const size_t sizes[] = {0, 1, 3, 15, 17, 31, 33, 1000, 1024, 1025, 4097, 66000};
    static const size_t offsets[] = {0, 1, 3, 1023, 65535};
    const struct isa *isas[] = {&isa_generic,
#if defined(__x86_64__)
                                &isa_avx2, &isa_avx512
#endif
    };
    uint64_t first_digest = 0;
    for (int k = 0; k < BLOCK; k++)
        keys.places[k] = (uint32_t)draw() | 1;
    for (int k = 0; k < 64; k++)
        keys.rows[k] = (uint32_t)draw() | 1;
    for (int k = 0; k < NUM_CODES; k++)
        keys.dtypes[k] = draw() | 1;
    for (size_t i = 0; i < sizeof isas / sizeof *isas; i++) {
        active_isa = isas[i];
        if (!active_isa->is_supported())
            continue;
        state = digest = 1;
        for (unsigned code = 0; code < NUM_CODES; code++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                for (size_t misalignment = 0; misalignment < 4; misalignment += 3) {
                    size_t n = sizes[s];
                    uint8_t *block = malloc(n * width[code] + misalignment + 1), *memory = block + misalignment;
                    for (size_t b = 0; b < n * width[code]; b++)
                        memory[b] = (uint8_t)(draw() % 4 ? draw() : 0);
                    if (code == BOOL8)
                        for (size_t b = 0; b < n; b++)
                            memory[b] &= 1;
                    uint8_t *exact = realloc(block, n * width[code] + misalignment ? n * width[code] + misalignment : 1);
                    memory = exact + misalignment;
                    for (size_t o = 0; o < sizeof offsets / sizeof *offsets; o++) {
                        size_t at = offsets[o], cut = n / 3;
                        uint64_t whole = check(code, memory, n, at, STATISTICS | HISTOGRAM | SAMPLED, 1);
                        check(code, memory, n, at, STATISTICS | HISTOGRAM, 3);
                        uint64_t left = check(code, memory, cut, at, STATISTICS, 1);
                        if (whole != left + check(code, memory + cut * width[code], n - cut, at + cut, 0, 2))
                            fail("parts", code, n, at);
                    }
                    free(exact);
                }
        if (i == 0)
            first_digest = digest;
        if (digest != first_digest)
            fail(active_isa->name, 0, 0, 0);
    }
    printf("clean %016llx\n", (unsigned long long)digest);
    return 0;
}
