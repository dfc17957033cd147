"""Release: what happens to the streams of an answer when its response is over."""

import math
from collections.abc import Callable, Sequence

from starlette.types import Scope

from api.heir.answer_socket import is_handed_over
from api.streams.stream import Stream

Release = Callable[[Stream, int, float], None]
"""(stream, number of its reader, seconds for which it is kept): `Admission.release`."""


def release_all(
    scope: Scope, streams: Sequence[Stream], release: Release, reader: int, keep_s: float = 0.0
) -> None:
    """Release the streams of an answer; those that another gateway goes on with are not cancelled."""
    for stream in streams:
        release(stream, reader, math.inf if is_handed_over(scope) else keep_s)
