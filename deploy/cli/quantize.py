"""`tokenfleet quantize MODEL OUT`: makes a quantised checkpoint of a plain one, and prints where it is. Its
flags are TGI's, with some of our own.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import model_files
from common.quantize_job import WHOLE_ROW, QuantizeJob
from common.settings.flags import FlagParser
from common.settings.settings import SettingError
from common.settings.types import convert
from deploy.cli.download import settings_of
from deploy.launcher import prepare
from deploy.launcher.fleet import command

DESCRIPTION = "Quantise a plain model, layer by layer; the error of each layer's weights is printed."
BITS = (4, 8)
SETTINGS = ("revision", "device", "threads", "trust_remote_code", "logger_level", "json_output")
SWITCH = {"nargs": "?", "const": "true"}
MAX_GROUP = 1024
LEAST_TOKENS = 128


def main(argv: Sequence[str]) -> int:
    """Become the process that quantises. Raises SettingError for what is wrong before it starts."""
    flags = read_flags(argv)
    read_job(flags, "")  # refuses what is wrong before anything is fetched
    settings = settings_of(flags, ("model_id", "huggingface_hub_cache", *SETTINGS), "tokenfleet quantize")
    prepare.set_hub_variables(settings)
    path = model_files.resolve(
        settings.model_id, settings.revision, prepare.progress, dtype=prepare.weights_dtype(settings)
    )
    words = [*command("gpu_worker.engine.quantizing"), read_job(flags, str(path)).to_json()]
    os.execve(words[0], words, os.environ | settings.environ())


FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "model_id": ("hub id, directory, GGUF file or `smollm2`", {"metavar": "MODEL"}),
    "output": ("the directory that is made", {"metavar": "OUT"}),
    "--method": ("gptq; llm-compressor writes others", {"default": "gptq"}),
    "--bits": ("4 or 8 (default: %(default)s)", {"type": int, "default": 4}),
    "--group-size/--groupsize": (
        f"inputs that share a scale, {WHOLE_ROW} for all (default: the largest of 128, 64 and 32 that "
        "divides all layers)",
        {"type": int},
    ),
    "--percdamp": ("GPTQ's damping (default: %(default)s)", {"type": float, "default": 0.01}),
    "--act-order": (
        "GPTQ rounds the inputs with the largest values first; groups lie in turn (default: true)",
        SWITCH | {"default": "true"},
    ),
    "--calibration": ("a file of text like that which the model is used for (default: ours)", {}),
    "--calibration-tokens": ("read (default: %(default)s)", {"type": int, "default": 65_536}),
    "--upload-to-model-id": ("refused: `hf upload ID OUT` does it", {}),
    "--revision": ("of a hub model", {}),
    "--device": ("auto, cpu or cuda", {}),
    "--threads": ("of the processor", {}),
    "--trust-remote-code": ("run Python code that the model brings along", SWITCH),
    "--logger-level": ("as for `serve`", {}),
    "--json-output": ("as for `serve`", SWITCH),
    "--huggingface-hub-cache": ("as for `serve`", {}),
}
"""Flag → its help, and what else argparse is told of it."""


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet quantize", allow_abbrev=False, description=DESCRIPTION)
    for flag, (help, more) in FLAGS.items():
        parser.add_argument(*flag.split("/"), help=help, **{"metavar": "X", **more})
    return parser.parse_args(list(argv))


def read_job(flags: argparse.Namespace, source: str) -> QuantizeJob:
    """What is asked for, with the directory of the model. Raises SettingError."""
    for name, cause in faults(flags):
        raise SettingError(name, cause)
    return QuantizeJob(
        source=source,
        output=str(Path(flags.output).expanduser().absolute()),
        bits=flags.bits,
        group_size=flags.group_size,
        damping=flags.percdamp,
        act_order=convert(bool, flags.act_order, "--act-order"),
        calibration=flags.calibration and str(Path(flags.calibration).absolute()),
        max_tokens=flags.calibration_tokens,
    )


def faults(flags: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield flags that are not served, and why."""
    if flags.upload_to_model_id is not None:
        yield "--upload-to-model-id", "is not served: `hf upload ID OUT` does it afterwards"
    if flags.method == "fp8":
        yield "--method", "fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load"
    if flags.method != "gptq":
        others = "checkpoints of other methods that llm-compressor and AutoAWQ write are read"
        yield "--method", f"{flags.method!r} is not gptq; {others}"
    if flags.bits not in BITS:
        yield "--bits", f"{flags.bits} is neither 4 nor 8"
    size = flags.group_size
    if size not in (None, WHOLE_ROW) and (size not in range(16, MAX_GROUP + 1) or size & (size - 1)):
        yield "--group-size", f"{size} is neither {WHOLE_ROW} nor a power of two from 16 to {MAX_GROUP}"
    if not 0 < flags.percdamp <= 1:
        yield "--percdamp", f"{flags.percdamp} is not above 0 and at most 1"
    if flags.calibration_tokens < LEAST_TOKENS:
        yield "--calibration-tokens", f"{flags.calibration_tokens} is less than {LEAST_TOKENS}"
    if flags.calibration is not None and not Path(flags.calibration).is_file():
        yield "--calibration", f"{flags.calibration} is no file"
    output = Path(flags.output).expanduser().absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        yield "output", f"{output} exists already"
