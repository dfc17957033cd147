"""A broker whose clock jumps: a small C library, preloaded, adds an offset to what the system says.

The offset is read from a file in memory, so a jump is done when it is written. Monotonic time is not touched.
"""

import contextlib
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.waiting import wait_until_sync

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    int file = open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY);
    offset_s = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int answer = real(id, now);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) now->tv_sec += *offset_s;
    return answer;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (out) *out = precise.tv_sec;
    return precise.tv_sec;
}
"""


class JumpingBroker:
    """A broker, and the offset of its clock in seconds."""

    def __init__(self, broker: Broker, offset_file: Path) -> None:
        self.url = broker.url
        self.offset_file = offset_file
        self.offset_s = 0

    def jump(self, seconds: int) -> None:
        """Move the clock, and wait until the broker has seen it: Valkey reads the clock only every
        millisecond.
        """
        self.offset_s += seconds
        with self.offset_file.open("r+b") as file:
            file.write(struct.pack("l", self.offset_s))
        with redis.Redis.from_url(self.url) as client:
            wait_until_sync(lambda: abs(client.time()[0] - time.time() - self.offset_s) < abs(seconds) / 2)


@contextlib.contextmanager
def jumping_broker(directory: Path) -> Iterator[JumpingBroker]:
    """Start a broker of one's own; skip the test if there is no C compiler."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    source, library, offset_file = directory / "clock.c", directory / "clock.so", directory / "offset"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset_file.write_bytes(struct.pack("l", 0))
    environ = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset_file)}
    with brokers.running(environ=environ) as broker:
        yield JumpingBroker(broker, offset_file)
