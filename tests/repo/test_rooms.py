"""The rooms of the tree: who may import whom, and how large they may be."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.source_tree import FILES, PACKAGES, ROOT, circle, module_graph, room_graph

MAX_FILES = 18
FLOORS = {
    "deploy": [
        "chaos tgi",
        "bench cli.admin cli.batch",
        "cli",
        "kubernetes launcher requirements",
    ],
    "api": [
        "__main__",
        "server",
        "app",
        "lifecycle",
        "batches",
        "admin",
        "jobs",
        "responses",
        "resume",
        "kserve models pooling",
        "anthropic tgi",
        "openai",
        "requests",
        "grammar",
        "answers receipts",
        "streams",
        "handover",
        "pictures",
        "http prompts webhooks",
        "adapters event_loop outbound",
        "errors json",
    ],
    "batcher": [
        "__main__ planning",
        "process",
        "loop",
        "announcer housekeeping recovery",
        "terminals worker_registry",
        "inbox timeline",
        "traces",
        "adapters",
        "actions failure_detector lease scheduling",
    ],
    "gpu_worker": [
        "engine.quantizing",
        "engine",
        "engine.drafting engine.encoder",
        "engine.model",
        "engine.states",
        "__main__ engine.adapters engine.attention engine.sampling",
        "engine.cpu engine.cuda engine.pictures engine.pooling process",
        "swapping",
        "follower loading stay",
        "agent engine.batch engine.parallel engine.quantization",
        "engine.cuda.kernels frames",
        "protocol",
    ],
    "common": [
        "adapters jobs native_kernels receipts startup traces webhooks weight_digest",
        "metrics model_files pooling rank",
        "pictures",
        "broker gguf_check key_file model_config",
        "key_fields",
        "settings",
        "api_keys detokenize prefill_budget prices process quantize_job",
        "messages months webhook_secret",
    ],
}
"""Rooms of each package, from top to bottom: a folder, or a module that lies in none. A room imports only
what is on a lower floor, and `common`.
"""


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(module_graph()) == []


def test_no_folders_import_each_other_in_a_circle() -> None:
    assert circle(room_graph()) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_from_a_higher_floor(package: str) -> None:
    floors = {f"{package}.{room}": i for i, line in enumerate(FLOORS[package]) for room in line.split()}
    graph = {room: others for room, others in room_graph().items() if room.startswith(f"{package}.")}
    assert floors.keys() == graph.keys(), "FLOORS names every room, and no other"
    upwards = [
        f"{room} imports {other}"
        for room in graph
        for other in graph[room] & floors.keys()
        if floors[room] >= floors[other]
    ]
    assert upwards == []


def test_init_files_are_empty() -> None:
    """A module's name says where its code is."""
    assert [path for path in FILES if path.name == "__init__.py" and path.read_text()] == []


@pytest.mark.parametrize("package", (*PACKAGES, "tests", "benchmarks"))
def test_a_folder_has_at_most_18_files(package: str) -> None:
    """`__init__.py` is not counted."""
    files = [path for path in (ROOT / package).rglob("*") if path.is_file() and is_source(path)]
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def is_source(path: Path) -> bool:
    return path.name != "__init__.py" and not {"__pycache__", ".hypothesis"} & set(path.parts)


def test_no_import_is_for_type_checkers_only() -> None:
    """An import under TYPE_CHECKING would hide a circle."""
    found = [path.relative_to(ROOT).as_posix() for path in FILES if "TYPE_CHECKING" in path.read_text()]
    assert found == []
