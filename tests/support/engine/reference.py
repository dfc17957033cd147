"""What transformers' own `generate` answers: the ids that the engine, and the fleet around it, must equal."""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import model_files

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenfleet" / "tests"


def prompt_ids(prompts: Sequence[str], model_id: str = "smollm2") -> list[list[int]]:
    """The prompts' token ids, without anything added around them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_files.resolve(model_id) / "tokenizer.json"))
    return [tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]


def reference_ids(
    prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, model_id: str = "smollm2"
) -> list[list[int]]:
    """New ids of each prompt, end-of-sequence token included: greedy, float32, one prompt at a time. Each
    answer is computed once and kept on disk, keyed by model, prompt and length.
    """
    return kept(
        prompts_ids, model_id, max_new_tokens, lambda model, ids: generate(model, ids, max_new_tokens)
    )


def reference_logprobs(
    prompts_ids: Sequence[Sequence[int]], model_id: str = "smollm2"
) -> list[list[list[float]]]:
    """Of each prompt's tokens but the first: its own log-probability, then those of the three likeliest in
    its place. From a plain forward in float32; kept on disk, too.
    """
    return kept(prompts_ids, model_id, "logprobs", logprobs)


def kept(
    prompts_ids: Sequence[Sequence[int]],
    model_id: str,
    what: int | str,
    answer: Callable[[Any, Sequence[int]], Any],
) -> list[Any]:
    """The model's answer to each prompt, from disk where it was asked before."""
    path = model_files.resolve(model_id, dtype="float32")
    files = [CACHE / f"{digest(path, ids, what)}.json" for ids in prompts_ids]
    missing = [index for index, file in enumerate(files) if not file.exists()]
    if missing:
        CACHE.mkdir(parents=True, exist_ok=True)
        model = load(path)
        for index in missing:
            keep(files[index], answer(model, prompts_ids[index]))
    return [json.loads(file.read_text()) for file in files]


def digest(path: Path, ids: Sequence[int], what: int | str) -> str:
    return hashlib.sha256(json.dumps([path.name, list(ids), what]).encode()).hexdigest()[:32]


def load(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def generate(model: Any, ids: Sequence[int], max_new_tokens: int) -> list[int]:
    import torch

    prompt = torch.tensor([list(ids)])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False
    )
    new_ids: list[int] = output[0, len(ids) :].tolist()
    return new_ids


def logprobs(model: Any, ids: Sequence[int]) -> list[list[float]]:
    import torch

    with torch.inference_mode():
        scores = model(torch.tensor([list(ids)])).logits[0, :-1].double().log_softmax(-1)
    own = scores.gather(1, torch.tensor([list(ids[1:])]).T)
    found: list[list[float]] = torch.cat((own, scores.topk(3).values), 1).tolist()
    return found


def keep(file: Path, answer: Any) -> None:
    draft = file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(answer))
    draft.replace(file)
