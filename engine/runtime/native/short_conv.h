/* A convolution over the last tokens between two gates: layers/short_conv.py in C. */
#ifndef QUIRE_SHORT_CONV_H
#define QUIRE_SHORT_CONV_H

#include "states.h"

SHARED struct short_conv {
    const float *taps, *bias; /* as in struct convolution */
    int64_t kernel, segment;
};

/* The rows of a step. */
struct gated_rows {
    const char *projected; /* [rows][3 * channels]: gates b, gates c, x */
    char *inputs;          /* [rows][channels]: b x, the rows of the convolution */
    char *out;             /* [rows][channels] */
    struct convolution convolution;
    int32_t dtype; /* of all */
};

#endif
