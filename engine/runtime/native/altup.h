/* Alternating updates (Gemma 3n): a layer computes one of several residual streams. layers/altup.py in C. */
#ifndef QUIRE_ALTUP_H
#define QUIRE_ALTUP_H

#include "quire_cpu.h"

#define LEAST_SQUARE 1e-5f /* of a mean square that divides */

/* What a layer does to the streams. */
SHARED struct mixing {
    const float *router;     /* [num, width], the weight of its norm included */
    const float *predict;    /* [num * num, num] */
    const float *correct;    /* [num, num] */
    const float *scale;      /* [width], of the first stream where the gate reads it */
    const float *after_gate; /* [width], the weight of the norm of what the gate says, which all other streams get */
};

/* Rows of all streams. */
struct altup_args {
    const struct mixing *mixing;
    float *stream;      /* [rows, width]: the first, which the layer computes */
    float *streams;     /* [rows, num, width]: all, the first as it was predicted */
    const float *delta; /* [rows, width], of the gate */
    void *x;            /* [rows, width] of `dtype`: what the gate reads */
    int64_t num, width;
    float eps;
    int32_t dtype;
};

/* to = from * rms(like) / rms(from), row by row. */
struct lengthen_args {
    const float *from, *like;
    float *to;
    int64_t from_stride, like_stride, to_stride, width;
};

/* stream = sqrt(1 / 2) * (stream + x + norm(delta)). */
struct laurel_args {
    float *stream;       /* [rows, width] */
    const void *x;       /* [rows, width] of `dtype` */
    const float *delta;  /* [rows, width] */
    const float *weight; /* [width], of the norm */
    int64_t width;
    float eps;
    int32_t dtype;
};

/* inner = activation(gate - cut, or 0) * up. The cut is the mean of a row's gates, plus so many standard deviations. */
struct sparse_args {
    const void *gate_up; /* [rows, 2 * width] of `dtype`, gates first */
    void *inner;         /* [rows, width] of `dtype` */
    int64_t width;
    float deviations;
    int32_t dtype, activation;
};

#endif
