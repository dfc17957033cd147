"""Readiness: whether this process can do its part, for `GET /health` at METRICS_PORT."""

import threading

READY = threading.Event()
"""Set once a worker has joined its pool, a batcher has asked for the lease, a job worker takes jobs. A
gateway says it at its own port.
"""
