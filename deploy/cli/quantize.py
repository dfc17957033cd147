"""`tokenfleet quantize MODEL OUT`: makes a quantised checkpoint of a plain one, and prints where it is. Its
flags are TGI's, with some of our own.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

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
SETTINGS = {
    "revision": "of a hub model",
    "device": "auto, cpu or cuda",
    "threads": "of the processor",
    "trust_remote_code": "run Python code that the model brings along",
    "logger_level": "as for `serve`",
    "json_output": "as for `serve`",
    "huggingface_hub_cache": "as for `serve`",
}
MAX_GROUP = 1024
LEAST_TOKENS = 128


def main(argv: Sequence[str]) -> int:
    """Become the process that quantises. Raises SettingError for what is wrong before it starts."""
    flags = read_flags(argv)
    job = read_job(flags)
    settings = settings_of(flags, ("model_id", *SETTINGS), "tokenfleet quantize")
    prepare.set_hub_variables(settings)
    dtype = prepare.weights_dtype(settings)
    path = model_files.resolve(settings.model_id, settings.revision, prepare.progress, dtype=dtype)
    words = [*command("gpu_worker.engine.quantizing"), job.of_source(str(path)).to_json()]
    os.execve(words[0], words, os.environ | settings.environ())


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = FlagParser(prog="tokenfleet quantize", allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument("model_id", metavar="MODEL", help="hub id, directory, GGUF file or `smollm2`")
    parser.add_argument("output", metavar="OUT", help="the directory that is made")
    parser.add_argument("--method", default="gptq", help="gptq; llm-compressor writes others")
    parser.add_argument("--bits", type=int, default=4, help="4 or 8 (default: %(default)s)")
    parser.add_argument(
        "--group-size",
        "--groupsize",
        type=int,
        metavar="N",
        help=f"inputs that share a scale, {WHOLE_ROW} for all (default: the largest of 128, 64 and 32 that "
        "divides all layers)",
    )
    parser.add_argument(
        "--percdamp", type=float, default=0.01, metavar="X", help="GPTQ's damping (default: %(default)s)"
    )
    parser.add_argument(
        "--act-order",
        nargs="?",
        const="true",
        default="true",
        metavar="X",
        help="GPTQ rounds the inputs with the largest values first; groups lie in turn (default: true)",
    )
    parser.add_argument(
        "--calibration", metavar="FILE", help="text like that which the model is used for (default: ours)"
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=65_536, metavar="N", help="read (default: %(default)s)"
    )
    parser.add_argument("--upload-to-model-id", metavar="ID", help="refused: `hf upload ID OUT` does it")
    for name, help in SETTINGS.items():
        switch = {"nargs": "?", "const": "true"} if name in ("trust_remote_code", "json_output") else {}
        parser.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=help, **switch)  # type: ignore[arg-type]
    return parser.parse_args(list(argv))


def read_job(flags: argparse.Namespace) -> QuantizeJob:
    """What is asked for, without the model. Raises SettingError."""
    if flags.upload_to_model_id is not None:
        raise SettingError("--upload-to-model-id", "is not served: `hf upload ID OUT` does it afterwards")
    if flags.method == "fp8":
        raise SettingError(
            "--method", "fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load"
        )
    if flags.method != "gptq":
        raise SettingError(
            "--method",
            f"{flags.method!r} is not gptq; checkpoints of other methods that llm-compressor and "
            "AutoAWQ write are read",
        )
    if flags.bits not in BITS:
        raise SettingError("--bits", f"{flags.bits} is neither 4 nor 8")
    size = flags.group_size
    if size is not None and size != WHOLE_ROW and (size not in range(16, MAX_GROUP + 1) or size & (size - 1)):
        raise SettingError(
            "--group-size", f"{size} is neither {WHOLE_ROW} nor a power of two from 16 to {MAX_GROUP}"
        )
    if not 0 < flags.percdamp <= 1:
        raise SettingError("--percdamp", f"{flags.percdamp} is not above 0 and at most 1")
    if flags.calibration_tokens < LEAST_TOKENS:
        raise SettingError("--calibration-tokens", f"{flags.calibration_tokens} is less than {LEAST_TOKENS}")
    if flags.calibration is not None and not Path(flags.calibration).is_file():
        raise SettingError("--calibration", f"{flags.calibration} is no file")
    output = Path(flags.output).expanduser().absolute()
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise SettingError("output", f"{output} exists already")
    return QuantizeJob(
        source="",
        output=str(output),
        bits=flags.bits,
        group_size=size,
        damping=flags.percdamp,
        act_order=convert(bool, flags.act_order, "--act-order"),
        calibration=flags.calibration and str(Path(flags.calibration).absolute()),
        max_tokens=flags.calibration_tokens,
    )
