/* Dtypes of 1 and 8 bytes, integers, and the few elements that do not fill a vector: one element at a time, in double. */
#include <math.h>

#include "pass.h"

double value_bfloat16(uint16_t bits) { return value_float32((uint32_t)bits << 16); }

double value_float16(uint16_t bits)
{
    uint32_t field = bits >> 10 & 31, mantissa = bits & 1023;
    double magnitude = field ? ldexp(1024 + mantissa, (int)field - 25) : ldexp(mantissa, -24);
    return bits >> 15 ? -magnitude : magnitude;
}

/* One element of a floating format; sign and magnitude are its bits. */
static inline void see(struct row *row, int sign, uint64_t magnitude, uint64_t inf, uint64_t normal, uint64_t low, double x)
{
    row->low_zero += (magnitude & low) == 0;
    if (magnitude >= inf) {
        row->nans += magnitude > inf;
        row->pos_infs += magnitude == inf && !sign;
        row->neg_infs += magnitude == inf && sign;
        return;
    }
    extend(row, x, x);
    if (magnitude) {
        extend_least(row, x < 0 ? -x : x);
        row->subnormals += magnitude < normal;
    } else {
        row->zeros++;
    }
    add(row, x);
}

void few_float32(const u32 *p, size_t n, struct row *row)
{
    for (size_t i = 0; i < n; i++)
        see(row, p[i] >> 31, p[i] & 0x7FFFFFFF, 0x7F800000, 0x00800000, 0xFFFF, value_float32(p[i]));
}

void few_bfloat16(const u16 *p, size_t n, struct row *row)
{
    for (size_t i = 0; i < n; i++)
        see(row, p[i] >> 15, p[i] & 0x7FFF, 0x7F80, 0x0080, 0xF, value_bfloat16(p[i]));
}

void few_float16(const u16 *p, size_t n, struct row *row)
{
    for (size_t i = 0; i < n; i++)
        see(row, p[i] >> 15, p[i] & 0x7FFF, 0x7C00, 0x0400, 0x7F, value_float16(p[i]));
}

/* Walks a chunk block by block: n elements from p on, the first with index `at`. */
#define FOR_BLOCKS(type)                                                                                   \
    const type *p = (const type *)(uintptr_t)chunk->address;                                               \
    uint64_t at = chunk->offset, end = at + chunk->count;                                                  \
    for (size_t n; at < end; p += n, at += n)                                                              \
        if (n = BLOCK - at % BLOCK < end - at ? BLOCK - at % BLOCK : end - at, 1)

void chunk_float64(const struct chunk *chunk, unsigned mode, struct row *row, uint32_t *bins)
{
    const uint64_t inf = 0x7FF0000000000000;
    FOR_BLOCKS(u64)
    {
        /* A block's own sums, so that the error grows with the number of blocks, not of elements. */
        struct row block = {.min = row->min, .max = row->max, .absmin = row->absmin};
        uint64_t hash = 0;
        for (size_t i = 0; i < n; i++) {
            uint64_t magnitude = p[i] & ~(1ull << 63);
            hash += term64(p[i], at + i);
            see(&block, p[i] >> 63, magnitude, inf, 1ull << 52, (1ull << 29) - 1, value_float64(p[i]));
        }
        row->fingerprint += row_key(at) * hash;
        row->low_zero += block.low_zero;
        row->nans += block.nans;
        row->pos_infs += block.pos_infs;
        row->neg_infs += block.neg_infs;
        row->zeros += block.zeros;
        row->subnormals += block.subnormals;
        row->min = block.min;
        row->max = block.max;
        row->absmin = block.absmin;
        row->sum += block.sum;
        row->abs_sum += block.abs_sum;
        row->square_sum += block.square_sum;
        if (!wants_bins(mode, at))
            continue;
        for (size_t i = 0; i < n; i++) {
            int field = (int)(p[i] >> 52 & 2047), bin = field - 1023 + 127;
            bin = bin < 1 ? 1 : bin > 254 ? 254 : bin;
            bins[field == 0 ? 0 : field == 2047 ? 255 : bin]++;
        }
    }
}

static inline void see_integer(struct row *row, double x)
{
    extend(row, x, x);
    if (x != 0)
        extend_least(row, x < 0 ? -x : x);
    else
        row->zeros++;
    add(row, x);
}

