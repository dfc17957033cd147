"""What transformers' own `generate` answers: the ids that the engine, and the fleet around it, must equal."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from common import model_files
from tests.support.tokenizer import TOKENIZER

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenfleet" / "reference"
ANSWERS = Path(__file__).parents[1] / "reference" / "smollm2.jsonl"
"""Those that the default suite asks for, since they take a minute; a line of it is a file of CACHE."""

Found = tuple[list[int], float]
"""A sequence of a beam search: its ids and its score."""


@dataclass(frozen=True, slots=True)
class Question:
    """Its answer depends on nothing else.

    Attributes:
        model: the name of the folder, which has a digest of its weights.
        what: how many new tokens, or `logprobs`, or the arguments of a beam search as JSON.
    """

    model: str
    ids: tuple[int, ...]
    what: int | str

    @property
    def file(self) -> Path:
        content = json.dumps([self.model, self.ids, self.what]).encode()
        return CACHE / f"{hashlib.sha256(content).hexdigest()[:32]}.json"


def prompt_ids(prompts: Sequence[str]) -> list[list[int]]:
    """The prompts' token ids, without anything added around them."""
    return [TOKENIZER.encode(prompt, add_special_tokens=False).ids for prompt in prompts]


def reference_ids(prompts_ids: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """New ids of each prompt, end-of-sequence token included: greedy, float32, one prompt at a time."""
    return kept(prompts_ids, max_new_tokens)


def reference_logprobs(prompts_ids: Sequence[Sequence[int]]) -> list[list[list[float]]]:
    """Of each prompt's tokens but the first: its own log-probability, then those of the three likeliest in
    its place. From a plain forward in float32.
    """
    return kept(prompts_ids, "logprobs")


def reference_beams(
    prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, **arguments: Any
) -> list[list[Found]]:
    """The sequences of each prompt's beam search, the best first. `arguments` are those of `generate`."""
    what = json.dumps({"max_new_tokens": max_new_tokens, **arguments}, sort_keys=True)
    return [[(ids, score) for ids, score in answer] for answer in kept(prompts_ids, what)]


def kept(prompts_ids: Sequence[Sequence[int]], what: int | str) -> list[Any]:
    """The bundled model's answer to each prompt: from the tree, or from disk, where it is computed once."""
    path = model_files.resolve("smollm2", dtype="float32")
    questions = [Question(path.name, tuple(ids), what) for ids in prompts_ids]
    missing = [one for one in questions if one not in in_the_tree() and not one.file.exists()]
    if missing:
        CACHE.mkdir(parents=True, exist_ok=True)
        model = load(path)
        for question in missing:
            keep(question, answer(model, question))
    return [
        in_the_tree()[one] if one in in_the_tree() else json.loads(one.file.read_text())["answer"]
        for one in questions
    ]


@cache
def in_the_tree() -> dict[Question, Any]:
    lines = map(json.loads, ANSWERS.read_text().splitlines())
    return {Question(line["model"], tuple(line["ids"]), line["what"]): line["answer"] for line in lines}


def answer(model: Any, question: Question) -> Any:
    if question.what == "logprobs":
        return logprobs(model, question.ids)
    if isinstance(question.what, str):
        return beams(model, question.ids, **json.loads(question.what))
    return generate(model, question.ids, question.what)


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


def beams(model: Any, ids: Sequence[int], num_beams: int, **arguments: Any) -> list[Found]:
    """The sequences that transformers' own beam search finds, the best first, without padding. On a copy:
    rotary embeddings of some types remember the longest sequence they saw.
    """
    import copy

    import torch

    prompt = torch.tensor([list(ids)])
    output = copy.deepcopy(model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        **arguments,
    )
    lengths = (output.beam_indices >= 0).sum(-1).tolist()
    rows = output.sequences[:, len(ids) :].tolist()
    scores = output.sequences_scores.tolist()
    return [(row[:length], score) for row, length, score in zip(rows, lengths, scores, strict=True)]


def logprobs(model: Any, ids: Sequence[int]) -> list[list[float]]:
    import torch

    with torch.inference_mode():
        scores = model(torch.tensor([list(ids)])).logits[0, :-1].double().log_softmax(-1)
    own = scores.gather(1, torch.tensor([list(ids[1:])]).T)
    found: list[list[float]] = torch.cat((own, scores.topk(3).values), 1).tolist()
    return found


def keep(question: Question, given: Any) -> None:
    line = {"model": question.model, "ids": question.ids, "what": question.what, "answer": given}
    draft = question.file.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(line) + "\n")
    draft.replace(question.file)
