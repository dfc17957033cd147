"""Who may import what, without circles; what ruff and mypy do not check.
ARCHITECTURE.md and docs/design/ are about this tree: what they name exists, every folder is named, and the
table of keys is `common/broker/keys.py`.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from common import ids
from common.broker.keys import table as table_of_keys
from tests.support.source_tree import FILES, PACKAGES, ROOT, circle, module_graph, parse

# --- imports ------------------------------------------------------------------------------------------------

ALLOWED = {
    "api": {"api", "common"},
    "batcher": {"batcher", "common"},
    "gpu_worker": {"gpu_worker", "common"},
    "common": {"common"},
    "deploy": {"deploy", "common"},
}
AT_HOME = {
    "torch": "gpu_worker/engine",
    "transformers": "gpu_worker/engine",
    "numpy": "gpu_worker",
    "fastapi": "api",
    "starlette": "api",
    "opentelemetry": "common/otlp.py",
}


def imported(path: Path) -> Iterator[str]:
    """First words of all modules that a file imports, anywhere in it."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield (node.module or "").split(".")[0]


def test_a_process_imports_common_and_itself_only() -> None:
    for path in FILES:
        place, found = path.relative_to(ROOT), set(imported(path))
        assert found & set(PACKAGES) <= ALLOWED[place.parts[0]], place
        for module, home in AT_HOME.items():
            assert module not in found or place.is_relative_to(home), f"{place}: {module} belongs to {home}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(module_graph()) == []


def test_no_import_is_for_type_checkers_only() -> None:
    """An import under TYPE_CHECKING would hide a circle."""
    assert [path for path in FILES if "TYPE_CHECKING" in path.read_text()] == []


def test_threads_of_an_engine_wake_its_loop() -> None:
    """Nobody makes another thread there than `SideThread`, but for the one that hears of lost ranks, and
    those that wait for compilers.
    """
    folder = ROOT / "gpu_worker" / "engine"
    homes = {folder / "side_threads.py", folder / "parallel/rendezvous.py", folder / "cpu/compile.py"}
    makers = {"Thread", "ThreadPoolExecutor", "to_thread", "start_new_thread", "Timer"}
    for path in FILES:
        if path.is_relative_to(folder) and path not in homes:
            names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(parse(path))}
            assert not names & makers, f"{path}: use SideThreads"


def test_the_packages_come_from_this_checkout(tmp_path: Path) -> None:
    (tmp_path / "api.py").write_text("raise ImportError('not ours')")
    code = "import importlib, json\n"
    code += f"print(json.dumps([importlib.import_module(name).__file__ for name in {PACKAGES}]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [str(ROOT / package / "__init__.py") for package in PACKAGES]


IMPORT_ALL = """
import importlib, pkgutil, sys
for module in ("batcher", "deploy.launcher.launcher", "gpu_worker", "gpu_worker.engine.process", "api"):
    package = importlib.import_module(module)
    for item in pkgutil.iter_modules(getattr(package, "__path__", [])):
        if item.name not in ("__main__", "engine"):
            importlib.import_module(f"{module}.{item.name}")
    for name in ("torch", "opentelemetry.sdk", "grpc"):
        if name in sys.modules:
            sys.exit(f"{module} imports {name}")
"""


def test_processes_start_without_torch_and_opentelemetry() -> None:
    """Indirect imports count too: torch costs seconds and hundreds of megabytes, the SDK a tenth of a second.
    FastAPI imports OpenTelemetry's API, which does nothing by itself.
    """
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- style --------------------------------------------------------------------------------------------------

WAIT_FOR = "asyncio.wait_for"
OWN_CLOCK = re.compile(r"(datetime\.)?(datetime|date)\.(now|utcnow|today)|time\.(time|time_ns)")
USES_OWN_CLOCK = {
    "common/broker/pool_client.py",  # before the first look at the broker's
    *("common/tracing.py", "api/http/middleware.py", "api/models.py", "common/adapters.py"),  # for people
    "api/prompts/chat_template.py",  # today's date in a prompt, as transformers has it
    "deploy/launcher/control_socket.py",  # beside the time of a file of this machine
}
"""Logs, traces, and what no other process compares."""


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


# --- architecture -------------------------------------------------------------------------------------------

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DESIGN = sorted((ROOT / "docs/design").glob("*.md"))
NAME = re.compile(r"`([\w./-]+\.(?:py|lua|md|yml|html|toml)|[\w./-]*Dockerfile[\w.]*)`")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def table(text: str, head: str) -> list[list[str]]:
    """Return the cells of each row of the table that begins with `head`."""
    return [row.split("|")[1:-1] for row in text[text.index(head) :].split("\n\n")[0].splitlines()[2:]]


def test_every_file_that_is_named_exists() -> None:
    for page in (ARCHITECTURE, CONTRIBUTING, *DESIGN):
        named = set(NAME.findall(page.read_text()))
        assert named and [one for one in sorted(named) if not (ROOT / one).is_file()] == [], page


def test_the_table_of_ids_is_the_ids() -> None:
    """Each pattern of an id is in the table, with tests that exist."""
    rows = table((ROOT / "docs/security.md").read_text(), "| id |")
    named = {
        word for row in rows for word in re.findall(r"[A-Z]+(?:_[A-Z]+)+|TENANT|CHANNEL|REVISION", row[1])
    }
    assert named == {name for name, value in vars(ids).items() if isinstance(value, re.Pattern)}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    wanted = [name for row in rows for name in re.findall(r"`(test_\w+)`", row[3])]
    assert [name for name in wanted if f"def {name}(" not in tests] == []
    assert all("`test_" in row[3] for row in rows)


def kind(name: str) -> str:
    """The kind of a key: `plans:{}` of `plans:{worker}`."""
    return re.sub(r"\{\w*\}", "{}", name)


def test_the_table_of_keys_is_the_keys() -> None:
    rows = table((ROOT / "docs/design/redis.md").read_text(), "| key | kind |")
    assert {kind(name) for row in rows for name in re.findall(r"`([^`]+)`", row[0])} == {
        kind(row.pattern) for _, row in table_of_keys() if row.kind != "prefix"
    }