#define INTEGER_CHUNK(name, type, signed_type, in_word, term)                                                       \
    void name(const struct chunk *chunk, unsigned mode, struct row *row, uint32_t *bins)                \
    {                                                                                                      \
        (void)mode, (void)bins;                                                                            \
        FOR_BLOCKS(type)                                                                                   \
        {                                                                                                  \
            uint64_t hash = 0;                                                                             \
            struct row block = {.min = row->min, .max = row->max, .absmin = row->absmin};                  \
            for (size_t i = 0; i < n; i++) {                                                               \
                hash += term(p[i], at + i);                                                                \
                see_integer(&block, (double)(signed_type)p[i]);                                            \
            }                                                                                              \
            row->fingerprint += row_key(at / in_word) * hash;                                              \
            row->zeros += block.zeros;                                                                     \
            row->min = block.min;                                                                          \
            row->max = block.max;                                                                          \
            row->absmin = block.absmin;                                                                    \
            row->sum += block.sum;                                                                         \
            row->abs_sum += block.abs_sum;                                                                 \
            row->square_sum += block.square_sum;                                                           \
        }                                                                                                  \
    }

INTEGER_CHUNK(chunk_int16, u16, int16_t, 2, term16)
INTEGER_CHUNK(chunk_int32, u32, int32_t, 1, term32)
INTEGER_CHUNK(chunk_int64, u64, int64_t, 1, term64)

/* What a byte is worth in one of the 1-byte dtypes; not asked for NaN and infinities. */
static double value_byte(uint32_t code, unsigned byte)
{
    unsigned bits = code == E4M3 ? 3 : 2, field = (byte & 127) >> bits, mantissa = byte & ((1 << bits) - 1);
    int bias = code == E4M3 ? 7 : 15;
    double one = 1 << bits, magnitude;
    switch (code) {
    case I8:
        return (int8_t)byte;
    case E4M3:
    case E5M2:
        magnitude = field ? ldexp(1 + mantissa / one, (int)field - bias) : ldexp(mantissa / one, 1 - bias);
        return byte >> 7 ? -magnitude : magnitude;
    default:
        return byte;
    }
}

/* Every statistic of a 1-byte dtype follows from how often each of the 256 bytes occurs. */
static void see_bytes(uint32_t code, const uint64_t *count, struct row *row)
{
    int is_float = code == E4M3 || code == E5M2;
    unsigned inf = code == E4M3 ? 0x7F : 0x7C, normal = code == E4M3 ? 8 : 4;
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t times = count[byte];
        unsigned magnitude = byte & 127;
        if (!times)
            continue;
        if (is_float && magnitude >= inf) { /* e4m3 has no infinity: its one magnitude up here is NaN */
            uint64_t *kind = magnitude > inf || code == E4M3 ? &row->nans : byte >> 7 ? &row->neg_infs : &row->pos_infs;
            *kind += times;
            continue;
        }
        double x = value_byte(code, byte), size = x < 0 ? -x : x;
        extend(row, x, x);
        if (x == 0)
            row->zeros += times;
        else
            extend_least(row, size);
        if (is_float && magnitude && magnitude < normal)
            row->subnormals += times;
        row->sum += x * (double)times;
        row->abs_sum += size * (double)times;
        row->square_sum += x * x * (double)times;
    }
}

static unsigned bin_byte(uint32_t code, unsigned byte)
{
    unsigned magnitude = byte & 127, field = magnitude >> (code == E4M3 ? 3 : 2);
    if (field == 0)
        return 0;
    if (code == E4M3)
        return magnitude == 127 ? 255 : field + 120;
    return field == 31 ? 255 : field + 112;
}

void chunk_byte(const struct chunk *chunk, unsigned mode, struct row *row, uint32_t *bins)
{
    uint32_t table[2][4][256] = {{{0}}}; /* blocks not in the histogram, and in it */
    uint64_t count[256];
    int is_float = chunk->code == E4M3 || chunk->code == E5M2;
    FOR_BLOCKS(uint8_t)
    {
        row->fingerprint += row_key(at / 4) * active_isa->hash8(p, n, at);
        uint32_t (*part)[256] = table[is_float && wants_bins(mode, at)];
        for (size_t i = 0; i < n; i++)
            part[i % 4][p[i]]++;
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t binned = 0, other = 0;
        for (int k = 0; k < 4; k++)
            other += table[0][k][byte], binned += table[1][k][byte];
        count[byte] = other + binned;
        if (binned)
            bins[bin_byte(chunk->code, byte)] += (uint32_t)binned;
    }
    see_bytes(chunk->code, count, row);
}
