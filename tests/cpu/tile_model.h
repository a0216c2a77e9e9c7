/* A model of AMX's tile registers, on which tests run the kernels where a machine has none: compiled into the library in place of
 * the instructions (tile_model.py), or beside it, where these trap (tile_traps.c). It traps where the machine would. */

static _Thread_local struct tile_shapes tile_now;
static _Thread_local uint8_t tile_data[NUM_TILES][TILE_ROWS][TILE_BYTES];

static void tile_configure(const struct tile_shapes *shapes) {
    if (shapes->palette != 1 || shapes->start_row) __builtin_trap(); /* as the machine does */
    for (int i = 0; i < 16; i++)
        if (shapes->rows[i] > (i < NUM_TILES ? TILE_ROWS : 0) || shapes->bytes[i] > TILE_BYTES || !shapes->rows[i] != !shapes->bytes[i])
            __builtin_trap();
        else if (shapes->bytes[i] % 4) __builtin_trap(); /* here; the machine where the tile is used */
    tile_now = *shapes;
    memset(tile_data, 0, sizeof tile_data);
}

static void tile_release(void) { memset(&tile_now, 0, sizeof tile_now); }

static void tile_zero(int tile) {
    if (!tile_now.rows[tile]) __builtin_trap();
    memset(tile_data[tile], 0, sizeof tile_data[tile]);
}

static void tile_load(int tile, const void *from, size_t stride) {
    tile_zero(tile);
    for (size_t r = 0; r < tile_now.rows[tile]; r++)
        memcpy(tile_data[tile][r], (const char *)from + r * stride, tile_now.bytes[tile]);
}

static void tile_load_once(int tile, const void *from, size_t stride) { tile_load(tile, from, stride); }

static void tile_store(int tile, void *to, size_t stride) {
    if (!tile_now.rows[tile]) __builtin_trap();
    for (size_t r = 0; r < tile_now.rows[tile]; r++)
        memcpy((char *)to + r * stride, tile_data[tile][r], tile_now.bytes[tile]);
}

/* Whether c [rows][columns] += a [rows][inputs] . b [inputs][columns] is possible. */
static void tile_check(int c, int a, int b) {
    const struct tile_shapes *s = &tile_now;
    if (a == b || a == c || b == c) __builtin_trap();
    if (!s->rows[c] || s->rows[a] != s->rows[c] || s->rows[b] != s->bytes[a] / 4 || s->bytes[b] != s->bytes[c])
        __builtin_trap();
}

/* Never inlined: compilers move arithmetic across the change of what becomes of denormals. */
__attribute__((noinline)) static void tile_bf16_rows(int c, int a, int b) {
    for (int r = 0; r < tile_now.rows[c]; r++) {
        __m512 even = _mm512_setzero_ps(), odd = even, sum = _mm512_loadu_ps(tile_data[c][r]);
        for (int i = 0; i < tile_now.rows[b]; i++) {
            __m512i pairs = _mm512_loadu_si512(tile_data[b][i]), high = _mm512_set1_epi32((int)0xffff0000);
            uint32_t x;
            memcpy(&x, tile_data[a][r] + 4 * i, 4);
            __m512i both = _mm512_set1_epi32((int)x);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(both, 16), (__m512)_mm512_slli_epi32(pairs, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(both, high), (__m512)_mm512_and_si512(pairs, high), odd);
        }
        _mm512_storeu_ps(tile_data[c][r], _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
    }
}

static void tile_dot_bf16(int c, int a, int b) {
    enum { DENORMALS_ARE_ZERO = 0x8040 }; /* inputs and results */
    tile_check(c, a, b);
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | DENORMALS_ARE_ZERO);
    tile_bf16_rows(c, a, b);
    _mm_setcsr(before);
}

/* c += a . b, of signed bytes of a and unsigned ones of b. */
static void tile_dot_codes(int c, int a, int b) {
    tile_check(c, a, b);
    for (int r = 0; r < tile_now.rows[c]; r++)
        for (int i = 0; i < tile_now.bytes[c] / 4; i++) {
            int32_t sum;
            memcpy(&sum, tile_data[c][r] + 4 * i, 4);
            for (int k = 0; k < tile_now.bytes[a]; k++) sum += (int8_t)tile_data[a][r][k] * tile_data[b][k / 4][4 * i + k % 4];
            memcpy(tile_data[c][r] + 4 * i, &sum, 4);
        }
}
