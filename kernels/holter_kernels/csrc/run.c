/* From a pointer table to rows: every chunk to a partial row, the partial rows of a tensor to one, in order. */
#include <math.h>

#include "pass.h"
#include "tree.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

struct keys keys;
const struct isa *active_isa = &isa_generic;

/* How this thread treats subnormals is the caller's: it is saved, ours for the time of a pass, and comes back. */
static uint64_t save_float_mode(void)
{
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    return saved;
#else
    return 0;
#endif
}

static void set_float_mode(uint64_t mode)
{
#if defined(__x86_64__)
    _mm_setcsr((uint32_t)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* Round to nearest, no traps. Vector lanes that ask for it read and write subnormals as zero; scalar code keeps them. */
static void set_pass_mode(int flushes_subnormals)
{
#if defined(__x86_64__)
    set_float_mode(0x1F80 | (flushes_subnormals ? 0x8040 : 0));
#else
    (void)flushes_subnormals;
    set_float_mode(0);
#endif
}

static const uint8_t in_word[NUM_CODES] = {1, 1, 2, 2, 4, 4, 1, 1, 4, 4, 4, 2};
static const uint8_t widths[NUM_CODES] = {4, 8, 2, 2, 1, 1, 4, 8, 1, 1, 1, 2};

/* W of the one group a chunk lies in, and D for each element, make the sum of R * T * y a fingerprint. */
static uint64_t seal(const struct chunk *chunk, uint64_t sum)
{
    uint64_t group = mix64((chunk->offset / in_word[chunk->code] >> 16) + 0x9E3779B97F4A7C15) | 1;
    return group * sum + chunk->count * keys.dtypes[chunk->code];
}

uint64_t fingerprint(const struct chunk *chunk)
{
    const uint8_t *p = (const uint8_t *)(uintptr_t)chunk->address;
    uint64_t at = chunk->offset, end = at + chunk->count, sum = 0;
    size_t width = widths[chunk->code];
    while (at < end) {
        size_t room = BLOCK - at % BLOCK, n = room < end - at ? room : end - at;
        uint64_t hash = 0;
        if (width == 1)
            hash = active_isa->hash8(p, n, at);
        else if (width == 2)
            hash = active_isa->hash16((const u16 *)p, n, at);
        else if (width == 4)
            hash = active_isa->hash32((const u32 *)p, n, at);
        else
            for (size_t i = 0; i < n; i++)
                hash += term64(((const u64 *)p)[i], at + i);
        sum += row_key(at / in_word[chunk->code]) * hash;
        p += n * width;
        at += n;
    }
    return seal(chunk, sum);
}

static void run_chunk(const struct plan *plan, const struct chunk *entry, struct row *partial)
{
    struct chunk here = *entry;
    const struct chunk *chunk = &here;
    here.address += plan->bases[here.row];
    uint32_t bins[NUM_BINS];
    memset(partial, 0, sizeof *partial);
    partial->numel = chunk->count;
    if (plan->mode & READ_ONLY) {
        const uint8_t *p = (const uint8_t *)(uintptr_t)chunk->address;
        partial->fingerprint = active_isa->read_bytes(p, chunk->count * widths[chunk->code]);
        return;
    }
    if (!(plan->mode & STATISTICS)) {
        partial->fingerprint = fingerprint(chunk);
        return;
    }
    partial->min = partial->absmin = INFINITY;
    partial->max = -INFINITY;
    if (plan->mode & HISTOGRAM)
        memset(bins, 0, sizeof bins);
    chunk_function *const functions[NUM_CODES] = {
        [F32] = active_isa->float32, [F64] = chunk_float64, [BF16] = active_isa->bfloat16, [F16] = active_isa->float16,
        [E4M3] = chunk_byte,         [E5M2] = chunk_byte,   [I32] = chunk_int32,           [I64] = chunk_int64,
        [U8] = chunk_byte,           [BOOL8] = chunk_byte,  [I8] = chunk_byte,             [I16] = chunk_int16,
    };
    int is_vector = chunk->code == F32 || chunk->code == BF16 || chunk->code == F16;
    set_pass_mode(is_vector && active_isa->flushes_subnormals);
    functions[chunk->code](chunk, plan->mode, partial, bins);
    partial->fingerprint = seal(chunk, partial->fingerprint);
    if (!(plan->mode & HISTOGRAM))
        return;
    uint64_t *out = plan->bins + (size_t)chunk->row * NUM_BINS;
    int is_alone = plan->first_chunk[chunk->row + 1] - plan->first_chunk[chunk->row] == 1;
    for (int k = 0; k < NUM_BINS; k++)
        if (is_alone)
            out[k] = bins[k];
        else if (bins[k]) /* other threads may hold other chunks of this row */
            __atomic_fetch_add(&out[k], bins[k], __ATOMIC_RELAXED);
}

void run_job(const struct plan *plan, size_t job)
{
    uint64_t saved = save_float_mode();
    for (uint64_t k = plan->jobs[job]; k < plan->jobs[job + 1]; k++)
        run_chunk(plan, &plan->chunks[k], &plan->partials[k]);
    set_float_mode(saved);
}

static void combine(const struct plan *plan, size_t index)
{
    uint64_t first = plan->first_chunk[index], end = plan->first_chunk[index + 1];
    struct row *row = &plan->rows[index];
    struct row total = {.min = INFINITY, .max = -INFINITY, .absmin = INFINITY};
    for (uint64_t k = first; k < end; k++) {
        const struct row *part = &plan->partials[k];
        total.numel += part->numel;
        total.zeros += part->zeros;
        total.subnormals += part->subnormals;
        total.nans += part->nans;
        total.pos_infs += part->pos_infs;
        total.neg_infs += part->neg_infs;
        total.low_zero += part->low_zero;
        total.fingerprint += part->fingerprint;
        total.min = part->min < total.min ? part->min : total.min;
        total.max = part->max > total.max ? part->max : total.max;
        total.absmin = part->absmin < total.absmin ? part->absmin : total.absmin;
        total.sum += part->sum;
        total.abs_sum += part->abs_sum;
        total.square_sum += part->square_sum;
    }
    if (!(plan->mode & STATISTICS)) {
        total.min = total.max = total.absmin = 0;
    } else {
        total.absmax = -total.min > total.max ? -total.min : total.max;
        if (total.min > total.max)
            total.min = total.max = total.absmax = NAN;
        if (isinf(total.absmin))
            total.absmin = NAN;
    }
    *row = total;
}

void run(const struct plan *plan)
{
    if (plan->mode & HISTOGRAM)
        for (size_t k = 0; k < plan->num_rows; k++)
            if (plan->first_chunk[k + 1] - plan->first_chunk[k] != 1)
                memset(plan->bins + k * NUM_BINS, 0, NUM_BINS * sizeof *plan->bins);
    run_jobs(plan);
    uint64_t saved = save_float_mode();
    set_pass_mode(0);
    for (size_t k = 0; k < plan->num_rows; k++)
        combine(plan, k);
    set_float_mode(saved);
}
