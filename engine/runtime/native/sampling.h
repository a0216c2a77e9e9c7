/* Drawing a token from a row of logits: greedy, or filtered (min_p, top_k, top_p) and by the Gumbel-max trick.
 *
 * Token i wins with the largest score[i] - log(-log1p(-u[i])), where u is a hash of (key, i) in (0, 1). Since
 * -log1p(-u) >= u, a token can beat the best so far only if u <= e^(score - best): one hash, one exponential and one
 * comparison rule out nearly all of them, and the few that remain are settled in float64. Scores count from the row's
 * peak, so none is above 0 and their bits without the sign, the *key* of a score, rise as the score falls. */

enum { BLOCK = 4 * W, STRETCH = 1024, DIGITS = 2048 };

/* Scores from i on, with -inf behind the end. */
INLINE vf load_scores(const float *scores, int64_t i, int64_t n) {
    if (i + W <= n) return load_f(scores + i);
    vf padded = splat(-INFINITY);
    if (i < n) memcpy(&padded, scores + i, (size_t)(n - i) * sizeof(float));
    return padded;
}

INLINE int any_of(vi mask) {
    int64_t halves[W / 2], any = 0;
    memcpy(halves, &mask, sizeof halves);
    UNROLL for (int i = 0; i < W / 2; i++) any |= halves[i];
    return any != 0;
}

INLINE vu score_key(vf score) { return (vu)score & 0x7fffffff; }

/* The first index of the largest value; `is_finite` is set if it is finite and no value is NaN. */
static int64_t first_peak(const float *x, int64_t n, uint8_t *is_finite) {
    float peak = -INFINITY;
    int64_t at = 0; /* the first stretch that holds the peak: only this one is searched */
    vi is_nan = {0};
    for (int64_t begin = 0; begin < n; begin += STRETCH) {
        vf best = splat(-INFINITY);
        for (int64_t i = begin; i < begin + STRETCH && i < n; i += W) {
            vf score = load_scores(x, i, n);
            best = max_f(score, best);
            is_nan |= COMPARE(score, !=, score);
        }
        if (peak_f(best) > peak) peak = peak_f(best), at = begin;
    }
    *is_finite = isfinite(peak) && !any_of(is_nan);
    while (at < n && x[at] != peak) at++;
    return at < n ? at : 0;
}

static void to_scores(float *x, int64_t n, float peak, float temperature) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store_f(x + i, (load_f(x + i) - peak) / temperature);
    for (; i < n; i++) x[i] = (x[i] - peak) / temperature;
}

/* The fewest best tokens, of those whose key is at most `limit`, that weigh `target` together, equal scores together:
 * the key of the worst. A token weighs 1, or by mass e^score, and then the target is a share of the total. The key is
 * found digit by digit, each in a pass over the tokens that agree with the digits before. */
static uint32_t worst_kept(const float *scores, int64_t n, uint32_t limit, double target, int by_mass) {
    static const int shifts[] = {20, 10, 0}, widths[] = {11, 10, 10};
    double before = 0;
    uint32_t prefix = 0;
    for (int level = 0; level < 3; level++) {
        double bins[DIGITS] = {0};
        int above = shifts[level] + widths[level];
        for (int64_t i = 0; i < n; i += W) {
            vf score = load_scores(scores, i, n);
            vu key = score_key(score);
            vi counts = COMPARE(key, <=, splat_u(limit)) & COMPARE(key >> above, ==, splat_u(prefix));
            if (!any_of(counts)) continue;
            vu digit = key >> shifts[level] & ((1u << widths[level]) - 1);
            vf weight = select_f(counts, by_mass ? exp_f(score) : splat(1), splat(0));
            for (int lane = 0; lane < W; lane++) bins[digit[lane]] += weight[lane];
        }
        if (level == 0 && by_mass) {
            double total = 0;
            for (int d = 0; d < DIGITS; d++) total += bins[d];
            target *= total;
        }
        uint32_t chosen = 0;
        double chosen_before = before;
        for (uint32_t d = 0; d < DIGITS && (before < target || before == chosen_before); d++) {
            if (bins[d] == 0) continue;
            chosen = d;
            chosen_before = before;
            before += bins[d];
        }
        before = chosen_before;
        prefix = prefix << widths[level] | chosen;
    }
    return prefix;
}

