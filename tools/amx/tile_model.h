/* Stands in for the tile registers to tell how long a Xeon would take: no numbers, but a clock. Each load and store goes
 * through a first and a second cache, and instructions wait for the registers, the unit and the ports that they need
 * (predict.py says where the figures come from). Vectors and what they read take no time here. */

enum { LINE = 64, L1_SETS = 64, L1_WAYS = 12, L2_SETS = 2048, L2_WAYS = 16, WINDOW = 48 /* tile instructions in flight */ };

struct tile_clock {
    double unit, loads, stores, memory, registers[NUM_TILES]; /* when each is free, in cycles */
    double retired, retire[WINDOW];                           /* in order */
    uint64_t num_dots, num_lines[3], next;                    /* lines loaded: from both caches, and from behind them */
    uint64_t l1[L1_SETS][L1_WAYS], l2[L2_SETS][L2_WAYS];      /* the latest first */
};

__attribute__((weak, visibility("default"))) struct tile_clock tile_clock;
static struct tile_shapes tile_now;

/* Whether a set has a line, which becomes its latest. */
static int touch(uint64_t *set, int ways, uint64_t line) {
    int at = 0, found;
    while (at < ways - 1 && set[at] != line) at++;
    found = set[at] == line;
    memmove(set + 1, set, (size_t)at * sizeof *set);
    set[0] = line;
    return found;
}

/* The place of a line: 0 and 1 are caches. Both have it afterwards, or the second alone. */
static int place_of(const void *p, int is_near) {
    uint64_t line = (uint64_t)p / LINE;
    int is_in_first = is_near && touch(tile_clock.l1[line % L1_SETS], L1_WAYS, line);
    int is_in_second = touch(tile_clock.l2[line % L2_SETS], L2_WAYS, line);
    return is_in_first ? 0 : is_in_second ? 1 : 2;
}

static void tile_fetch(const void *p) {
    if (place_of(p, 0) == 2) tile_clock.memory += 8;
}
#define __builtin_prefetch(p, ...) tile_fetch(p)

/* When an instruction may begin, as far as those are concerned that it follows. */
static double tile_begin(double port) {
    double earliest = tile_clock.retire[tile_clock.next % WINDOW];
    return port > earliest ? port : earliest;
}

static void tile_end(double end) {
    if (end > tile_clock.retired) tile_clock.retired = end;
    tile_clock.retire[tile_clock.next++ % WINDOW] = tile_clock.retired;
}

static void tile_configure(const struct tile_shapes *shapes) { tile_now = *shapes; }
static void tile_release(void) {}
static void tile_zero(int tile) { tile_clock.registers[tile] = 0; }

static void tile_load(int tile, const void *from, size_t stride) {
    const double cycles[] = {1 / 2., 64 / 48., 8};
    double begin = tile_begin(tile_clock.loads), end = begin;
    for (size_t r = 0; r < tile_now.rows[tile]; r++) {
        const char *row = (const char *)from + r * stride;
        for (uint64_t at = (uint64_t)row / LINE; at <= ((uint64_t)row + tile_now.bytes[tile] - 1) / LINE; at++) {
            int place = place_of((const char *)(at * LINE), 1);
            tile_clock.num_lines[place]++;
            if (place == 2) tile_clock.memory = end = (end > tile_clock.memory ? end : tile_clock.memory) + cycles[2];
            else end += cycles[place];
        }
    }
    tile_clock.loads = end;
    tile_clock.registers[tile] = end + 37;
    tile_end(end + 37);
}

static void tile_store(int tile, void *to, size_t stride) {
    double begin = tile_begin(tile_clock.stores), ready = tile_clock.registers[tile];
    for (size_t r = 0; r < tile_now.rows[tile]; r++) place_of((char *)to + r * stride, 1);
    tile_clock.stores = (begin > ready ? begin : ready) + tile_now.rows[tile];
    tile_end(tile_clock.stores);
}

static void tile_dot(int c, int a, int b) {
    double begin = tile_begin(tile_clock.unit);
    for (int i = 0; i < 3; i++) {
        double ready = tile_clock.registers[(int[]){a, b, c}[i]];
        if (ready > begin) begin = ready;
    }
    tile_clock.unit = begin + 16;
    tile_clock.registers[c] = begin + 52;
    tile_clock.num_dots++;
    tile_end(begin + 52);
}

#define tile_dot_bf16 tile_dot
#define tile_dot_int8 tile_dot
