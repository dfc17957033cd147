"""The kind of server that answers at a URL, and the route to measure it by."""

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import httpx
import orjson

from deploy.commands.client import ServerError, check_status, connection_errors, printable

COMPLETIONS = "/v1/completions"
GENERATE = "/generate_stream"
TOKENFLEET, TGI, VLLM, LLAMA_CPP, OPENAI = "Tokenfleet", "TGI", "vLLM", "llama.cpp", "OpenAI API"
IGNORES_EOS = (TOKENFLEET, VLLM, LLAMA_CPP)
"""Servers that accept `ignore_eos`. Answers of the others may end earlier: the tokens that come are counted.
"""
KEY_REFUSED = (401, 403)


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    kind: str
    version: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.kind} {self.version}".strip()

    @property
    def ignores_eos(self) -> bool:
        return self.kind in IGNORES_EOS


def route(servers: list[Server]) -> str:
    """Return one route for all servers: TGI's where TGI is among them, as each of its frames is one token."""
    return GENERATE if any(server.kind == TGI for server in servers) else COMPLETIONS


async def identify(client: httpx.AsyncClient) -> Server:
    """Find out the kind of a server by routes that only one kind has. Raises ServerError when it has none of
    them.
    """
    url = str(client.base_url).rstrip("/")
    if "processes" in (fleet := await get(client, "/fleet")):
        return server(url, TOKENFLEET, fleet.get("version"), fleet.get("model"))
    if "router" in (info := await get(client, "/info")):
        return server(url, TGI, info.get("version"), info.get("model_id"))
    model = first_model(await get(client, "/v1/models"))
    if "default_generation_settings" in (props := await get(client, "/props")) or "build_info" in props:
        name = props.get("model_alias") or PurePath(str(props.get("model_path") or "")).name
        return server(url, LLAMA_CPP, props.get("build_info"), model or name)
    if model and "version" in (about := await get(client, "/version")):
        return server(url, VLLM, about["version"], model)
    if model:
        return server(url, OPENAI, "", model)
    raise ServerError(
        f"{url} is none of the servers known here: it has neither /fleet nor /info nor /v1/models"
    )


def server(url: str, kind: str, version: Any, model: Any) -> Server:
    return Server(url, kind, printable(str(version or "")), printable(str(model or "")))


def first_model(answer: dict[str, Any]) -> str:
    try:
        return str(answer["data"][0]["id"])
    except (LookupError, TypeError):
        return ""


async def get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Fetch the JSON object at a path; empty where there is none. Raises ServerError when the server does not
    answer, or refuses our key.
    """
    with connection_errors(str(client.base_url)):
        answer = await client.get(path)
    if answer.status_code in KEY_REFUSED:
        check_status(answer.status_code, answer.content)
    try:
        found = orjson.loads(answer.content) if answer.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {}
