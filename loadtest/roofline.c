/* What one core can do at best: bytes read, and products of tiles that lie in its first cache.
 *
 * Compiled by roofline.py for the machine it runs on; a function whose instructions are missing here does nothing and
 * says so by returning 0. Each returns the operations it made, so that nothing is optimised away and the caller only
 * divides by time. Shared with nothing: a roof must not be built of the kernels that are measured under it. */

#include <stdint.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* 6 x 2 sums: enough to hide a multiplication's latency, few enough that GCC, which copies each, spills none. */
enum { ROWS = 6, COLUMNS = 32, DEPTH = 256 };

static volatile uint64_t sink;

/* Every cache line of the buffer, once. */
int64_t roof_read(const uint64_t *buffer, int64_t bytes) {
    uint64_t sums[8] = {0};
    for (int64_t i = 0; i < bytes / 8; i += 8)
        for (int j = 0; j < 8; j++) sums[j] ^= buffer[i + j];
    sink = sums[0] ^ sums[1] ^ sums[2] ^ sums[3] ^ sums[4] ^ sums[5] ^ sums[6] ^ sums[7];
    return bytes;
}

/* ROWS x DEPTH by DEPTH x COLUMNS in bfloat16, `times` times; two operations a multiplication. `tiles` holds both. */
int64_t roof_bf16(const uint32_t *tiles, int64_t times) {
#ifdef __AVX512BF16__
    const uint32_t *left = tiles, *right = tiles + ROWS * DEPTH / 2;
    __m512 sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t round = 0; round < times; round++)
        for (int k = 0; k < DEPTH / 2; k++) {
            const __m512bh b0 = (__m512bh)_mm512_loadu_si512(right + k * COLUMNS);
            const __m512bh b1 = (__m512bh)_mm512_loadu_si512(right + k * COLUMNS + 16);
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) {
                const __m512bh a = (__m512bh)_mm512_set1_epi32((int)left[k * ROWS + i]);
                sums[i][0] = _mm512_dpbf16_ps(sums[i][0], a, b0);
                sums[i][1] = _mm512_dpbf16_ps(sums[i][1], a, b1);
            }
        }
    float total = 0;
    for (int i = 0; i < ROWS; i++) total += _mm512_reduce_add_ps(_mm512_add_ps(sums[i][0], sums[i][1]));
    sink = (uint64_t)total;
    return times * 2 * ROWS * COLUMNS * DEPTH;
#else
    (void)tiles, (void)times;
    return 0;
#endif
}

/* The same of unsigned by signed bytes into 32 bits. */
int64_t roof_int8(const uint32_t *tiles, int64_t times) {
#ifdef __AVX512VNNI__
    const uint32_t *left = tiles, *right = tiles + ROWS * DEPTH / 4;
    __m512i sums[ROWS][2];
    for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = _mm512_setzero_si512();
    for (int64_t round = 0; round < times; round++)
        for (int k = 0; k < DEPTH / 4; k++) {
            const __m512i b0 = _mm512_loadu_si512(right + k * COLUMNS);
            const __m512i b1 = _mm512_loadu_si512(right + k * COLUMNS + 16);
#pragma GCC unroll 6
            for (int i = 0; i < ROWS; i++) {
                const __m512i a = _mm512_set1_epi32((int)left[k * ROWS + i]);
                sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], a, b0);
                sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], a, b1);
            }
        }
    int total = 0;
    for (int i = 0; i < ROWS; i++) total += _mm512_reduce_add_epi32(_mm512_add_epi32(sums[i][0], sums[i][1]));
    sink = (uint64_t)total;
    return times * 2 * ROWS * COLUMNS * DEPTH;
#else
    (void)tiles, (void)times;
    return 0;
#endif
}
