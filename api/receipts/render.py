"""Receipt: what an answer was made of and by what, in its JSON when its client asks for it."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import orjson

from api.streams.stream import Stream
from common.messages.answer import HttpAnswer
from common.messages.records import pack_ids
from common.messages.request import SamplingParams, StoppingParams
from common.messages.runs import Run

GREEDY = SamplingParams()


def receipt_field(answer: HttpAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    """The field `receipt` of an answer, once all its streams have finished; none if it was not asked for."""
    return {"receipt": render_receipt(answer, streams)} if answer.receipt else {}


def render_receipt(answer: HttpAnswer, streams: Sequence[Stream]) -> dict[str, Any]:
    """The receipt of an answer whose streams have all finished: a function of the answer and its tokens."""
    assert answer.receipt is not None
    builds = list(dict.fromkeys(run.build for stream in streams for run in stream.runs or ()))
    per_prompt = len(streams) // len(answer.prompts)
    return {
        "id": answer.request_id,
        "created": answer.created_s,
        "model": answer.model,
        "adapter": streams[0].request.adapter or None,
        "gateway": answer.fingerprint,
        "tokenizer_sha256": answer.receipt.tokenizer or None,
        "chat_template_sha256": answer.receipt.chat_template or None,
        "prompts": [{"num_tokens": len(ids) // 4, "sha256": sha256(ids)} for ids in answer.prompts],
        "choices": [
            {"index": i, "prompt": i // per_prompt, **render_choice(stream, builds)}
            for i, stream in enumerate(streams)
        ],
        "builds": [orjson.loads(build) if build else None for build in builds],
    }


def render_choice(stream: Stream, builds: Sequence[bytes]) -> dict[str, Any]:
    """One choice of a receipt. Its seed is null if its tokens are not drawn: greedy ones need none."""
    assert stream.terminal is not None
    sampling = stream.request.sampling
    drawn = sampling is not None and sampling.temperature > 0
    return {
        "seed": sampling.seed if sampling and drawn else None,
        "sampling": changed_fields(sampling or GREEDY, GREEDY),
        "stopping": changed_fields(stream.request.stopping, StoppingParams()),
        "num_tokens": stream.num_tokens,
        "sha256": sha256(pack_ids(stream.ids)),
        "finish_reason": stream.terminal.known_reason,
        "runs": [*render_runs(stream.runs or (), stream.num_tokens, builds)],
    }


def render_runs(runs: Sequence[Run], num_tokens: int, builds: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield each worker's share of the tokens, in order. Tokens of which the broker has lost who made them
    have no worker and no build.
    """
    made = [run for run in runs if run.base < num_tokens]
    if not made or made[0].base > 0:
        yield {
            "first_token": 0,
            "num_tokens": made[0].base if made else num_tokens,
            "worker": None,
            "build": None,
        }
    for (base, run), (end, _) in pairwise([*((run.base, run) for run in made), (num_tokens, None)]):
        assert run is not None
        build = builds.index(run.build)
        yield {"first_token": base, "num_tokens": end - base, "worker": run.worker, "build": build}


def changed_fields(params: Any, defaults: Any) -> dict[str, Any]:
    """The parameters that are not at their defaults, but the seed. A grammar is shown by its hash."""
    values = {name: value for name, value in dataclasses.asdict(params).items() if name != "seed"}
    changed = {name: value for name, value in values.items() if value != getattr(defaults, name)}
    if "grammar" in changed:
        changed["grammar"] = f"sha256:{sha256(changed['grammar'].encode())}"
    return changed


def sha256(data: bytes) -> str:
    """Of token ids: the hash of little-endian 32-bit integers, in order."""
    return hashlib.sha256(data).hexdigest()
