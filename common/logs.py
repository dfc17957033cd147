"""Logs of every process: one line per event on stderr, as `15:04:05.123 I w0 message`."""

import logging
import sys


class Line(logging.Formatter):
    """Local time with milliseconds, the level's first letter, the process's name, the message; a traceback follows on its own lines."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(letter)s {name} %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.letter = record.levelname[0]
        return super().format(record)


def set_up(name: str, level: str) -> None:
    """Sends all logging of this process to stderr. `name` is the process's, such as `w0`; `level` is Settings.log_level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Line(name))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
