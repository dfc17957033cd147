"""Grammars: which tokens a row's grammar allows next, as bit masks that llguidance computes; and masks of
allowed ids.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path

import llguidance
import numpy as np

from common.process import machine
from gpu_worker.engine.batch.sampling_state import Bits, GrammarMask, SampleRequest, SamplingState
from gpu_worker.engine.side_threads import SideThread, SideThreads
from gpu_worker.protocol import first_line

WORD_BITS = 32
COMPILER_STACK_BYTES = 128 * 2**20
"""Twice the stack with which a gateway compiles: no grammar that it accepts is too deep here. Most grammars
leave it unused.
"""
MAX_PLAIN_BYTES = 64
"""Bytes of a forced text in which its first token is looked for."""
NO_VOCABULARY = llguidance.LLTokenizer("byte")
"""That of a model whose tokenizer llguidance cannot read: each matcher has an error then."""

log = logging.getLogger(__name__)


def mask_of(state: SamplingState, vocab_size: int) -> Bits | None:
    """The tokens that may come next, as `GrammarMask.bits` has them; None for all."""
    if state.grammar:
        return state.grammar.bits
    if state.allowed is not None and state.allowed_mask is None:
        state.allowed_mask = mask_of_ids(state.allowed, vocab_size)
    return state.allowed_mask


def mask_of_ids(ids: Collection[int], vocab_size: int) -> Bits:
    """A mask that allows these ids; ids outside the vocabulary are ignored."""
    flags = np.zeros(num_words(vocab_size) * WORD_BITS, bool)
    flags[[token for token in ids if token < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view("<i4")


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


class Matchers:
    """Makes matchers for one model's vocabulary, and computes the masks of a step together.

    Grammars are compiled and masks are computed in threads, without the interpreter's lock.

    Attributes:
        waits: a row's grammar is compiled before the row starts, so that all ranks start it in the same step.
        pending: the computation of masks while a forward runs.
    """

    def __init__(
        self, directory: Path, vocab_size: int, eos_ids: Sequence[int], waits: bool, side_threads: SideThreads
    ) -> None:
        self.directory = directory
        self.vocab_size = vocab_size
        self.eos_ids = list(eos_ids)
        self.waits = waits
        self.pending: Future[None] | None = None
        self.compiler = SideThread(side_threads, "compile-grammars", stack_bytes=COMPILER_STACK_BYTES)
        self.masker = SideThread(side_threads, "mask-tokens")

    @cached_property
    def vocabulary(self) -> llguidance.LLTokenizer:
        """The model's vocabulary as a trie, with all tokens of a tokenizer that is larger than the model. To
        build it takes half a second, with the interpreter's lock held. NO_VOCABULARY where llguidance cannot
        read the tokenizer.
        """
        file, cause = str(self.directory / "tokenizer.json"), ""
        for size in (self.vocab_size, None):
            try:
                return llguidance.LLTokenizer(file, n_vocab=size, eos_token=self.eos_ids or None)
            except ValueError as error:
                cause = first_line(error)
        log.warning("rows with grammars fail: llguidance cannot read %s: %s", file, cause)
        return NO_VOCABULARY

    @cached_property
    def executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor(max(1, machine.num_cores() // 4))

    def prepare(self) -> None:
        """Build what the first grammar needs, while there are no rows. A row without a grammar that starts
        meanwhile does not wait.
        """
        self.compiler.submit(lambda: self.vocabulary)

    def start(self, source: str, tokens: Sequence[int]) -> GrammarMask:
        """The matcher of a row that has sampled these tokens so far."""
        compiled = self.compiler.submit(self.compile, source, list(tokens))
        if self.waits:
            compiled.result()
        return GrammarMask(compiled, self.vocab_size)

    def compile(self, source: str, tokens: list[int]) -> llguidance.LLMatcher:
        vocabulary = self.vocabulary
        source = source if vocabulary is not NO_VOCABULARY else ""
        matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
        matcher.consume_tokens(tokens)
        return matcher

    def start_masks(self, requests: Iterable[SampleRequest | None]) -> None:
        """Begin to compute the masks of a step while its forward runs."""
        if matchers := without_masks(requests):
            self.pending = self.masker.submit(self.compute, matchers)

    def finish_masks(self, requests: Iterable[SampleRequest | None]) -> None:
        """Wait for the masks of a step, and compute those that are missing."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None
        if matchers := without_masks(requests):
            self.compute(matchers)

    def compute(self, matchers: Sequence[GrammarMask]) -> None:
        bits = np.empty((len(matchers), num_words(self.vocabulary.vocab_size)), np.int32)
        states = [matcher.compiled.result() for matcher in matchers]
        plain = [plain_token(self.vocabulary, state) for state in states]
        self.executor.unsafe_compute_mask_ptr(
            [(state, i) for i, state in enumerate(states)], bits.ctypes.data, bits.strides[0], len(matchers)
        )
        for matcher, row, token in zip(matchers, bits, plain, strict=True):
            matcher.bits = row if token is None else mask_of_ids([token], self.vocab_size)


def plain_token(vocabulary: llguidance.LLTokenizer, state: llguidance.LLMatcher) -> int | None:
    """The first token of the text that a grammar forces, if the grammar does not accept llguidance's own
    (`GrammarMask.forced` says when); None if the mask is right.
    """
    written = state.compute_ff_tokens()[:1]
    if not written or state.validate_tokens(written):
        return None
    text = state.compute_ff_bytes()[:MAX_PLAIN_BYTES]
    tokens = vocabulary.greedy_tokenize(text.decode(errors="ignore"))[:1] + vocabulary.tokenize_bytes(
        text[:1]
    )
    return next((token for token in tokens if state.validate_tokens([token])), None)


def without_masks(requests: Iterable[SampleRequest | None]) -> list[GrammarMask]:
    """The matchers of the rows that sample next, as far as their masks are not computed."""
    grammars = [request.state.grammar for request in requests if request and request.state.grammar]
    return [
        grammar for grammar in grammars if grammar.bits is None and not grammar.compiled.result().is_error()
    ]
