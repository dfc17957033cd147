"""Prints what speculation wins: `python -m benchmarks.models.speculation [--ways ngram,suffix,draft,equal]`.

Three tasks, greedy: `chat` answers a question, `edit` writes a function again with another name, `summary`
tells a text again in shorter words. Prompts of `garbage` are random words, of which little can be guessed.
There is an engine for each way of proposing, and one without; they take turns in this process. `draft` is a
model of the first layers of the model itself, with its head, made here: nobody has trained it, so it shows
what a poor draft costs. With `--share` the model's other layers add only that share of what they did, so that
the draft is mostly right, as a trained one is; with 0 always. `equal` is the model as a draft of itself: all
proposals would be right, and none can pay.

Printed are tokens/s of all steps after the prompts, as a share of those without speculation, and which share
of the proposed tokens was right. Medians of the runs, in each of which the ways begin with another one; no
prompt is computed twice by one engine. Times are processor time of one core, so other work counts little.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.serve import ADJECTIVES, NOUNS, VERBS, prompt
from common import model_files
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player

ROWS = (1, 8)
"""Rows at once."""
NUM_TOKENS = 4
DRAFT_LAYERS = 4
PLAIN = "plain"
TURN = "<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
CODE = '''def {name}(values, limit):
    """Return the {noun} of the values below the limit."""
    total = 0
    for value in values:
        if value < limit:
            total += value * {number}
    return total
'''


def text_of(task: str, seed: int) -> str:
    """The user's message; another for every seed."""
    draw = random.Random(seed)
    noun, verb, adjective = draw.choice(NOUNS), draw.choice(VERBS), draw.choice(ADJECTIVES)
    if task == "chat":
        return f"Number {seed}: why is a {adjective} {noun} often {verb}? Explain it to a child."
    if task == "edit":
        code = CODE.format(name=f"sum_{seed}", noun=noun, number=seed)
        return f"Rename the variable `total` to `result` in this code, and write all of it again.\n\n{code}"
    if task == "garbage":
        return " ".join(f"{draw.choice(NOUNS)}{draw.randrange(10**6)}" for _ in range(40))
    return f"Summarise this text in three sentences.\n\n{prompt(seed)}"


def play(engine: Engine, prompts: list[list[int]], num_tokens: int) -> tuple[float, int, int]:
    """Run rows to their end → tokens/s after the prompts, proposals, and right ones."""
    played = Player(engine, list(range(1, 1 + engine.ready.num_blocks)), until=engine.rows.step)
    starts = [
        played.start(row, ids, num_tokens, ignore_eos=True, sampling=None) for row, ids in enumerate(prompts)
    ]
    times_s: list[float] = []
    step = engine.step

    def timed() -> Any:
        found = step()
        times_s.append(time.process_time())
        return found

    engine.step = timed  # type: ignore[method-assign]
    played.run(starts, horizon=1000, lead=num_tokens + 16)
    engine.step = step  # type: ignore[method-assign]
    begun = next(place for place, one in enumerate(played.steps) if one.num_samples)
    tokens = sum(one.num_samples for one in played.steps[begun + 1 :])
    proposals = [one for step in played.steps for one in step.proposals]
    seconds = times_s[len(played.steps) - 1] - times_s[begun]
    return tokens / seconds, sum(number for _, number, _ in proposals), sum(right for *_, right in proposals)


def save_first_layers(folder: Path, model: str, num_layers: int) -> None:
    """A draft model: the first layers of a model, its norm and its head."""
    from transformers import AutoModelForCausalLM

    path = model_files.resolve(model)
    whole: Any = AutoModelForCausalLM.from_pretrained(path)
    whole.model.layers = whole.model.layers[:num_layers]
    whole.config.num_hidden_layers = num_layers
    if getattr(whole.config, "layer_types", None):
        whole.config.layer_types = whole.config.layer_types[:num_layers]
    whole.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((path / "tokenizer.json").read_bytes())


def save_faded(folder: Path, model: str, num_layers: int, share: float) -> None:
    """The model with its layers after the first ones adding only a share of what they added."""
    from transformers import AutoModelForCausalLM

    path = model_files.resolve(model)
    faded: Any = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for layer in faded.model.layers[num_layers:]:
            layer.self_attn.o_proj.weight *= share
            layer.mlp.down_proj.weight *= share
    faded.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((path / name).read_bytes())


def make_engine(way: str, model: str, folder: Path) -> Engine:
    """The engine of a way of proposing."""
    if way == "draft":
        save_first_layers(folder, model, DRAFT_LAYERS)
    configs: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "num_speculative_tokens": NUM_TOKENS},
        "suffix": {"method": "suffix"},
        "draft": {"model": str(folder), "num_speculative_tokens": NUM_TOKENS},
        "equal": {"model": model, "num_speculative_tokens": NUM_TOKENS},
    }
    config = json.dumps(configs[way]) if way in configs else None
    return Engine(Settings(model_id=model, kv_cache_bytes=2**27, threads=1, speculative_config=config))


def measure(engines: dict[str, Engine], model: str, runs: int, num_tokens: int, tasks: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(model_files.resolve(model) / "tokenizer.json"))
    for task in tasks:
        for rows in ROWS:
            found: dict[str, list[tuple[float, int, int]]] = {way: [] for way in engines}
            for run in range(runs):
                texts = [TURN.format(text=text_of(task, 1000 * run + 10 * rows + row)) for row in range(rows)]
                prompts = [tokenizer.encode(text).ids for text in texts]
                order = [*engines]
                for way in order[run % len(order) :] + order[: run % len(order)]:
                    found[way].append(play(engines[way], prompts, num_tokens))
            plain = [speed for speed, *_ in found[PLAIN]]
            for way, played in found.items():
                speeds = [speed for speed, *_ in played]
                ratio = statistics.median(one / other for one, other in zip(speeds, plain, strict=True))
                proposed, right = sum(one[1] for one in played), sum(one[2] for one in played)
                share = f"{right / proposed:.0%} right of {proposed}" if proposed else "nothing proposed"
                speed = statistics.median(speeds)
                print(f"{task}, {rows} rows, {way}: {speed:6.1f} tokens/s ({ratio:.2f}), {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each answer")
    parser.add_argument("--ways", default="ngram,suffix,draft", help="of ngram, suffix, draft, equal")
    parser.add_argument("--tasks", default="chat,edit,summary,garbage", help="with commas")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--share", type=float, help="of what layers after the draft's add: fewer are wrong")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ways, model, draft = [PLAIN, *chosen.ways.split(",")], chosen.model, Path(folder) / "draft"
        if chosen.share is not None:
            model = str(Path(folder) / "faded")
            save_faded(Path(model), chosen.model, DRAFT_LAYERS, chosen.share)
        engines = {way: make_engine(way, model, draft) for way in ways}
        measure(engines, model, chosen.runs, chosen.tokens, chosen.tasks.split(","))


if __name__ == "__main__":
    main()
