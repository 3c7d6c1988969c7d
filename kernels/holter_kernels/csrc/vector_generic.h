/* 128-bit vectors in the compilers' own vector types: SSE2 on x86, NEON on ARM, plain code elsewhere. Names: vector_avx2.h. */
#define VECTOR_BYTES 16
typedef uint8_t vi __attribute__((vector_size(16)));
typedef float vf __attribute__((vector_size(16)));
typedef int32_t s32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef int16_t s16x8 __attribute__((vector_size(16)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));

#define V static inline vi __attribute__((always_inline, unused))

V v_load(const void *p)
{
    vi a;
    memcpy(&a, p, sizeof a);
    return a;
}
V v_set32(uint32_t x) { return (vi)(u32x4){x, x, x, x}; }
V v_set16(uint16_t x) { return (vi)(u16x8){x, x, x, x, x, x, x, x}; }
V v_set8(uint8_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
V v_zero(void) { return (vi){0}; }
V v_and(vi a, vi b) { return a & b; }
V v_xor(vi a, vi b) { return a ^ b; }
V v_sub32(vi a, vi b) { return (vi)((u32x4)a - (u32x4)b); }
V v_sub16(vi a, vi b) { return (vi)((u16x8)a - (u16x8)b); }
V v_sub8(vi a, vi b) { return a - b; }
V v_srl16_4(vi a) { return (vi)((u16x8)a >> 4); }
V v_srl16_8(vi a) { return (vi)((u16x8)a >> 8); }
V v_srl32_16(vi a) { return (vi)((u32x4)a >> 16); }
V v_sll32_16(vi a) { return (vi)((u32x4)a << 16); }

/* x where the mask is all ones, y where it is zero */
V v_pick(vi mask, vi x, vi y) { return (mask & x) | (~mask & y); }

V v_maxs32(vi a, vi b) { return v_pick((vi)((s32x4)a > (s32x4)b), a, b); }
V v_mins32(vi a, vi b) { return v_pick((vi)((s32x4)a < (s32x4)b), a, b); }
V v_maxu32(vi a, vi b) { return v_pick((vi)((u32x4)a > (u32x4)b), a, b); }
V v_minu32(vi a, vi b) { return v_pick((vi)((u32x4)a < (u32x4)b), a, b); }
V v_maxs16(vi a, vi b) { return v_pick((vi)((s16x8)a > (s16x8)b), a, b); }
V v_mins16(vi a, vi b) { return v_pick((vi)((s16x8)a < (s16x8)b), a, b); }
V v_maxu16(vi a, vi b) { return v_pick((vi)((u16x8)a > (u16x8)b), a, b); }
V v_minu16(vi a, vi b) { return v_pick((vi)((u16x8)a < (u16x8)b), a, b); }

V v_maxu8(vi a, vi b) { return v_pick((vi)(a > b), a, b); }
V v_minu8(vi a, vi b) { return v_pick((vi)(a < b), a, b); }

V v_count_eq8(vi count, vi a, vi b) { return count - (vi)(a == b); }
V v_count_eq32(vi count, vi a, vi b) { return v_sub32(count, (vi)((u32x4)a == (u32x4)b)); }
V v_count_gt32(vi count, vi a, vi b) { return v_sub32(count, (vi)((s32x4)a > (s32x4)b)); }
V v_count_eq16(vi count, vi a, vi b) { return v_sub16(count, (vi)((u16x8)a == (u16x8)b)); }
V v_count_gt16(vi count, vi a, vi b) { return v_sub16(count, (vi)((s16x8)a > (s16x8)b)); }
V v_pick_gt32(vi a, vi b, vi x, vi y) { return v_pick((vi)((s32x4)a > (s32x4)b), x, y); }
V v_pick_gt16(vi a, vi b, vi x, vi y) { return v_pick((vi)((s16x8)a > (s16x8)b), x, y); }
static inline int v_any(vi mask) { return (((u64x2)mask)[0] | ((u64x2)mask)[1]) != 0; }
static inline int v_any_gt32(vi a, vi b) { return v_any((vi)((s32x4)a > (s32x4)b)); }
static inline int v_any_gt16(vi a, vi b) { return v_any((vi)((s16x8)a > (s16x8)b)); }

V v_mul_even(vi a, const uint32_t *k) { return (vi)((u64x2){((u32x4)a)[0], ((u32x4)a)[2]} * (u64x2){k[0], k[2]}); }
V v_mul_odd(vi a, const uint32_t *k) { return (vi)((u64x2){((u32x4)a)[1], ((u32x4)a)[3]} * (u64x2){k[1], k[3]}); }
V v_add64(vi a, vi b) { return (vi)((u64x2)a + (u64x2)b); }
static inline uint64_t v_total64(vi a) { return ((u64x2)a)[0] + ((u64x2)a)[1]; }

static inline uint32_t v_total8(vi a)
{
    uint32_t total = 0;
    for (int k = 0; k < 16; k++)
        total += a[k];
    return total;
}

#define F static inline vf __attribute__((always_inline, unused))
F f_zero(void) { return (vf){0}; }
F f_set(float x) { return (vf){x, x, x, x}; }
F f_of(vi a) { return (vf)a; }
F f_add(vf a, vf b) { return a + b; }
F f_mul(vf a, vf b) { return a * b; }
F f_square_add(vf a, vf acc) { return acc + a * a; }
F f_abs(vf a) { return (vf)((vi)a & v_set32(0x7FFFFFFF)); }
/* Exponent and mantissa moved into float's place, the bias made good by a multiplication; wants subnormals kept. */
F f_half(u32x4 bits)
{
    vf magnitude = (vf)((bits & 0x7FFF) << 13) * f_set(0x1p112f);
    return (vf)((u32x4)magnitude | (bits & 0x8000) << 16);
}
F f_low_half16(vi a) { return f_half((u32x4)a & 0xFFFF); }
F f_high_half16(vi a) { return f_half((u32x4)a >> 16); }

static inline void f_flush(double *acc, vf a)
{
    for (int k = 0; k < 4; k++)
        acc[k] += (double)a[k];
}

static inline void v_store(void *p, vi a) { memcpy(p, &a, sizeof a); }
#define PREFETCH(p) __builtin_prefetch((const char *)(p) + 2048)
