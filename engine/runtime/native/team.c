/* A team of threads for many short calls on a shared machine.
 *
 * Work is handed out in pieces that any thread may take, so a call does not wait for a worker that the system has not
 * scheduled. A worker joins a call while its gate is open. The caller works too, closes the gate when the pieces have run
 * out, and waits only for the workers inside. Between calls a worker polls for the next one for a while, because a step
 * makes one every few microseconds, and then sleeps. */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "quire_cpu.h"

enum {
    MAX_WORKERS = 255,
    WATCHES = 20000, /* looks at `epoch` before a worker sleeps: some 50 us */
    PATIENCE = 2000, /* looks at `gate` before the caller yields its core */
};
static const unsigned CLOSED = 1u << 31;

static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake_up = PTHREAD_COND_INITIALIZER;
static atomic_uint epoch;              /* calls so far */
static atomic_uint gate = 1u << 31;    /* number of workers inside the current call; CLOSED: none may join */
static atomic_int num_asleep, num_wanted = 1; /* wanted: threads of a call, the caller included */
static int num_workers;
static _Thread_local int32_t is_aside; /* this thread's calls leave the team to others */
static _Thread_local const volatile double *pause_at; /* when this thread's calls pause; NULL: they do not */
static _Thread_local int32_t (*pause_call)(void);
static _Thread_local int32_t is_over; /* nobody needs what this thread's calls compute */
static team_work job_work;
static void *job_context;

/* Wait until there has been a call since `seen`; returns the latest. */
static unsigned next_call(unsigned seen) {
    for (int i = 0; i < WATCHES; i++, relax()) {
        unsigned now = atomic_load(&epoch);
        if (now != seen) return now;
    }
    pthread_mutex_lock(&sleep_lock);
    atomic_fetch_add(&num_asleep, 1);
    while (atomic_load(&epoch) == seen) pthread_cond_wait(&wake_up, &sleep_lock);
    atomic_fetch_sub(&num_asleep, 1);
    pthread_mutex_unlock(&sleep_lock);
    return atomic_load(&epoch);
}

static void *serve(void *argument) {
    int index = (int)(intptr_t)argument;
    for (unsigned seen = 0;;) {
        seen = next_call(seen);
        if (index >= atomic_load(&num_wanted)) continue;
        unsigned inside = atomic_load(&gate);
        while (!(inside & CLOSED) && !atomic_compare_exchange_weak(&gate, &inside, inside + 1)) relax();
        if (inside & CLOSED) continue;
        job_work(job_context);
        atomic_fetch_sub(&gate, 1);
    }
    return NULL;
}

/* From now on calls use `num_threads` threads, the caller included, or as many as the system gives. */
__attribute__((visibility("default"))) void quire_set_threads(int32_t num_threads) {
    if (num_threads < 1) num_threads = 1;
    if (num_threads > MAX_WORKERS) num_threads = MAX_WORKERS;
    for (; num_workers < num_threads - 1; num_workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)(num_workers + 1))) break;
        pthread_detach(thread);
    }
    atomic_store(&num_wanted, num_threads < num_workers + 1 ? num_threads : num_workers + 1);
}

/* From now on the calling thread computes alone, or in the team again. */
__attribute__((visibility("default"))) void quire_stay_aside(int32_t stays) { is_aside = stays; }

/* From now on the calling thread's calls pause between two pieces of work once the monotonic clock has come to *at: then they
 * call `pause`, which returns when they may go on. If it returns anything but 0, they and all later ones compute nothing. */
__attribute__((visibility("default"))) void quire_pause(const volatile double *at, int32_t (*pause)(void)) {
    pause_at = at, pause_call = pause, is_over = 0;
}

double team_pause_at(void) { return pause_at ? *pause_at : HUGE_VAL; }

int team_must_pause(double at) {
    struct timespec now;
    if (at == HUGE_VAL) return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec >= at;
}

int team_goes_on(void) {
    is_over = is_over || pause_call();
    return !is_over;
}

int team_size(void) { return atomic_load(&num_wanted); }

void team_run(team_work work, void *context, int num_threads) {
    static atomic_flag is_taken = ATOMIC_FLAG_INIT;
    if (is_over) return;
    if (num_threads < 2 || is_aside || team_size() < 2 || atomic_flag_test_and_set(&is_taken)) {
        work(context); /* also while another thread of the process uses the team */
        return;
    }
    job_work = work;
    job_context = context;
    atomic_store(&gate, 0);
    atomic_fetch_add(&epoch, 1);
    if (atomic_load(&num_asleep)) {
        pthread_mutex_lock(&sleep_lock);
        pthread_cond_broadcast(&wake_up);
        pthread_mutex_unlock(&sleep_lock);
    }
    work(context);
    atomic_fetch_or(&gate, CLOSED);
    for (int i = 0; atomic_load(&gate) != CLOSED; i++) {
        relax();
        if (i > PATIENCE) sched_yield();
    }
    atomic_flag_clear(&is_taken);
}
