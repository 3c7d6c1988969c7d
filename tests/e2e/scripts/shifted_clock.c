/* The host's clock, as somebody sets it: loaded before everything else (LD_PRELOAD), it adds to the time of day what the file says that
 * HOLTER_TEST_CLOCK names, eight bytes, nanoseconds; `<file>.<RANK>` instead where that is there. Steady clocks are left alone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t none;
static const volatile int64_t *shift = &none;
static const int64_t SECOND = 1000000000;

__attribute__((constructor)) static void find(void) {
    const char *file = getenv("HOLTER_TEST_CLOCK"), *rank = getenv("RANK");
    char own[4096];
    if (!file) return;
    snprintf(own, sizeof own, "%s.%s", file, rank ? rank : "");
    int descriptor = open(own, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) descriptor = open(file, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) return;
    void *found = mmap(NULL, 8, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (found != MAP_FAILED) shift = found;
}

static void move(struct timespec *time, int64_t by) {
    int64_t all = time->tv_sec * SECOND + time->tv_nsec + by;
    time->tv_sec = all / SECOND;
    time->tv_nsec = all % SECOND;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int code = (int)syscall(SYS_clock_gettime, clock, time);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) move(time, *shift);
    return code;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}

/* The kernel wakes by its own clock: a deadline of the time of day is told as that. Steady deadlines are small numbers. */
int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec told = *until;
    if (told.tv_sec > 1000000000) move(&told, -*shift);
    return real(condition, mutex, &told);
}
