"""The process of `tokenfleet quantize`: its job is the one argument. It prints progress to stderr, and the
directory that it has made to stdout.
"""

import os
import signal
import sys

import setproctitle

from common.process import logs
from common.process.launch import die_with_parent
from common.process.startup import exit_when_unservable
from common.quantize_job import QuantizeJob
from common.settings.settings import Settings
from gpu_worker.engine.process import SPIN_COUNT

INTERRUPTED = 130


def main() -> None:
    die_with_parent()
    setproctitle.setproctitle("tokenfleet quantize")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with exit_when_unservable():
        settings = Settings.read([], os.environ, prog="tokenfleet quantize")
        logs.set_up("quantize", settings.log_level, settings.json_output)
        try:
            os.environ.setdefault(*SPIN_COUNT)
            from gpu_worker.engine.quantizing.quantize import quantize  # it imports torch

            quantize(QuantizeJob.from_json(sys.argv[1]), settings)
        except KeyboardInterrupt:
            sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
