"""Proxy before a broker that is far away: `python -m tests.support.runahead.slow_proxy FROM_PORT TO_PORT MS`.

A command and its answer take MS longer together, each half of it. Threads keep the time: timers of an event
loop are too coarse.
"""

import contextlib
import socket
import sys
import threading
import time
from queue import SimpleQueue

from common.process.launch import die_with_parent

READ_BYTES = 2**18


def serve(from_port: int, to_port: int, delay_s: float) -> None:
    with socket.create_server(("127.0.0.1", from_port), backlog=64) as server:
        while True:
            ours, _ = server.accept()
            theirs = socket.create_connection(("127.0.0.1", to_port))
            for side in (ours, theirs):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            pump(ours, theirs, delay_s)
            pump(theirs, ours, delay_s)


def pump(source: socket.socket, sink: socket.socket, delay_s: float) -> None:
    """Pass on bytes `delay_s` later, in threads of its own."""
    queue: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
    threading.Thread(target=read, args=(source, queue, delay_s), daemon=True).start()
    threading.Thread(target=write, args=(sink, queue), daemon=True).start()


def read(source: socket.socket, queue: "SimpleQueue[tuple[float, bytes]]", delay_s: float) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(READ_BYTES):
            queue.put((time.monotonic() + delay_s, data))
    queue.put((0.0, b""))


def write(sink: socket.socket, queue: "SimpleQueue[tuple[float, bytes]]") -> None:
    with contextlib.suppress(OSError):
        while (item := queue.get())[1]:
            time.sleep(max(0.0, item[0] - time.monotonic()))
            sink.sendall(item[1])
        sink.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    die_with_parent()
    serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 2e3)
