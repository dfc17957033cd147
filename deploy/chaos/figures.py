"""Figures of a run: tokens that are wrong, requests that failed, pauses."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deploy.bench.measure import quantile
from deploy.chaos.compare import TokenErrors, compare
from deploy.chaos.run import Recording
from deploy.chaos.stream import ReceivedAnswer

COUNTS = ("lost", "repeated", "changed", "failed")
"""Figures that `--fail-on` may name."""


@dataclass(frozen=True, slots=True)
class ChaosFigures:
    """Figures of a run. docs/chaos.md defines each.

    Attributes:
        seconds: from the first request to the end of the last one.
        num_prompts, num_stable: prompts, and those whose undisturbed answers were all the same.
        strikes, missed: strikes by kind; those that hit nothing, or whose restart failed.
        requests, whole, failed: all requests; those answered to the end; those that failed.
        failures: failed requests by reason.
        broken: failed requests whose answer had begun.
        given_up: requests that this client cut and could not go on with; they are neither whole nor failed.
        cuts, returns: connections that this client cut; times that an answer went on over another one.
        compared: answers that were compared with an undisturbed one.
        tokens_per_s, undisturbed_tokens_per_s: over all streams.
        gap_p50_s, gap_p99_s, gap_max_s: between two frames of an answer.
        undisturbed_gap_p99_s, undisturbed_gap_max_s: the same before the strikes.
        outage_max_s: the longest time in which no stream got a token.
    """

    seconds: float
    num_prompts: int
    num_stable: int
    strikes: Mapping[str, int]
    missed: int
    requests: int
    whole: int
    failed: int
    failures: Mapping[str, int]
    broken: int
    given_up: int
    cuts: int
    returns: int
    compared: int
    tokens: int
    lost: int
    repeated: int
    changed: int
    undelivered: int
    tokens_per_s: float
    undisturbed_tokens_per_s: float
    first_p50_s: float | None
    first_p99_s: float | None
    gap_p50_s: float | None
    gap_p99_s: float | None
    gap_max_s: float | None
    undisturbed_gap_p99_s: float | None
    undisturbed_gap_max_s: float | None
    outage_max_s: float


def figures(recording: Recording) -> ChaosFigures:
    """Sum up a run."""
    answers, before = recording.answers, recording.undisturbed
    failed = [answer for answer in answers if answer.error]
    wrong = sum((errors for _, errors in judged(recording)), TokenErrors())
    gaps, gaps_before = gaps_of(answers), gaps_of(before)
    firsts = [answer.times_s[0] - answer.sent_s for answer in answers if answer.times_s]
    strikes = recording.striker.strikes
    seconds = recording.ended_s - recording.begun_s
    tokens = sum(map(num_tokens, answers))
    seconds_before = max(a.ended_s for a in before) - min(a.sent_s for a in before) if before else 0.0
    return ChaosFigures(
        seconds=seconds,
        num_prompts=len(recording.truths),
        num_stable=sum(truth is not None for truth in recording.truths),
        strikes=dict(Counter(strike.kind for strike in strikes)),
        missed=sum(bool(strike.problem) for strike in strikes),
        requests=len(answers),
        whole=sum(answer.is_whole for answer in answers),
        failed=len(failed),
        failures=dict(Counter(answer.error for answer in failed).most_common()),
        broken=sum(bool(answer.frames) for answer in failed),
        given_up=sum(answer.given_up for answer in answers),
        cuts=sum(answer.num_cuts for answer in answers),
        returns=sum(answer.num_returns for answer in answers),
        compared=len(judged(recording)),
        tokens=tokens,
        lost=wrong.lost,
        repeated=wrong.repeated,
        changed=wrong.changed,
        undelivered=wrong.undelivered,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        undisturbed_tokens_per_s=sum(map(num_tokens, before)) / seconds_before if seconds_before else 0.0,
        first_p50_s=quantile(firsts, [], 0.5),
        first_p99_s=quantile(firsts, [], 0.99),
        gap_p50_s=quantile(gaps, [], 0.5),
        gap_p99_s=quantile(gaps, [], 0.99),
        gap_max_s=max(gaps, default=None),
        undisturbed_gap_p99_s=quantile(gaps_before, [], 0.99),
        undisturbed_gap_max_s=max(gaps_before, default=None),
        outage_max_s=longest_outage(recording),
    )


def judged(recording: Recording) -> Sequence[tuple[ReceivedAnswer, TokenErrors]]:
    """Return what is wrong with each answer that has begun, and whose undisturbed answer is known."""
    return [
        (answer, judge(answer, recording))
        for answer in recording.answers
        if answer.frames and recording.truths[answer.prompt] is not None
    ]


def judge(answer: ReceivedAnswer, recording: Recording) -> TokenErrors:
    """Compare one answer. What this client did not come back for is no fault of the server."""
    truth = recording.truths[answer.prompt]
    assert truth is not None, "only answers with a truth are judged"
    found = compare(truth, answer.text, answer.is_whole)
    return TokenErrors(found.lost, found.repeated, found.changed) if answer.given_up else found


def num_tokens(answer: ReceivedAnswer) -> int:
    """Return the tokens of an answer: as the server counts them, else its frames."""
    return answer.num_tokens or len(answer.frames)


def gaps_of(answers: Iterable[ReceivedAnswer]) -> list[float]:
    return [later - sooner for answer in answers for sooner, later in pairwise(answer.times_s)]


def longest_outage(recording: Recording) -> float:
    """Return the longest time, in seconds, in which no stream got a token."""
    times = sorted(time_s for answer in recording.answers for time_s in answer.times_s)
    marks = [recording.begun_s, *times, recording.ended_s]
    return max((later - sooner for sooner, later in pairwise(marks)), default=0.0)


def failed_counts(found: ChaosFigures, names: Iterable[str]) -> list[str]:
    """Return the names whose count is not zero, or, where nothing could be compared, not known."""
    unknown = {"lost", "repeated", "changed"} if found.num_stable == 0 else set()
    return [name for name in names if name in unknown or getattr(found, name)]
