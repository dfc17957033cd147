"""TGI's commands: text-generation-launcher, -router, -server and -benchmark, as its image and scripts call
them. Each becomes a command of `tokenfleet`.
"""

import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from common.process.machine import visible_gpus
from common.settings import flags
from common.settings.settings import SettingError
from deploy.cli.main import main
from deploy.cli.table import describe

SAGEMAKER_PORT = "8080"
PORT_VARIABLES = ("AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")
PLACES = (Path("/opt/ml/model"), Path("/repository"))
"""Folders into which SageMaker and Inference Endpoints put the model."""
SHARES_OF_GPUS = ("num_shard", "sharded", "num_workers", "device")
"""Settings of which each says how many GPUs a worker uses."""
SERVER_HELP = "one of serve MODEL_ID, download-weights MODEL_ID, quantize MODEL_ID OUTPUT_DIR"


def launcher_words(words: Sequence[str]) -> list[str]:
    """A whole fleet, whose worker uses all GPUs as TGI's does. SageMaker starts its containers with the one
    word `serve`, and asks port 8080.
    """
    is_sagemaker = list(words) == ["serve"]
    argv = [] if is_sagemaker else [*words]
    flagged, variables = read(argv)
    found = [*port_words(flagged, SAGEMAKER_PORT if is_sagemaker else ""), *model_words(flagged, variables)]
    if {*flagged, *variables}.isdisjoint(SHARES_OF_GPUS) and len(visible_gpus()) > 1:
        found.append("--sharded")
    return ["serve", *argv, *found]


def router_words(words: Sequence[str]) -> list[str]:
    """Gateways and a batcher, for workers that are started elsewhere. TGI's router names the model as
    `--tokenizer-name`.
    """
    flagged, variables = read(words)
    found, given = model_words(flagged, variables), variables | flagged
    if not found and "model_id" not in given and (name := given.get("tokenizer_name")):
        found = ["--model-id", name.text, flags.flag_of(name.name), "auto"]
    return ["serve", "--num-workers", "0", *words, *found]


def read(argv: Sequence[str]) -> tuple[dict[str, flags.GivenValue], dict[str, flags.GivenValue]]:
    """What flags give, and what variables give, by setting. Raises SettingError."""
    prog, description = "tokenfleet serve", describe("serve")
    return flags.read(argv, {}, prog, description), flags.read([], os.environ, prog)


def server_words(words: Sequence[str]) -> list[str]:
    """A worker, or a command about a model's files. Raises SettingError for another word."""
    match list(words):
        case ["serve", model, *rest] if not model.startswith("-"):
            return ["supervise", "worker", "--model-id", model, *rest]
        case ["download-weights" | "quantize", *_]:
            return list(words)
        case ["--help" | "-h"]:
            return ["supervise", "--help"]
        case _:
            word = words[0] if words else ""
            raise SettingError("command", f"{word!r} is not {SERVER_HELP}")


def benchmark_words(words: Sequence[str]) -> list[str]:
    """Raises SettingError: other programs measure a running fleet."""
    why = "is not served: measure a running fleet with `tokenfleet bench`, guidellm or aiperf"
    raise SettingError("command", f"text-generation-benchmark {why}")


def port_words(flagged: Collection[str], default: str) -> list[str]:
    """`--port` with the port that a cloud asks; it goes before PORT, which images set. Nothing where a flag
    names one.
    """
    asked = next(filter(None, map(os.environ.get, PORT_VARIABLES)), default)
    return ["--port", asked] if asked and "port" not in flagged else []


def model_words(flagged: Collection[str], variables: Collection[str]) -> list[str]:
    """`--model-id` with the model that a cloud has put beside the container; nothing where a model is named.

    Vertex names a folder in Cloud Storage, which is fetched, and goes before variables; those of a container
    are the same for all models.
    """
    if "model_id" in flagged:
        return []
    if folder := os.environ.get("AIP_STORAGE_URI"):
        from deploy.tgi.cloud_storage import fetch_folder  # httpx, which other starts need not wait for

        return ["--model-id", os.fspath(fetch_folder(folder))]
    if "model_id" in variables:
        return []
    found = [place for place in PLACES if (place / "config.json").is_file()]
    return ["--model-id", os.fspath(found[0])] if found else []


launcher, router = partial(main, launcher_words), partial(main, router_words)
server, benchmark = partial(main, server_words), partial(main, benchmark_words)
