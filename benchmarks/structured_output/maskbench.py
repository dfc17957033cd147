"""Prints how the grammars of real JSON schemas judge instances: `python -m
benchmarks.structured_output.maskbench CLONE [--count 300] [--seed 3]`.

CLONE is one of MaskBench (cases.py). Each schema is compiled as requests' are; each of its instances is
written as JSON in three ways, and must be accepted by the masks of the model's vocabulary exactly if it is
valid. Printed are the schemas served and refused, with the reasons; valid instances rejected and invalid ones
accepted, which are failures (exit status 1); and the times to compile and per mask.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llguidance
from tokenizers import Tokenizer

from api.errors import ApiError
from api.grammar.compile import Grammar, compile_checked
from benchmarks.structured_output.cases import Case, read_cases
from common import model_files

INSTANCES = 6
"""Instances of a schema that are tried."""


@dataclass(slots=True)
class Verdicts:
    """What was found.

    Attributes:
        judged: (whether the instance is valid, whether it is accepted) → how often.
        wrong: where the two differ.
    """

    refused: Counter[str] = field(default_factory=Counter)
    judged: Counter[tuple[bool, bool]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)


class Judge:
    """Judges texts by the masks of a model's vocabulary."""

    def __init__(self, model: Path) -> None:
        path = str(model / "tokenizer.json")
        self.tokenizer = Tokenizer.from_file(path)
        eos_id = json.loads((model / "config.json").read_text())["eos_token_id"]
        self.vocabulary = llguidance.LLTokenizer(path, eos_token=eos_id)

    def accepts(self, source: str, text: str, mask_us: list[float]) -> bool:
        """Whether the text may be written from its first byte to its last, and may end there."""
        matcher = llguidance.LLMatcher(self.vocabulary, source, log_level=0)
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            started_s = time.perf_counter()
            matcher.compute_bitmask()
            mask_us.append((time.perf_counter() - started_s) * 1e6)
            if not matcher.try_consume_tokens([token]):
                return False
        return bool(matcher.is_accepting())


def judge_case(judge: Judge, case: Case, verdicts: Verdicts) -> None:
    started_s = time.perf_counter()
    try:
        source = compile_checked(Grammar("json", json.dumps(case.schema), "schema"))
    except ApiError as error:
        verdicts.refused[str(error).partition(" (at")[0][:100]] += 1
        return
    finally:
        verdicts.compile_ms.append((time.perf_counter() - started_s) * 1e3)
    for value, is_valid in case.instances[:INSTANCES]:
        for text in spellings(value):
            accepted = judge.accepts(source, text, verdicts.mask_us)
            verdicts.judged[is_valid, accepted] += 1
            if is_valid != accepted:
                verdicts.wrong.append(f"{case.name}: {'valid' if is_valid else 'invalid'}: {text[:200]}")


def spellings(value: Any) -> Iterator[str]:
    yield json.dumps(value, ensure_ascii=False)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, ensure_ascii=False, indent=2)


def report(verdicts: Verdicts) -> None:
    refused, judged = sum(verdicts.refused.values()), verdicts.judged
    print(f"schemas: {len(verdicts.compile_ms) - refused} served, {refused} refused")
    for cause, times in verdicts.refused.most_common():
        print(f"  {times:4} {cause}")
    print(f"valid: {judged[True, True]} accepted, {judged[True, False]} rejected")
    print(f"invalid: {judged[False, False]} rejected, {judged[False, True]} accepted")
    for line in verdicts.wrong:
        print(f"  WRONG {line}")
    for name, values in (("compile ms", verdicts.compile_ms), ("mask µs", verdicts.mask_us)):
        ordered = sorted(values)
        print(
            f"{name}: mean {statistics.mean(values):.1f}, p50 {ordered[len(ordered) // 2]:.1f}, "
            f"p99 {ordered[int(len(ordered) * 0.99)]:.1f}, most {ordered[-1]:.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clone", type=Path)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--model", default="smollm2")
    chosen = parser.parse_args()
    judge, verdicts = Judge(model_files.resolve(chosen.model)), Verdicts()
    for case in read_cases(chosen.clone, chosen.count, chosen.seed):
        judge_case(judge, case, verdicts)
    report(verdicts)
    sys.exit(bool(verdicts.wrong))


if __name__ == "__main__":
    main()
