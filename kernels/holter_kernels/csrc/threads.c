/* Threads of our own, kept between passes: never OpenMP, whose pool belongs to the training framework.
 *
 * A pass posts its plan; the caller and the workers take jobs by an atomic counter until none is left; the caller returns when
 * every worker that took part has let go. A second caller at the same time does all its jobs itself. In a forked child the
 * workers do not exist: the pool starts again from nothing.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>

#include "pass.h"

#define MAX_WORKERS 63

static struct {
    pthread_mutex_t lock;
    pthread_cond_t posted, done;
    const struct plan *plan; /* what is being run, or NULL */
    uint64_t next_job, generation;
    int num_workers, num_wanted, num_active, is_busy, is_fork_handled;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER, .done = PTHREAD_COND_INITIALIZER};

static void take_jobs(const struct plan *plan)
{
    uint64_t job;
    while ((job = __atomic_fetch_add(&pool.next_job, 1, __ATOMIC_RELAXED)) < plan->num_jobs)
        run_job(plan, job);
}

static void *work(void *unused)
{
    uint64_t seen = 0;
    (void)unused;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.generation == seen || !pool.plan || !pool.num_wanted)
            pthread_cond_wait(&pool.posted, &pool.lock);
        seen = pool.generation;
        const struct plan *plan = pool.plan;
        pool.num_wanted--;
        pool.num_active++;
        pthread_mutex_unlock(&pool.lock);
        take_jobs(plan);
        pthread_mutex_lock(&pool.lock);
        if (--pool.num_active == 0)
            pthread_cond_signal(&pool.done);
    }
    return NULL;
}

static void forget_pool(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.posted, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.plan = NULL;
    pool.num_workers = pool.num_wanted = pool.num_active = pool.is_busy = 0;
}

/* With the lock held. A thread that cannot be had is done without. */
static void hire(int wanted)
{
    sigset_t all, before;
    if (!pool.is_fork_handled)
        pool.is_fork_handled = pthread_atfork(NULL, NULL, forget_pool) == 0;
    if (!pool.is_fork_handled)
        return;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.num_workers < wanted && pool.num_workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL))
            break;
        pthread_detach(thread);
        pool.num_workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void run_jobs(const struct plan *plan)
{
    int is_ours = 0;
    if (plan->num_threads > 1 && plan->num_jobs > 1) {
        pthread_mutex_lock(&pool.lock);
        is_ours = !pool.is_busy;
        if (is_ours) {
            hire(plan->num_threads - 1);
            pool.is_busy = 1;
            pool.plan = plan;
            pool.next_job = 0;
            pool.generation++;
            pool.num_wanted = plan->num_threads - 1;
            pthread_cond_broadcast(&pool.posted);
        }
        pthread_mutex_unlock(&pool.lock);
    }
    if (!is_ours) {
        for (size_t job = 0; job < plan->num_jobs; job++)
            run_job(plan, job);
        return;
    }
    take_jobs(plan);
    pthread_mutex_lock(&pool.lock);
    pool.plan = NULL; /* nobody joins now; those who did hold jobs still */
    while (pool.num_active)
        pthread_cond_wait(&pool.done, &pool.lock);
    pool.is_busy = 0;
    pthread_mutex_unlock(&pool.lock);
}
