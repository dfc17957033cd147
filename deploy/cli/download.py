"""`tokenfleet download-weights MODEL_ID`: fetches or converts a model, and prints where it is. Its flags are
TGI's.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from common import model_files
from common.settings.flags import FlagParser, flag_of
from common.settings.settings import SettingError, Settings
from common.settings.types import convert
from deploy.launcher import prepare

SWITCHES = {
    "auto_convert": "accepted: safetensors are served, and GGUF is always converted",
    "trust_remote_code": "accepted: Python code of a checkpoint is fetched, but only "
    "`serve --trust-remote-code` runs it",
    "json_output": "accepted: the output is one line",
    "merge_lora": "refused: an adapter is served as it is (LORA_ADAPTERS)",
}
DESCRIPTION = (
    "Fetch a model from the hub, or convert a GGUF file. A model that is here already stays as it is."
)


def main(argv: Sequence[str]) -> int:
    """Print the model's directory. Raises SettingError."""
    return download(read_settings(argv))


def read_settings(argv: Sequence[str]) -> Settings:
    parser = FlagParser(prog="tokenfleet download-weights", allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument(
        "model_id", nargs="?", help="hub id, directory, GGUF file or `smollm2` (default: MODEL_ID)"
    )
    parser.add_argument("--revision", help="of a hub model")
    parser.add_argument(
        "--extension", default=".safetensors", help="only .safetensors (GGUF files are converted)"
    )
    for flag in ("--logger-level", "--huggingface-hub-cache"):
        parser.add_argument(flag, help="as for `serve`")
    for name, help in SWITCHES.items():
        parser.add_argument(flag_of(name), nargs="?", const="true", default="false", metavar="X", help=help)
    flags = parser.parse_args(list(argv))
    switches = {name: convert(bool, getattr(flags, name), flag_of(name)) for name in SWITCHES}
    if flags.extension != ".safetensors":
        raise SettingError(
            "--extension",
            f"{flags.extension} is not served: only .safetensors, and GGUF files, which are converted",
        )
    if switches["merge_lora"]:
        raise SettingError("--merge-lora", "an adapter is not merged: it is served as it is (LORA_ADAPTERS)")
    return settings_of(flags, ("revision", "logger_level", "huggingface_hub_cache", "model_id"), parser.prog)


def settings_of(flags: argparse.Namespace, names: Iterable[str], prog: str) -> Settings:
    """The settings that some flags of a command give. Raises SettingError."""
    given = {name: getattr(flags, name) for name in names}
    words = [f"{flag_of(name)}={value}" for name, value in given.items() if value is not None]
    return Settings.read(words, prog=prog)


def download(settings: Settings) -> int:
    prepare.set_hub_variables(settings)
    dtype = prepare.weights_dtype(settings)
    path = model_files.find_local(settings.model_id, settings.revision, dtype)
    if path is not None:
        print(f"{settings.model_id} is here already", file=sys.stderr)
    else:
        path = model_files.resolve(settings.model_id, settings.revision, prepare.progress, dtype=dtype)
    if not model_files.weight_files(path):
        raise SettingError(
            "model_id",
            f"{settings.model_id} has no whole set of .safetensors files in {path}; nothing else is served",
        )
    print(os.fspath(path))
    return 0
