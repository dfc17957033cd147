"""TGI's commands: text-generation-launcher, -router, -server and -benchmark, as its image and scripts call
them. Each becomes a command of `tokenfleet`.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.settings.settings import SettingError
from deploy.cli.main import main

SAGEMAKER_PORT = 8080
PORT_FLAGS = ("--port", "-p")
PORT_VARIABLES = ("AIP_HTTP_PORT", "SAGEMAKER_BIND_TO_PORT")
MODEL_FLAGS = ("--model-id", "--model")
MODEL_VARIABLES = ("MODEL_ID", "HF_MODEL_ID")
PLACES = (Path("/opt/ml/model"), Path("/repository"))
"""Folders into which SageMaker and Inference Endpoints put the model."""
SERVER_HELP = "one of serve MODEL_ID, download-weights MODEL_ID, quantize MODEL_ID OUTPUT_DIR"


def launcher_words(words: Sequence[str]) -> list[str]:
    """A whole fleet. SageMaker starts its containers with the one word `serve`, and asks port 8080."""
    if list(words) in (["--version"], ["-V"]):
        return ["--version"]
    given = [] if list(words) == ["serve"] else list(words)
    return ["serve", *given, *port_words(words), *model_words(given)]


def router_words(words: Sequence[str]) -> list[str]:
    """Gateways and a batcher, for workers that are started elsewhere."""
    return ["serve", "--num-workers", "0", *words, *model_words(words)]


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


def port_words(words: Sequence[str]) -> list[str]:
    """`--port` with the port that a cloud asks; it goes before PORT, which images set. Nothing where words
    name one.
    """
    if any(word.partition("=")[0] in PORT_FLAGS for word in words):
        return []
    asked = [port for name in PORT_VARIABLES if (port := os.environ.get(name))]
    if not asked and list(words) == ["serve"]:
        asked = [str(SAGEMAKER_PORT)]
    return ["--port", asked[0]] if asked else []


def model_words(words: Sequence[str]) -> list[str]:
    """`--model-id` with the model that a cloud has put beside the container; nothing where a model is named.

    Vertex names a folder in Cloud Storage, which is fetched, and goes before variables; those of a container
    are the same for all models.
    """
    named = any(word.partition("=")[0] in MODEL_FLAGS for word in words)
    if named or (words and not words[0].startswith("-")):
        return []
    if folder := os.environ.get("AIP_STORAGE_URI"):
        from deploy.tgi.cloud_storage import fetch_folder  # httpx, which other starts need not wait for

        return ["--model-id", os.fspath(fetch_folder(folder))]
    if any(os.environ.get(name) for name in MODEL_VARIABLES):
        return []
    found = [place for place in PLACES if (place / "config.json").is_file()]
    return ["--model-id", os.fspath(found[0])] if found else []


launcher, router = partial(main, launcher_words), partial(main, router_words)
server, benchmark = partial(main, server_words), partial(main, benchmark_words)
