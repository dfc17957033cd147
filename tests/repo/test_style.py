"""How files are written, where ruff and mypy do not check it."""

import ast
import re

from tests.support.source_tree import FILES, PACKAGES, ROOT, parse

MAX_LINE = 110
WAIT_FOR = "asyncio.wait_for"
OWN_CLOCK = re.compile(r"(datetime\.)?(datetime|date)\.(now|utcnow|today)|time\.(time|time_ns)")
USES_OWN_CLOCK = {
    "common/broker/pool_client.py",  # before the first look at the broker's
    *("common/tracing.py", "api/http/request_trace.py", "api/streams/answer_trace.py"),
    *("api/http/audit_log.py", "api/models.py", "common/adapters.py"),  # for people
    "api/prompts/chat_template.py",  # today's date in a prompt, as transformers has it
    "deploy/launcher/embedded_broker.py",  # beside the time of a file of this machine
}
"""Logs, traces, and what no other process compares."""


def test_lines_of_other_languages_are_as_short() -> None:
    """Ruff reads Python only."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*"))]
    found = {
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in (".lua", ".h", ".cpp", ".js")
        if any(len(line) > MAX_LINE for line in path.read_text().splitlines())
    }
    assert found == set()


def test_no_wait_is_bounded_by_wait_for() -> None:
    """In Python 3.11 it loses the cancellation of a task whose wait has just ended, so that the task goes on.
    asyncio.timeout does not.
    """
    assert users_of(re.compile(WAIT_FOR)) == set()


def test_what_processes_compare_is_told_by_the_brokers_clock() -> None:
    """A machine's own clock may be hours wrong: `PoolClient.clock` and `read_time` tell the broker's."""
    assert users_of(OWN_CLOCK) == USES_OWN_CLOCK


def users_of(pattern: re.Pattern[str]) -> set[str]:
    """The files of the packages in which an attribute such as `time.time` is named."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and pattern.fullmatch(ast.unparse(node))
    }
