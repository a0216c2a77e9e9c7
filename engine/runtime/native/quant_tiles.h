/* Products of quantised weights on tiles: their codes are unpacked to pairs of bfloat16, a slice of a panel once for all rows. Scaling
 * sums after every 32 inputs, as quant.h does, costs vectors more than the products cost tiles, and rounds x to bytes.
 *
 * A code becomes the top of the mantissa of a float between 1 and 2: a product and a sum make that a weight. Its last 16 bits are cut
 * off, from a number larger by 1 / 355. So what bfloat16 holds stays as it is, but for 0, which becomes up to 2^-17 of a scale,
 * and the error of other numbers, 0 on average, is 1.07 times that of the nearest ones. */

enum {
    UNPACKED_BLOCKS = 2 * SUPER, /* whose pairs are kept for several groups: 32 KiB; */
    UNPACKED_ALONE = 4,          /* for one */
    WINDOW = 32 << 10,           /* bytes of codes in a slice of a group alone, during which it fetches the next slice */
};

/* Blocks of a panel that the first group of rows unpacks, each ahead of its products. */
struct unpacking {
    ALIGNED uint32_t pairs[UNPACKED_BLOCKS * QBLOCK / 2 * PANEL]; /* [lanes][PANEL] */
    vf supers[2][PANEL / W]; /* scales and minimums of SUPER blocks */
    const struct linear *w;
    const char *panel; /* the next block */
    size_t at, end; /* blocks of the slice, which begins at a multiple of SUPER, that are unpacked; all of them */
    size_t kept;    /* blocks, a power of two: one more takes the place of the first */
};

/* What codes are multiplied with, by where in its byte a code begins, and what is added then. */
struct scaling {
    vf factors[2], terms[2];
};

INLINE struct scaling scaling_of(struct quant_format f, const char *head, int v, const vf supers[2][PANEL / W]) {
    const float enlarged = 1 + 1 / 355.f;
    const vf scale = quant_scale(f, head, v, supers[0][v]) * enlarged;
    struct scaling s;
    UNROLL for (int half = 0; half < 2; half++) {
        s.factors[half] = scale * (half ? 16.f : 256.f);
        s.terms[half] = -(s.factors[half] + scale * (float)f.zero);
        if (f.has_min) s.terms[half] -= quant_scale(f, head + quant_scale_bytes(f) * PANEL, v, supers[1][v]) * enlarged;
    }
    return s;
}

/* The weights of codes of up to eight bits, in byte `byte` of each lane from its bit 0, or `half`, bit 4, on. */
INLINE vu weights_of(vu codes, int byte, int half, int bits, const struct scaling *s) {
    const int turn = (15 - 8 * byte) & 31;
    const vu turned = codes << turn | codes >> (32 - turn);
    const uint32_t mantissa = ((1u << bits) - 1) << (15 + 4 * half);
    return (vu)fused((vf)merge(turned, mantissa, splat_u(0x3f800000)), s->factors[half], s->terms[half]);
}

INLINE void unpack_block(struct quant_format f, const char *block, vu table, const vf supers[2][PANEL / W], uint32_t *pairs) {
    const int is_plane = f.bits == 4 && !f.has_table, bits = is_plane ? 4 : 8; /* one plane is read as it lies */
    const char *codes = block + quant_head_bytes(f);
    UNROLL for (int v = 0; v < PANEL / W; v++) {
        struct scaling scaling;
        UNROLL for (int quad = 0; quad < QBLOCK / 4; quad += 2) {
            const int group = quad * 4 / f.group;
            if (quad * 4 % f.group == 0)
                scaling = scaling_of(f, block + (size_t)(group * quant_scale_bytes(f) * (1 + f.has_min) * PANEL), v, supers);
            const vu plane = is_plane ? load_u(codes + (size_t)(quad / 2 * PANEL + v * W) * 4) : splat_u(0);
            vu lanes[4];
            UNROLL for (int i = 0; i < 4; i++) {
                const vu four = is_plane ? plane : load_factors(f, codes, quad + i / 2, v, table);
                const int byte = i % 2 * 2, half = is_plane ? i / 2 : 0;
                lanes[i] = pair_high(weights_of(four, byte, half, bits, &scaling), weights_of(four, byte + 1, half, bits, &scaling));
            }
            UNROLL for (int i = 0; i < 4; i++) memcpy(pairs + (2 * quad + i) * PANEL + v * W, &lanes[i], sizeof lanes[i]);
        }
    }
}

INLINE void unpack_as(int32_t format, struct unpacking *u) {
    const struct quant_format f = quant_format_of(format);
    const vu table = f.has_table ? load_table(quant_table_of(u->w->format)) : splat_u(0);
    if (f.scale == SCALE_CODE && u->at % SUPER == 0) {
        for (int i = 0; i <= f.has_min; i++)
            for (int v = 0; v < PANEL / W; v++) u->supers[i][v] = load_f16(u->panel + (i * PANEL + v * W) * 2) * f.unit;
        u->panel += quant_super_bytes(f);
    }
    unpack_block(f, u->panel, table, u->supers, u->pairs + (u->at++ & (u->kept - 1)) * (QBLOCK / 2) * PANEL);
    u->panel += quant_block_bytes(f);
}

/* Unpack the next block, if there is one. */
static void unpack_next(struct unpacking *u) {
    if (u->at == u->end) return;
#define UNPACK(F) case F: unpack_as(F, u); break;
    switch (kernel_of(u->w->format)) { EACH_GROUPED(UNPACK) }
#undef UNPACK
}

/* Begin a slice of `num` blocks at `panel`. Returns where its pairs will be. */
INLINE const uint32_t *unpack_from(struct unpacking *u, const char *panel, size_t num) {
    u->panel = panel, u->at = 0, u->end = num;
    return u->pairs;
}

/* Where block `at`, or with SCALE_CODE what it shares with the SUPER blocks that it begins, lies in panel `p`. */
INLINE const char *quant_block(const struct linear *w, int64_t p, int64_t at) {
    const struct quant_format f = quant_format_of(w->format);
    const size_t supers = (size_t)((at + SUPER - 1) / SUPER * quant_super_bytes(f));
    return (const char *)w->packed + (size_t)p * quant_panel_bytes(f, w->k) + (size_t)at * quant_block_bytes(f) + supers;
}
