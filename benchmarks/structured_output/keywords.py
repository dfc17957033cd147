"""Prints what becomes of each keyword of JSON Schema: `python -m
benchmarks.structured_output.keywords CLONE`.

CLONE is one of https://github.com/json-schema-org/JSON-Schema-Test-Suite, with or without a work tree. Each
schema of its required tests (draft 2020-12) is compiled as requests' are: it is served, or refused with the
keyword or the reason. What is served must accept no invalid instance (else exit status 1). Valid ones that it
rejects are printed: they have another order of properties than the schema, another spelling of a number than
its `const` or `enum`, or are not of their `format`, which is enforced.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance

from api.errors import ApiError
from api.grammar.check import byte_tokenizer
from api.grammar.compile import Grammar, compile_checked

FOLDER = "tests/draft2020-12"


def read_groups(clone: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file, its groups of tests)"""
    git = ["git", "-C", str(clone)]
    listed = subprocess.check_output([*git, "ls-tree", "--name-only", "HEAD", f"{FOLDER}/"], text=True)
    for path in listed.splitlines():
        if path.endswith(".json"):
            for group in json.loads(subprocess.check_output([*git, "show", f"HEAD:{path}"])):
                yield Path(path).stem, group


def accepts(source: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(byte_tokenizer(), source, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("clone", type=Path)
    served: Counter[str] = Counter()
    refused: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for keyword, group in read_groups(parser.parse_args().clone):
        found = refused.setdefault(keyword, Counter())
        try:
            source = compile_checked(Grammar("json", json.dumps(group["schema"]), "schema"))
        except ApiError as error:
            found[str(error).removeprefix("`schema` cannot be compiled: ")[:90]] += 1
            continue
        served[keyword] += 1
        for test in group["tests"]:
            text = json.dumps(test["data"], ensure_ascii=False)
            if accepts(source, text) != test["valid"]:
                kind = "valid, rejected" if test["valid"] else "INVALID, accepted"
                wrong.append(f"{keyword}: {group['description']}: {kind}: {text[:80]}")
    for keyword, causes in refused.items():
        print(f"{keyword}: {served[keyword]} served, {causes.total()} refused")
        for cause, times in causes.most_common():
            print(f"  {times:3} {cause}")
    print(*wrong, sep="\n")
    sys.exit(any("INVALID" in line for line in wrong))


if __name__ == "__main__":
    main()
