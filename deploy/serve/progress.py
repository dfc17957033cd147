"""Progress of the steps before the first process starts, such as a download."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(as_json: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step: in a terminal one live line with the time, elsewhere a
    line for each step, which is one of the log as JSON.
    """
    console = Console(stderr=True)
    if as_json:
        yield log.info
        return
    if not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as live:
        task = live.add_task("", visible=False)
        yield lambda text: live.reset(task, description=text, visible=True)
