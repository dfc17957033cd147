"""Figures: what is computed from the answers of a server, as tokens per second and percentiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deploy.bench.ask import TimedAnswer


@dataclass(frozen=True, slots=True)
class Round:
    """One server under one load, from `begun_s` to `ended_s`; what was not answered by then was cut off."""

    begun_s: float
    ended_s: float
    answers: Sequence[TimedAnswer]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of all rounds with one load. None: not known, since too many waits were cut off.

    Attributes:
        first_p50_s, first_p99_s: from the request to the first frame with tokens.
        gap_p50_s, gap_p99_s: between two frames of one answer.
        tokens_per_frame: 1 where every token has a frame of its own.
        num_answers: complete ones. num_errors: failed ones, and `error` says why the first did.
    """

    tokens_per_s: float
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    tokens_per_frame: float
    num_answers: int
    num_errors: int
    error: str


def quantile(done: Iterable[float], cut: Iterable[float], q: float) -> float | None:
    """The smallest time within which a share `q` of all waits ends. None when too many were cut off to know.

    A wait that was cut off lasted at least so long (Kaplan and Meier, "Nonparametric Estimation from
    Incomplete Observations", 1958): without it, a server that lets its clients wait would look faster.
    Without cuts this is the nearest-rank percentile.
    """
    waits = sorted([(wait, False) for wait in done] + [(wait, True) for wait in cut])
    waiting, still = len(waits), 1.0
    for wait, was_cut in waits:
        if not was_cut:
            still *= 1 - 1 / waiting
            if 1 - still >= q - 1e-9:
                return wait
        waiting -= 1
    return None


def figures(rounds: Sequence[Round]) -> Figures:
    answers = [answer for one in rounds for answer in one.answers]
    complete = [answer for answer in answers if answer.ended_s]
    errors = [answer.error for answer in answers if answer.error]
    num_frames = sum(len(answer.times_s) for answer in answers)
    per_frame = tokens_per_frame(complete)
    seconds = sum(one.ended_s - one.begun_s for one in rounds)
    firsts = [answer.times_s[0] - answer.sent_s for answer in answers if answer.times_s]
    gaps = [later - sooner for answer in answers for sooner, later in pairwise(answer.times_s)]
    first_cut, gap_cut = cut_off(rounds)
    return Figures(
        tokens_per_s=num_frames * per_frame / seconds if seconds > 0 else 0.0,
        first_p50_s=quantile(firsts, first_cut, 0.5),
        first_p99_s=quantile(firsts, first_cut, 0.99),
        gap_p50_s=quantile(gaps, gap_cut, 0.5),
        gap_p99_s=quantile(gaps, gap_cut, 0.99),
        tokens_per_frame=per_frame,
        num_answers=len(complete),
        num_errors=len(errors),
        error=errors[0] if errors else "",
    )


def tokens_per_frame(complete: Sequence[TimedAnswer]) -> float:
    """Return the mean, from the servers' own counts of tokens where they send them, else 1."""
    counts = [
        (answer.num_tokens, len(answer.times_s))
        for answer in complete
        if answer.num_tokens and answer.times_s
    ]
    return sum(tokens for tokens, _ in counts) / sum(frames for _, frames in counts) if counts else 1.0


def cut_off(rounds: Sequence[Round]) -> tuple[list[float], list[float]]:
    """Return the waits for first tokens, and for next tokens, that the end of a round cut off."""
    firsts, gaps = [], []
    for one in rounds:
        for answer in one.answers:
            if answer.ended_s or answer.error:
                continue
            if answer.times_s:
                gaps.append(max(0.0, one.ended_s - answer.times_s[-1]))
            else:
                firsts.append(max(0.0, one.ended_s - answer.sent_s))
    return firsts, gaps
