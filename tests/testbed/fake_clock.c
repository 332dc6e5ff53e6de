/* Preloaded into one process: its wall clock (CLOCK_REALTIME, time, gettimeofday) runs as many seconds ahead as the
 * text file named by FAKE_CLOCK_FILE says (negative: behind), or said last where it cannot be read for a moment.  The
 * monotonic clock is left alone, as after a step of the real one. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void)
{
    const char *name = getenv("FAKE_CLOCK_FILE");
    FILE *file = name ? fopen(name, "re") : NULL;
    static long last;
    long seconds;

    if (file == NULL)
        return last;
    if (fscanf(file, "%ld", &seconds) == 1)
        last = seconds;
    fclose(file);
    return last;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);

    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset_s();
    return result;
}

time_t time(time_t *where)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (where != NULL)
        *where = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
