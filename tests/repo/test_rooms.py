"""The rooms of the tree: who may import whom, and how large they may be."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.source_tree import FILES, PACKAGES, ROOT, circle, module_graph, room_graph

MAX_FILES = 18
FLOORS = {
    "deploy": [
        "bench cli",
        "command_line commands doctor",
        "serve",
        "lock output requirements",
    ],
    "api": [
        "__main__",
        "server",
        "app",
        "lifecycle",
        "connection",
        "admin jobs responses",
        "resume",
        "tgi response_object",
        "vllm",
        "openai",
        "logprobs",
        "chat",
        "inference arq",
        "streams",
        "heir tool_calls.forcing",
        "http retry structured_output tool_calls.detect tool_calls.parser",
        "tokenizer tool_calls.formats tool_calls.reasoning",
        "templates tool_calls.reading",
        "prompt_text service",
        "errors",
        "answer event_loop json",
    ],
    "batcher": [
        "__main__",
        "process",
        "loop",
        "housekeeping recovery",
        "terminals workers",
        "backlog departure dispatch orphans parse timeline",
        "lease scheduling",
        "actions failure_detector inbox worker_absence",
    ],
    "gpu_worker": [
        "__main__ engine.__main__",
        "process engine.process",
        "preload",
        "agent engine.loop",
        "engine.engine",
        "engine.model.load",
        "engine.model.fp8",
        "engine.model.layer_blocks",
        "engine.model.kv_scales engine.model.tp_weights",
        "engine.model.weights",
        "engine.in_flight engine.model.model engine.model.families engine.model.dummy engine.model.kv_budget "
        "engine.model.warmup",
        "engine.attention engine.sampling engine.model.gguf",
        "engine.model.gguf_blocks engine.quantization",
        "engine.cpu engine.cuda.deterministic engine.failing_rows engine.model.gguf_types",
        "engine.cuda.graphs engine.model.rope engine.split_step",
        "engine.agent_link engine.batch engine.parallel",
        "engine.model.config protocol rank",
        "engine.cuda.compile engine.cuda.fused_linear engine.errors",
        "engine.cuda.block_linear engine.cuda.fp8_linear",
        "engine.cuda.kernels engine.blocks engine.launch_pace",
    ],
    "common": [
        "process",
        "metrics model_files",
        "gguf_check",
        "broker model_config",
        "beats block_hashes detokenize messages plural settings",
        "cache_folders gguf_header ranges",
    ],
}
"""Rooms of each package, from top to bottom: a folder, or a module beside folders. One imports only what is
on a lower floor, and `common`.
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
    """`__init__.py` not counted."""
    files = [path for path in (ROOT / package).rglob("*") if path.is_file() and is_source(path)]
    sizes = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def is_source(path: Path) -> bool:
    return path.name != "__init__.py" and not {"__pycache__", ".hypothesis"} & set(path.parts)


def test_no_import_is_for_type_checkers_only() -> None:
    """It would hide a circle."""
    found = [path.relative_to(ROOT).as_posix() for path in FILES if "TYPE_CHECKING" in path.read_text()]
    assert found == []
