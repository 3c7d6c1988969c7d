/* 512-bit vectors (F, BW, DQ, VL). Names: vector_avx2.h. */
#include <immintrin.h>

#define VECTOR_BYTES 64
typedef __m512i vi;
typedef __m512 vf;

#define V static inline vi __attribute__((always_inline, unused))

V v_load(const void *p) { return _mm512_loadu_si512(p); }
V v_set32(uint32_t x) { return _mm512_set1_epi32((int)x); }
V v_set16(uint16_t x) { return _mm512_set1_epi16((short)x); }
V v_set8(uint8_t x) { return _mm512_set1_epi8((char)x); }
V v_zero(void) { return _mm512_setzero_si512(); }
V v_and(vi a, vi b) { return _mm512_and_si512(a, b); }
V v_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
V v_sub32(vi a, vi b) { return _mm512_sub_epi32(a, b); }
V v_sub16(vi a, vi b) { return _mm512_sub_epi16(a, b); }
V v_sub8(vi a, vi b) { return _mm512_sub_epi8(a, b); }
V v_srl16_4(vi a) { return _mm512_srli_epi16(a, 4); }
V v_srl16_8(vi a) { return _mm512_srli_epi16(a, 8); }
V v_srl32_16(vi a) { return _mm512_srli_epi32(a, 16); }
V v_sll32_16(vi a) { return _mm512_slli_epi32(a, 16); }

V v_maxs32(vi a, vi b) { return _mm512_max_epi32(a, b); }
V v_mins32(vi a, vi b) { return _mm512_min_epi32(a, b); }
V v_maxu32(vi a, vi b) { return _mm512_max_epu32(a, b); }
V v_minu32(vi a, vi b) { return _mm512_min_epu32(a, b); }
V v_maxs16(vi a, vi b) { return _mm512_max_epi16(a, b); }
V v_mins16(vi a, vi b) { return _mm512_min_epi16(a, b); }
V v_maxu16(vi a, vi b) { return _mm512_max_epu16(a, b); }
V v_minu16(vi a, vi b) { return _mm512_min_epu16(a, b); }
V v_maxu8(vi a, vi b) { return _mm512_max_epu8(a, b); }
V v_minu8(vi a, vi b) { return _mm512_min_epu8(a, b); }

V v_count_eq32(vi count, vi a, vi b) { return _mm512_mask_add_epi32(count, _mm512_cmpeq_epi32_mask(a, b), count, v_set32(1)); }
V v_count_gt32(vi count, vi a, vi b) { return _mm512_mask_add_epi32(count, _mm512_cmpgt_epi32_mask(a, b), count, v_set32(1)); }
V v_count_eq16(vi count, vi a, vi b) { return _mm512_mask_add_epi16(count, _mm512_cmpeq_epi16_mask(a, b), count, v_set16(1)); }
V v_count_gt16(vi count, vi a, vi b) { return _mm512_mask_add_epi16(count, _mm512_cmpgt_epi16_mask(a, b), count, v_set16(1)); }
V v_count_eq8(vi count, vi a, vi b) { return _mm512_mask_add_epi8(count, _mm512_cmpeq_epi8_mask(a, b), count, v_set8(1)); }
V v_pick_gt32(vi a, vi b, vi x, vi y) { return _mm512_mask_mov_epi32(y, _mm512_cmpgt_epi32_mask(a, b), x); }
V v_pick_gt16(vi a, vi b, vi x, vi y) { return _mm512_mask_mov_epi16(y, _mm512_cmpgt_epi16_mask(a, b), x); }
static inline int v_any_gt32(vi a, vi b) { return _mm512_cmpgt_epi32_mask(a, b) != 0; }
static inline int v_any_gt16(vi a, vi b) { return _mm512_cmpgt_epi16_mask(a, b) != 0; }

V v_mul_even(vi a, const uint32_t *k) { return _mm512_mul_epu32(a, v_load(k)); }
V v_mul_odd(vi a, const uint32_t *k) { return _mm512_mul_epu32(_mm512_srli_epi64(a, 32), v_load(k + 1)); }
V v_add64(vi a, vi b) { return _mm512_add_epi64(a, b); }
static inline uint64_t v_total64(vi a) {
    /* Not _mm512_reduce_add_epi64: the compiler's own header adds signed numbers there, and ours wrap. */
    uint64_t part[8];
    _mm512_storeu_si512(part, a);
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

static inline uint32_t v_total8(vi a) { return (uint32_t)v_total64(_mm512_sad_epu8(a, v_zero())); }

#define F static inline vf __attribute__((always_inline, unused))
F f_zero(void) { return _mm512_setzero_ps(); }
F f_set(float x) { return _mm512_set1_ps(x); }
F f_of(vi a) { return _mm512_castsi512_ps(a); }
F f_add(vf a, vf b) { return _mm512_add_ps(a, b); }
F f_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
F f_square_add(vf a, vf acc) { return _mm512_fmadd_ps(a, a, acc); }
F f_abs(vf a) { return _mm512_abs_ps(a); }
F f_low_half16(vi a) { return _mm512_cvtph_ps(_mm512_castsi512_si256(a)); }
F f_high_half16(vi a) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1)); }

static inline void f_flush(double *acc, vf a)
{
    __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
    _mm512_storeu_pd(acc, _mm512_add_pd(_mm512_loadu_pd(acc), low));
    _mm512_storeu_pd(acc + 8, _mm512_add_pd(_mm512_loadu_pd(acc + 8), high));
}

static inline void v_store(void *p, vi a) { _mm512_storeu_si512(p, a); }
/* Half a page ahead: the hardware's own prefetch stops at each page. */
#define PREFETCH(p) _mm_prefetch((const char *)(p) + 2048, _MM_HINT_T0)
