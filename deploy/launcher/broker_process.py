"""Run a broker that SIGTERM does not end: `python -m deploy.launcher.broker_process COMMAND …`.

A machine that shuts down sends SIGTERM to all processes at once, but requests in flight need the broker until
they are finished. The launcher ends it last, by SIGINT. This is a file of its own because it must import next
to nothing: the server replaces it within milliseconds.
"""

import signal
import sys

from common.process import launch

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # exec keeps the mask
    sys.exit(launch.run(sys.argv[1:]))
