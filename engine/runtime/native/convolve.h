/* Convolutions along the tokens of a slice (states.h), vectors along the channels. */
#include "states.h"

enum { MAX_RUN = 8, MAX_KERNEL = 8 }; /* tokens that are computed together */

/* out = the sums of taps times inputs, and a bias, of a segment's channels for tokens [first, first + num) of a slice, which
 * are `out_stride` floats apart. */
INLINE void convolve_segment_as(const struct convolution *c, int64_t slice, int64_t first, int64_t num, int64_t segment,
                                float *out, int64_t out_stride, int is_silu, int64_t kernel, enum dtype dtype) {
    const char *inputs[MAX_RUN + MAX_KERNEL - 1];
    int64_t width = c->segment;
    struct view bias = {(void *)c->bias, (size_t)(segment * width), DT_F32};
    for (int64_t i = 0; i < num + kernel - 1; i++) inputs[i] = inputs_at(c, slice, first + i - (kernel - 1), segment);
    for (int64_t at = 0; at < width; at += W) {
        vf taps[MAX_KERNEL] = {0}, added = bias.base ? get(bias, at, width) : splat(0);
        UNROLL for (int64_t k = 0; k < kernel; k++)
            taps[k] = get((struct view){(void *)c->taps, (size_t)(k * c->channels + segment * width), DT_F32}, at, width);
        for (int64_t i = 0; i < num; i++) {
            vf sum = splat(0);
            UNROLL for (int64_t k = 0; k < kernel; k++)
                sum += taps[k] * get((struct view){(void *)inputs[i + k], 0, dtype}, at, width);
            sum += added;
            if (is_silu) sum /= 1.f + exp_f(-sum);
            put((struct view){out, (size_t)(i * out_stride), DT_F32}, at, width, sum);
        }
    }
}

/* The same; kernels of three and four keep their taps in registers. */
INLINE void convolve_segment_of(const struct convolution *c, int64_t slice, int64_t first, int64_t num, int64_t segment,
                                float *out, int64_t out_stride, int is_silu, enum dtype dtype) {
    if (c->kernel == 4)
        convolve_segment_as(c, slice, first, num, segment, out, out_stride, is_silu, 4, dtype);
    else if (c->kernel == 3)
        convolve_segment_as(c, slice, first, num, segment, out, out_stride, is_silu, 3, dtype);
    else
        convolve_segment_as(c, slice, first, num, segment, out, out_stride, is_silu, c->kernel, dtype);
}

/* The same for any type. Never inlined: compiling it takes a second. */
__attribute__((noinline)) static void convolve_segment(const struct convolution *c, int64_t slice, int64_t first, int64_t num,
                                                       int64_t segment, float *out, int64_t out_stride, int is_silu) {
    BY_TYPE(c->dtype, convolve_segment_of, c, slice, first, num, segment, out, out_stride, is_silu);
}

/* The same for all channels. */
INLINE void convolve(const struct convolution *c, int64_t slice, int64_t first, int64_t num, float *out,
                     int64_t out_stride, int is_silu) {
    for (int64_t segment = 0; segment * c->segment < c->channels; segment++)
        convolve_segment(c, slice, first, num, segment, out + segment * c->segment, out_stride, is_silu);
}
