"""`tokenfleet download-weights` fetches or converts a model, `tokenfleet quantize` makes a quantised one of a
plain one; both print where it is. Their flags are TGI's, with some of our own.
"""

import argparse
import os
import sys
from pathlib import Path

from common import model_files
from common.quantize_job import WHOLE_ROW, QuantizeJob
from common.settings.fields import convert
from common.settings.flags import flag_of
from common.settings.settings import SettingError, Settings
from deploy.launcher import prepare
from deploy.launcher.launcher import command
from deploy.launcher.prepare import refuse

BITS = (4, 8)
MAX_GROUP = 1024
LEAST_TOKENS = 128


def settings_of(flags: argparse.Namespace) -> Settings:
    """The settings among the flags of a command. Raises SettingError."""
    given = {name: value for name, value in vars(flags).items() if value is not None}
    words = [
        f"{flag_of(name)}={value}"
        for name, value in given.items()
        if name in Settings.model_fields or name == "logger_level"
    ]
    settings = Settings.read(words, prog="tokenfleet")
    prepare.set_hub_variables(settings)
    return settings


def download(flags: argparse.Namespace) -> int:
    """Print the model's directory. Raises SettingError."""
    other = f"{flags.extension} is not served: only .safetensors, and GGUF files, which are converted"
    merging = "an adapter is not merged: it is served as it is (LORA_ADAPTERS)"
    refuse(
        (flags.extension != ".safetensors", "--extension", other),
        (convert(bool, flags.merge_lora, "--merge-lora"), "--merge-lora", merging),
    )
    settings = settings_of(flags)
    name, dtype = settings.model_id, prepare.weights_dtype(settings)
    path = model_files.find_local(name, settings.revision, dtype)
    if path is not None:
        print(f"{name} is here already", file=sys.stderr)
    else:
        path = model_files.resolve(name, settings.revision, prepare.progress, dtype=dtype)
    if not model_files.weight_files(path):
        cause = f"has no whole set of .safetensors files in {path}; nothing else is served"
        raise SettingError("model_id", f"{name} {cause}")
    print(os.fspath(path))
    return 0


def quantize(flags: argparse.Namespace) -> int:
    """Become the process that quantises. Raises SettingError for what is wrong before it starts."""
    read_job(flags, "")  # refuses what is wrong before anything is fetched
    settings = settings_of(flags)
    dtype = prepare.weights_dtype(settings)
    path = model_files.resolve(settings.model_id, settings.revision, prepare.progress, dtype=dtype)
    words = [*command("gpu_worker.engine.quantizing"), read_job(flags, str(path)).to_json()]
    os.execve(words[0], words, os.environ | settings.environ())


def read_job(flags: argparse.Namespace, source: str) -> QuantizeJob:
    """What is asked for, with the directory of the model. Raises SettingError."""
    bits, size, least = flags.bits, flags.group_size, LEAST_TOKENS
    is_power = size in (None, WHOLE_ROW) or (size in range(16, MAX_GROUP + 1) and not size & (size - 1))
    output = Path(flags.output).expanduser().absolute()
    is_free = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    file, tokens = flags.calibration, flags.calibration_tokens
    afterwards = "is not served: `hf upload ID OUT` does it afterwards"
    at_load = "fp8 is not written: `tokenfleet serve MODEL --quantize fp8` rounds at load"
    others = "checkpoints of other methods that llm-compressor and AutoAWQ write are read"
    powers = f"{size} is neither {WHOLE_ROW} nor a power of two from 16 to {MAX_GROUP}"
    refuse(
        (flags.upload_to_model_id is not None, "--upload-to-model-id", afterwards),
        (flags.method == "fp8", "--method", at_load),
        (flags.method != "gptq", "--method", f"{flags.method!r} is not gptq; {others}"),
        (bits not in BITS, "--bits", f"{bits} is neither 4 nor 8"),
        (not is_power, "--group-size", powers),
        (not 0 < flags.percdamp <= 1, "--percdamp", f"{flags.percdamp} is not above 0 and at most 1"),
        (tokens < least, "--calibration-tokens", f"{tokens} is less than {least}"),
        (file is not None and not Path(file).is_file(), "--calibration", f"{file} is no file"),
        (not is_free, "output", f"{output} exists already"),
    )
    return QuantizeJob(
        source=source,
        output=str(output),
        bits=bits,
        group_size=size,
        damping=flags.percdamp,
        act_order=convert(bool, flags.act_order, "--act-order"),
        calibration=file and str(Path(file).absolute()),
        max_tokens=tokens,
    )
