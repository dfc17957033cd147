"""What tests of beam searches share: scripted sequences, and what answers show of them."""

from typing import Any

from common.messages.records import BeamSequence, pack_sequences
from tests.support.fleet.scripted_worker import Answer
from tests.support.token_columns import unpack_sequences
from tests.support.tokenizer import IM_END, ids

TEXTS = (" one two é🙂", " three", " four zzz", " five six seven")
REASONS = ("eos_token", "length", "stop_sequence", "length")


def sequence(number: int) -> BeamSequence:
    """The sequence of this rank, the best first."""
    own = ids(TEXTS[number]) + [IM_END] * (REASONS[number] == "eos_token")
    logprobs = [-0.25 * (number + 1)] * len(own)
    return BeamSequence(own, logprobs, sum(logprobs) / len(own), REASONS[number])


SEQUENCES = unpack_sequences(pack_sequences([sequence(i) for i in range(len(TEXTS))]))
ANSWER = Answer([], beams=SEQUENCES)


def scores(number: int) -> dict[str, float]:
    """What an answer shows of a sequence."""
    one = SEQUENCES[number]
    return {"cumulative_logprob": sum(one.logprobs), "beam_score": one.score}


def shown_tokens(number: int) -> list[dict[str, Any]]:
    """TGI's tokens of a sequence."""
    one = SEQUENCES[number]
    return [
        {"id": token_id, "logprob": logprob, "special": token_id == IM_END}
        for token_id, logprob in zip(one.ids, one.logprobs, strict=True)
    ]
