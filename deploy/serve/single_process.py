"""`tokenfleet supervise KIND`: keeps one process of a fleet alive, as containers do."""

import asyncio
from collections.abc import Sequence

import setproctitle

from common.process import logs
from common.process.parent_death import die_with_parent
from common.settings.settings import SettingError, Settings
from deploy.serve import checks, launcher
from deploy.serve.fleet import KINDS, build_fleet

DESCRIPTION = """Start one process of a fleet and keep it alive, as containers do.

The process is started again at once when it ends; a worker's death is reported to the batcher; a gateway's
answers are kept for its successor.
"""
OPERAND = f"KIND is {', '.join(KINDS)}; settings are those of `tokenfleet KIND --help`."


def main(argv: Sequence[str]) -> int:
    """Run until told to end. Returns the exit code. Raises SettingError."""
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        print(f"usage: tokenfleet supervise KIND [--setting X …]\n\n{DESCRIPTION}\n{OPERAND}")
        return 0
    if word not in KINDS:
        kinds = ", ".join(KINDS)
        raise SettingError(
            "kind", f"{word!r} is not one of {kinds}" if word else f"is missing; one of {kinds}"
        )
    kind = KINDS[word]
    settings = Settings.read(argv[1:], prog=f"tokenfleet supervise {word}")
    logs.set_up(f"supervisor of {kind[0]}0", settings.log_level, settings.json_output)
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet supervise {word}")
    settings = checks.prepare(settings, kind)
    return asyncio.run(launcher.run(build_fleet(settings, None, {kind: 1})))
