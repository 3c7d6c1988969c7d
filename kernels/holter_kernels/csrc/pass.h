/* The contract between the parts of the native pass: what a chunk is, what a row is, what an instruction set provides.
 *
 *   run.c        jobs -> chunks -> partial rows -> rows
 *   isa_*.c      float32.inc and float16.inc, compiled once for each instruction set over a vector_*.h
 *   scalar.c     the other dtypes, and the elements that do not fill a vector
 *   threads.c    who takes which job
 *   look.c       where the tensors of a list lie
 *   module.c     Python's view
 *
 * Statistics are defined in reference.py, the fingerprint in keys.py. All integers here are bit-equal to them.
 */
#ifndef HOLTER_PASS_H
#define HOLTER_PASS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024
#define SAMPLE_EVERY 16
#define NUM_BINS 256

/* Elements of a tensor: it may lie at any address. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef uint64_t u64 __attribute__((aligned(1), may_alias));

enum code { F32, F64, BF16, F16, E4M3, E5M2, I32, I64, U8, BOOL8, I8, I16, NUM_CODES };

/* Count elements at address; offset is the index of the first in the whole tensor. Never crosses a multiple of 65,536. */
struct chunk {
    uint64_t address, count, offset;
    uint32_t row, code;
};

/* layout.ROW. While partial: min, absmin +inf; max, absmax -inf where nothing was seen. */
struct row {
    uint64_t numel, zeros, subnormals, nans, pos_infs, neg_infs, low_zero, fingerprint;
    double min, max, absmax, absmin, sum, abs_sum, square_sum;
    uint64_t reserved;
};

/* keys.py. The table of places is one vector longer than a block: odd keys are loaded from one word further on. */
struct keys {
    uint32_t places[BLOCK + 64];
    uint32_t rows[64];
    uint64_t dtypes[NUM_CODES];
};
extern struct keys keys;

enum mode { STATISTICS = 1, HISTOGRAM = 2, SAMPLED = 4, READ_ONLY = 8 };

static inline int wants_bins(unsigned mode, uint64_t index)
{
    return (mode & HISTOGRAM) && (!(mode & SAMPLED) || (index / BLOCK) % SAMPLE_EVERY == 0);
}

/* R of a word */
static inline uint64_t row_key(uint64_t word) { return keys.rows[word / BLOCK % 64]; }

/* T * y of single elements; index counts elements from the start of the whole tensor */
static inline uint64_t term8(uint8_t v, uint64_t index)
{
    return ((uint64_t)(v ^ v >> 4) << 8 * (index % 4)) * keys.places[index / 4 % BLOCK];
}
static inline uint64_t term16(uint16_t v, uint64_t index)
{
    return ((uint64_t)(v ^ v >> 8) << 16 * (index % 2)) * keys.places[index / 2 % BLOCK];
}
static inline uint64_t term32(uint32_t v, uint64_t index) { return (uint64_t)(v ^ v >> 16) * keys.places[index % BLOCK]; }
static inline uint64_t term64(uint64_t v, uint64_t index)
{
    v ^= v >> 32;
    return (v ^ v >> 16) * keys.places[index % BLOCK];
}

static inline double value_float64(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* By integers: the processor may be reading subnormal floats as zero. */
static inline double value_float32(uint32_t bits)
{
    uint64_t sign = (uint64_t)(bits >> 31) << 63, magnitude = bits & 0x7FFFFFFF;
    if (magnitude < 0x00800000)
        return (sign ? -0x1p-149 : 0x1p-149) * (double)magnitude;
    return value_float64(sign | ((magnitude << 29) + ((uint64_t)(1023 - 127) << 52)));
}

/* 2**exponent for normal exponents */
static inline double power_of_two(int exponent) { return value_float64((uint64_t)(exponent + 1023) << 52); }

/* Finite values from low to high were seen. Adding 0.0 makes -0 plain. */
static inline void extend(struct row *row, double low, double high)
{
    row->min = low < row->min ? low + 0.0 : row->min;
    row->max = high > row->max ? high + 0.0 : row->max;
}

static inline void extend_least(struct row *row, double magnitude)
{
    row->absmin = magnitude < row->absmin ? magnitude : row->absmin;
}

static inline void add(struct row *row, double x)
{
    row->sum += x;
    row->abs_sum += x < 0 ? -x : x;
    row->square_sum += x * x;
}

/* One chunk of a dtype: adds to a partial row, whose fingerprint becomes the sum of R * T * y, and to bins. */
typedef void chunk_function(const struct chunk *, unsigned mode, struct row *, uint32_t *bins);

struct isa {
    const char *name;
    int (*is_supported)(void);
    chunk_function *float32, *bfloat16, *float16;
    /* The sum of T * y over elements of 1, 2 or 4 bytes that lie in one block; index is the first one's. */
    uint64_t (*hash8)(const uint8_t *, size_t n, uint64_t index);
    uint64_t (*hash16)(const u16 *, size_t n, uint64_t index);
    uint64_t (*hash32)(const u32 *, size_t n, uint64_t index);
    uint64_t (*read_bytes)(const uint8_t *, size_t n);
    /* Whether its lanes want subnormals flushed: they cost some processors 100 cycles each. */
    int flushes_subnormals;
};
extern const struct isa isa_generic;
#if defined(__x86_64__)
extern const struct isa isa_avx2, isa_avx512;
#endif
extern const struct isa *active_isa;

/* scalar.c: whole chunks of the other dtypes; a few elements, less than a vector */
chunk_function chunk_float64, chunk_int16, chunk_int32, chunk_int64, chunk_byte;
void few_float32(const u32 *, size_t n, struct row *);
void few_bfloat16(const u16 *, size_t n, struct row *);
void few_float16(const u16 *, size_t n, struct row *);
double value_bfloat16(uint16_t);
double value_float16(uint16_t);

/* run.c */
struct plan {
    const struct chunk *chunks;
    struct row *partials;
    const uint64_t *first_chunk; /* of each row, and one more */
    const uint64_t *jobs;        /* first chunk of each job, and one more */
    struct row *rows;
    const uint64_t *bases; /* of each row: addresses of its chunks are counted from it */
    uint64_t *bins; /* NUM_BINS a row, or NULL */
    size_t num_chunks, num_rows, num_jobs;
    unsigned mode;
    int num_threads;
};
void run(const struct plan *);
void run_job(const struct plan *, size_t job);
uint64_t fingerprint(const struct chunk *);

/* threads.c: calls run_job for every job, in this thread and at most num_threads - 1 others. */
void run_jobs(const struct plan *);

#endif
