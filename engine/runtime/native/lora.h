/* Low-rank adapters in a forward pass: their terms in the products of the rows that have one. */
#ifndef QUIRE_LORA_H
#define QUIRE_LORA_H

#include "quire_cpu.h"

/* The matrices of a layer that adapters may change. */
enum place {
    PLACE_QKV, PLACE_O, PLACE_Q_B, /* Q_B: of a latent of queries, or the gates of Gated DeltaNet */
    PLACE_GATE_UP, PLACE_DOWN,
    PLACE_BESIDE, /* that of the second mixer's PLACE_QKV; its others follow */
    NUM_PLACES = PLACE_BESIDE + PLACE_GATE_UP
};

/* y += (x down^T) up^T, see struct addend; down.packed NULL: nothing. */
SHARED struct low_rank {
    struct linear down, up;
};

/* The adapters of a step: their layers, and the adapter of each row. */
SHARED struct adapters {
    const struct low_rank *const *layers; /* [num], each [num_layers][NUM_PLACES]; layers behind them have no such matrix */
    const int32_t *of_rows;               /* [rows], -1: none */
    int64_t num, num_layers;              /* num 0: the other fields are undefined */
};

/* Rows sorted by adapter, and room for their results. */
struct adapter_rows {
    const struct adapters *adapters;
    int64_t num_rows;
    int64_t *starts;        /* [num + 1], of each adapter's rows in `order` */
    int64_t *order;         /* [rows] */
    struct addend *addends; /* [rows], for gemm_args */
    char *x, *low;          /* [rows, inputs] and [rows, rank] of one product */
    void *packed;           /* rows of x, packed for a product */
};

/* Point `r` at its parts of `base`, or with NULL count their bytes, which are returned: for at most `num_rows` rows. */
size_t adapter_rows_lay_out(struct adapter_rows *r, const struct adapters *adapters, int64_t num_rows, char *base);

/* Sort a step's rows, or those of them that `rows` names. */
void adapter_rows_sort(struct adapter_rows *r, const int64_t *rows, int64_t num_rows);

/* Compute the addends of the product of x with a matrix. */
int32_t adapter_rows_multiply(struct adapter_rows *r, int64_t layer, enum place place, const void *x);

#endif
