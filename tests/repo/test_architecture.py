"""ARCHITECTURE.md is about this tree: each file that it names exists, and its table of keys is
`common/broker/keys.py`.
"""

import inspect
import re

from common.broker.keys import POOLS, Keys
from tests.support.source_tree import PACKAGES, ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text()
NAME = re.compile(r"`([\w./-]+\.(?:py|lua|md|yml|html|toml)|[\w./-]*Dockerfile[\w.]*)`")
SUFFIXES = {".py", ".lua", ".js", ".h", ".cpp"}
OF_ARQ = {"arq:queue:health-check"}


def test_every_file_that_is_named_exists() -> None:
    named = set(NAME.findall(TEXT))
    assert len(named) > 80
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_folder_that_is_named_exists() -> None:
    named = set(re.findall(r"`([\w./-]+/)`", TEXT))
    assert [name for name in sorted(named) if not (ROOT / name).is_dir()] == []


def test_every_folder_with_code_is_named() -> None:
    sources = [path for one in PACKAGES for path in (ROOT / one).rglob("*") if path.suffix in SUFFIXES]
    folders = {path.parent.relative_to(ROOT).as_posix() for path in sources if path.name != "__init__.py"}
    assert len(folders) > 50
    assert sorted(folder for folder in folders if f"`{folder}/`" not in TEXT) == []


def kind(name: str) -> str:
    """`plans:{}` of `plans:{worker}`."""
    return re.sub(r"\{\w*\}", "{}", name)


def kinds_in_the_table() -> set[str]:
    section = TEXT[TEXT.index("| key | kind |") :].split("\n\n")[0]
    first_columns = [row.split("|")[1] for row in section.splitlines()[2:]]
    return {kind(name) for column in first_columns for name in re.findall(r"`([^`]+)`", column)} - OF_ARQ


def kinds_in_the_code() -> set[str]:
    keys = Keys("")
    own = {
        name: member
        for name, member in inspect.getmembers(Keys)
        if not name.startswith("_") and name not in ("pool", "key")
    }
    plain = [str(getattr(keys, name)) for name, member in own.items() if isinstance(member, property)]
    named = [
        getattr(keys, name)("{}")
        for name in own
        if name not in ("process", "channel") and not isinstance(own[name], property)
    ]
    others = [keys.channel("ext:{}"), *(keys.process(one, "{}") for one in process_kinds())]
    return {name.removeprefix(keys.key("")) for name in (*plain, *named, *others)} | {POOLS}


def process_kinds() -> set[str]:
    """Kinds of heartbeats: the word before the name, wherever one is made."""
    sources = "\n".join(
        path.read_text()
        for folder in ("api", "batcher", "gpu_worker")
        for path in (ROOT / folder).rglob("*.py")
    )
    found = set(re.findall(r'Heartbeat\([^"\n]*"(\w+)"', sources))
    assert {"gateway", "batcher"} <= found
    return found


def test_the_table_of_keys_is_the_keys() -> None:
    assert kinds_in_the_table() == kinds_in_the_code()
