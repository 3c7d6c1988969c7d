/* 256-bit vectors. Each vector_*.h gives the same names; float32.inc and float16.inc are written in them alone. */
#include <immintrin.h>

#define VECTOR_BYTES 32
typedef __m256i vi;
typedef __m256 vf;

#define V static inline vi __attribute__((always_inline, unused))

V v_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
V v_set32(uint32_t x) { return _mm256_set1_epi32((int)x); }
V v_set16(uint16_t x) { return _mm256_set1_epi16((short)x); }
V v_set8(uint8_t x) { return _mm256_set1_epi8((char)x); }
V v_zero(void) { return _mm256_setzero_si256(); }
V v_and(vi a, vi b) { return _mm256_and_si256(a, b); }
V v_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
V v_sub32(vi a, vi b) { return _mm256_sub_epi32(a, b); }
V v_sub16(vi a, vi b) { return _mm256_sub_epi16(a, b); }
V v_sub8(vi a, vi b) { return _mm256_sub_epi8(a, b); }
V v_srl16_4(vi a) { return _mm256_srli_epi16(a, 4); }
V v_srl16_8(vi a) { return _mm256_srli_epi16(a, 8); }
V v_srl32_16(vi a) { return _mm256_srli_epi32(a, 16); }
V v_sll32_16(vi a) { return _mm256_slli_epi32(a, 16); }

V v_maxs32(vi a, vi b) { return _mm256_max_epi32(a, b); }
V v_mins32(vi a, vi b) { return _mm256_min_epi32(a, b); }
V v_maxu32(vi a, vi b) { return _mm256_max_epu32(a, b); }
V v_minu32(vi a, vi b) { return _mm256_min_epu32(a, b); }
V v_maxs16(vi a, vi b) { return _mm256_max_epi16(a, b); }
V v_mins16(vi a, vi b) { return _mm256_min_epi16(a, b); }
V v_maxu16(vi a, vi b) { return _mm256_max_epu16(a, b); }
V v_minu16(vi a, vi b) { return _mm256_min_epu16(a, b); }
V v_maxu8(vi a, vi b) { return _mm256_max_epu8(a, b); }
V v_minu8(vi a, vi b) { return _mm256_min_epu8(a, b); }

/* count + 1 in lanes where the comparison holds */
V v_count_eq32(vi count, vi a, vi b) { return _mm256_sub_epi32(count, _mm256_cmpeq_epi32(a, b)); }
V v_count_gt32(vi count, vi a, vi b) { return _mm256_sub_epi32(count, _mm256_cmpgt_epi32(a, b)); }
V v_count_eq16(vi count, vi a, vi b) { return _mm256_sub_epi16(count, _mm256_cmpeq_epi16(a, b)); }
V v_count_gt16(vi count, vi a, vi b) { return _mm256_sub_epi16(count, _mm256_cmpgt_epi16(a, b)); }
V v_count_eq8(vi count, vi a, vi b) { return _mm256_sub_epi8(count, _mm256_cmpeq_epi8(a, b)); }
/* a > b ? x : y, signed */
V v_pick_gt32(vi a, vi b, vi x, vi y) { return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi32(a, b)); }
V v_pick_gt16(vi a, vi b, vi x, vi y) { return _mm256_blendv_epi8(y, x, _mm256_cmpgt_epi16(a, b)); }
static inline int v_any_gt32(vi a, vi b) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(a, b)) != 0; }
static inline int v_any_gt16(vi a, vi b) { return _mm256_movemask_epi8(_mm256_cmpgt_epi16(a, b)) != 0; }

/* 64-bit lanes: a * key of the even, of the odd 32-bit lanes; k is the keys of a's own lanes */
V v_mul_even(vi a, const uint32_t *k) { return _mm256_mul_epu32(a, v_load(k)); }
V v_mul_odd(vi a, const uint32_t *k) { return _mm256_mul_epu32(_mm256_srli_epi64(a, 32), v_load(k + 1)); }
V v_add64(vi a, vi b) { return _mm256_add_epi64(a, b); }

static inline uint64_t v_total64(vi a)
{
    __m128i half = _mm_add_epi64(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    return (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
}

/* the sum of all bytes */
static inline uint32_t v_total8(vi a) { return (uint32_t)v_total64(_mm256_sad_epu8(a, v_zero())); }

#define F static inline vf __attribute__((always_inline, unused))
F f_zero(void) { return _mm256_setzero_ps(); }
F f_set(float x) { return _mm256_set1_ps(x); }
F f_of(vi a) { return _mm256_castsi256_ps(a); }
F f_add(vf a, vf b) { return _mm256_add_ps(a, b); }
F f_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
F f_square_add(vf a, vf acc) { return _mm256_fmadd_ps(a, a, acc); }
F f_abs(vf a) { return _mm256_and_ps(a, f_of(v_set32(0x7FFFFFFF))); }
F f_low_half16(vi a) { return _mm256_cvtph_ps(_mm256_castsi256_si128(a)); }
F f_high_half16(vi a) { return _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)); }

/* acc[lane] += a[lane], in double */
static inline void f_flush(double *acc, vf a)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
    _mm256_storeu_pd(acc, _mm256_add_pd(_mm256_loadu_pd(acc), low));
    _mm256_storeu_pd(acc + 4, _mm256_add_pd(_mm256_loadu_pd(acc + 4), high));
}

static inline void v_store(void *p, vi a) { _mm256_storeu_si256((__m256i *)p, a); }
/* Half a page ahead: the hardware's own prefetch stops at each page. */
#define PREFETCH(p) _mm_prefetch((const char *)(p) + 2048, _MM_HINT_T0)