/* A 64-bit finalizer (splitmix64), and the two words of a draw's key. sampling/draw.py has the same. */
static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    return x ^ x >> 31;
}

static void make_key(const struct draw *draw, uint32_t *key) {
    uint64_t word = mix(mix(draw->seed) ^ draw->position);
    key[0] = (uint32_t)(word >> 32);
    key[1] = (uint32_t)word;
}

/* The noise's hash: 31 bits. sampling/draw.py has the same. */
INLINE vu hash_tokens(vu token, const uint32_t *key) {
    vu x = token * 0x9E3779B9u ^ key[0];
    x = (x ^ x >> 16) * 0x85EBCA6Bu ^ key[1];
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return (x ^ x >> 16) & 0x7fffffff;
}

/* A little more than e^x, by at most 7%, for x below 80: the chord of each octave lies above the curve. */
INLINE vf bound_exp(vf x) {
    vf bits = max_f(x * (1.44269504f * 0x1p23f) + (127 * 0x1p23f + 256), splat(0)); /* 256: more than any rounding */
    return (vf)__builtin_convertvector(bits, vi);
}

static double with_noise(float score, uint32_t hash) {
    return (double)score - log(-log1p(-((double)hash + 0.5) * 0x1p-31));
}

static int64_t best_with_noise(const float *scores, int64_t n, int64_t peak, uint32_t limit, const uint32_t *key) {
    vu lane = {0};
    for (int i = 0; i < W; i++) lane[i] = (uint32_t)i;
    int64_t winner = peak;
    double best = with_noise(scores[peak], hash_tokens(splat_u((uint32_t)peak), key)[0]);
    for (int64_t i = 0; i < n; i += BLOCK) {
        vi can_win[4];
        vu hash[4];
        UNROLL for (int v = 0; v < 4; v++) {
            vf score = load_scores(scores, i + v * W, n);
            hash[v] = hash_tokens(lane + (uint32_t)(i + v * W), key);
            vf uniform = (__builtin_convertvector((vi)hash[v], vf) + 0.5f) * 0x1p-31f;
            can_win[v] = COMPARE(uniform, <=, bound_exp(score - (float)best)) & COMPARE(score_key(score), <=, splat_u(limit));
        }
        if (!any_of((can_win[0] | can_win[1]) | (can_win[2] | can_win[3]))) continue;
        for (int64_t at = 0; at < BLOCK && i + at < n; at++) {
            if (!can_win[at / W][at % W]) continue;
            double value = with_noise(scores[i + at], hash[at / W][at % W]);
            if (value > best || (value == best && i + at < winner)) best = value, winner = i + at;
        }
    }
    return winner;
}

static int64_t drawn(const struct draw *draw, float *x, int64_t n, int64_t peak) {
    to_scores(x, n, x[peak], draw->temperature);
    uint32_t limit = score_key(splat(draw->lowest_score))[0];
    if (draw->top_k) limit = worst_kept(x, n, limit, (double)draw->top_k, 0);
    if (draw->top_p < 1) limit = worst_kept(x, n, limit, draw->top_p, 1);
    uint32_t key[2];
    make_key(draw, key);
    return best_with_noise(x, n, peak, limit, key);
}

void sample_rows(const void *args, int64_t begin, int64_t end) {
    const struct sample_args *a = args;
    for (int64_t row = begin; row < end; row++) {
        const struct draw *draw = &a->draws[row];
        float *x = a->logits + row * a->vocab_size;
        int64_t peak = first_peak(x, a->vocab_size, &a->is_finite[row]);
        a->ids[row] = draw->temperature == 0 ? peak : drawn(draw, x, a->vocab_size, peak);
        if (a->last_ids) a->last_ids[draw->slot] = a->ids[row];
    }
}
