"""Compare: an answer and its replay, token by token, and the receipts of both, field by field."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

NOT_COMPARED = ("id", "created", "prompts", "choices", "builds")
"""Fields of a receipt that say nothing of how its tokens were computed, or are compared in another way."""
WEIGHTS = "weights_sha256"
NO_RECEIPT = "the answer has no receipt: nothing says what it was made of"
UNKNOWN_BUILD = "a worker said nothing of itself"
UNKNOWN_WEIGHTS = "the digest of a worker's weights was not known yet"

Receipt = Mapping[str, Any]


def compare_tokens(then: Sequence[int], now: Sequence[int]) -> dict[str, Any]:
    """Whether the ids are the same, and else the first place where they differ, with the id of each there; a
    sequence that has ended before has null.
    """
    pairs = enumerate(zip_longest(then, now))
    place, ids = next(((i, pair) for i, pair in pairs if pair[0] != pair[1]), (None, (None, None)))
    return {
        "equal": place is None,
        "num_tokens": len(then),
        "num_replayed": len(now),
        "first_difference": place,
        "token": ids[0],
        "replayed_token": ids[1],
    }


def compare_receipts(then: Receipt, now: Receipt) -> list[dict[str, Any]]:
    """The fields whose values differ between two receipts, or between the workers of one of them: the name of
    each, and its values then and now.
    """
    pairs = [(name, [then[name]], [now[name]]) for name in then if name not in NOT_COMPARED]
    old, new = (fields_by_name(receipt["builds"]) for receipt in (then, now))
    pairs += [(name, old.get(name, []), new.get(name, [])) for name in dict.fromkeys([*old, *new])]
    return [
        {"field": name, "then": before, "now": after}
        for name, before, after in pairs
        if len({repr(value) for value in (*before, *after)}) > 1
    ]


def fields_by_name(builds: Sequence[Mapping[str, Any] | None]) -> dict[str, list[Any]]:
    """The distinct values that some builds have of each field; those of nested objects have dotted names. A
    digest that was not known yet is no value.
    """
    found: dict[str, list[Any]] = {}
    for build in builds:
        for name, value in flatten(build or {}):
            values = found.setdefault(name, [])
            if value not in values and (name, value) != (WEIGHTS, None):
                values.append(value)
    return found


def flatten(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def reasons_against(then: Receipt, now: Receipt, differences: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a replay may have other tokens; none if it must have the same."""
    builds = [build for receipt in (then, now) for build in receipt["builds"]]
    known = [build for build in builds if build is not None]
    reasons = [f"{one['field']} differs" for one in differences]
    if len(known) < len(builds) or any(run["worker"] is None for run in runs_of(then, now)):
        reasons.append(UNKNOWN_BUILD)
    if any(build.get(WEIGHTS) is None for build in known):
        reasons.append(UNKNOWN_WEIGHTS)
    inexact = dict.fromkeys(build.get("inexact_because") for build in known)
    return reasons + [f"bits may depend on what else runs: {why}" for why in inexact if why]


def runs_of(*receipts: Receipt) -> Iterator[Mapping[str, Any]]:
    """Yield all runs of all choices."""
    for receipt in receipts:
        for choice in receipt["choices"]:
            yield from choice["runs"]


# --- by the receipts alone ----------------------------------------------------------------------------------


def compare_answers(then: Receipt, now: Receipt) -> dict[str, Any]:
    """What a replay says of two answers of which only the receipts are known: tokens are compared by their
    number and hash, so no place is known where they differ.
    """
    differences = compare_receipts(then, now)
    if digests(then["prompts"]) != digests(now["prompts"]):
        found = ([prompt["sha256"] for prompt in receipt["prompts"]] for receipt in (then, now))
        differences.insert(0, dict(zip(("field", "then", "now"), ("prompts", *found), strict=True)))
    reasons = reasons_against(then, now, differences)
    choices = [
        {
            "index": i,
            "equal": before is not None and after is not None and digests([before]) == digests([after]),
            "num_tokens": before["num_tokens"] if before else 0,
            "num_replayed": after["num_tokens"] if after else 0,
            "first_difference": None,
        }
        for i, (before, after) in enumerate(zip_longest(then["choices"], now["choices"]))
    ]
    return {
        "id": then["id"],
        "equal": all(choice["equal"] for choice in choices),
        "exact": not reasons,
        "reasons": reasons,
        "choices": choices,
        "differences": differences,
        "receipt": now,
    }


def digests(parts: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The length and the hash of each sequence of tokens."""
    return [(part["num_tokens"], part["sha256"]) for part in parts]
