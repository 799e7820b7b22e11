"""Move the clock of running processes: a preloaded library adds an offset to it.

Only the wall clock moves, as when NTP or an operator sets it. CLOCK_MONOTONIC does not, and a
process's deadlines on the moved wall clock are moved back before the kernel sees them. The library
is compiled when a drill starts, by the C compiler that Triton needs too. libfaketime 0.9.10 cannot
replace it: if CLOCK_MONOTONIC is excluded, time.sleep fails.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

VARIABLE = "COATLM_DRILL_CLOCK"  # the file that holds the offset: seconds, int64
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static volatile int64_t *offset;
static int (*next_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void map_offset(void) {
    next_clock = NEXT(clock_gettime);
    const char *name = getenv("COATLM_DRILL_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    offset = page == MAP_FAILED ? 0 : page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!next_clock) next_clock = NEXT(clock_gettime);
    int result = next_clock(clock, now);
    int wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    if (offset && wall) now->tv_sec += *offset;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}

/* A deadline above 5e8 s is on the wall clock; the monotonic clock starts with the machine. */
static struct timespec real(const struct timespec *deadline) {
    struct timespec moved = *deadline;
    if (offset && moved.tv_sec > 500000000) moved.tv_sec -= *offset;
    return moved;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    static __typeof__(&pthread_cond_timedwait) next;
    if (!next) next = (__typeof__(next))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!next) next = NEXT(pthread_cond_timedwait);
    struct timespec moved = real(deadline);
    return next(cond, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    static __typeof__(&sem_timedwait) next;
    if (!next) next = NEXT(sem_timedwait);
    struct timespec moved = real(deadline);
    return next(semaphore, &moved);
}
"""


class Clock:
    """Sets the clock offset of processes that were started with `variables` in the environment."""

    def __init__(self, directory: Path) -> None:
        """Compile the library. Raises ValueError without a C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise ValueError("there is no C compiler")
        library, self._file = directory / "clock.so", directory / "clock"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
        made = subprocess.run(command, input=SOURCE, text=True, capture_output=True)
        if made.returncode:
            raise ValueError(f"{compiler}: {made.stderr.strip().splitlines()[-1:]}")
        self.variables = {"LD_PRELOAD": str(library), VARIABLE: str(self._file)}
        self.move(0)

    def move(self, seconds: int) -> None:
        """Set the clock of the processes to that of the system plus `seconds`."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("<q", seconds))  # in place: the page is mapped
