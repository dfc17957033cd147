"""Model states: what mixers keep of rows beside the KV cache, one slot a row. Slot 0 is scratch.

A mixer is a module that carries states from token to token: a short convolution, a state-space scan, a delta
rule. A convolution keeps its last inputs, a recurrence one state. It is called once for each span of a step,
with the states of its rows, for which it asks as transformers' model code does. All rows that decode are one
span; chunks of prompts of like lengths are one, padded at their ends, if the model's mixers heed padding. New
states are written when the whole step is computed: a step that fails can be computed again.

Mixers run transformers' own code. A probe shows what they keep, as for attention: nothing is listed by
family.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.attention.backend import zeros
from gpu_worker.engine.batch.inputs import Inputs, offsets_of, to_device
from gpu_worker.engine.batch.row import RowSlice
from gpu_worker.engine.parallel.model_parallel import Forward, connect, is_mixer
from gpu_worker.engine.states.scans import with_scans
from gpu_worker.protocol import UnservableModel

MAX_PADDING = 32
"""Chunks of a span are padded to the longest of it: by at most a quarter of their length, or by this number
of tokens.
"""
SCAN_TOKENS = 256
"""Scans pad the tokens of a row themselves, to a multiple of about this number."""
SPAN_TOKENS = 2048
"""Of a span of several chunks, at most, as scans pad them: they need memory for each token."""


@dataclass(frozen=True, slots=True)
class StateSpan:
    """Tokens of a step that one call of a mixer computes.

    Attributes:
        slots: int64 [rows]; where the rows' states lie.
        places: of its tokens in the step: neighbours, one row's or one of each row; else int64 [rows,
            longest], in which a row's last is repeated.
        tokens: those of `places` that are no padding, int64 [tokens of the span]; None for neighbours.
        begins: no row has states yet.
        is_trial: the rows belong to no request, and their states are not kept.
        kept: int64 [tokens of the span]; where `tokens` are among all `places`, if some are padding.
        counts: int64 [rows]; tokens of each row, if some rows are padded.
        padded: bool [rows, longest]; which places are padding, if some are.
        fresh: bool [rows]; which rows have no states yet, if others have.
    """

    slots: torch.Tensor
    places: slice | torch.Tensor
    tokens: torch.Tensor | None = None
    begins: bool = False
    is_trial: bool = False
    kept: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    fresh: torch.Tensor | None = None

    def take(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens of the step, hidden] of any dtype → [rows, tokens, hidden]"""
        return hidden[0, self.places].reshape(len(self.slots), -1, hidden.shape[2])

    def own(self, output: torch.Tensor) -> torch.Tensor:
        """output [rows, tokens, hidden] of any dtype → [1, tokens of the span, hidden], without padding"""
        flat = output.flatten(0, 1)
        return (flat if self.kept is None else flat[self.kept])[None]

    def put(self, mixed: torch.Tensor, output: torch.Tensor) -> None:
        """Write the outputs [1, tokens of the span, hidden] of a span to those of the step."""
        mixed[0, self.places if self.tokens is None else self.tokens] = output[0]


PlacedChunk = tuple[RowSlice, int]
"""A chunk of a prompt, and where its tokens begin in the step."""


def split_states(slices: Sequence[RowSlice], packs: bool, device: torch.device) -> list[StateSpan]:
    """The spans of a step of arranged slices. Without `packs` each chunk is one of its own."""
    num_decoding = sum(row_slice.decodes for row_slice in slices)
    begins = offsets_of(row_slice.count for row_slice in slices).tolist()
    chunks = list(zip(slices, begins, strict=False))[num_decoding:]
    groups = group_chunks(chunks) if packs else ([chunk] for chunk in chunks)
    spans = [make_span(group, device) for group in groups]
    if num_decoding:
        rows = [row_slice.row.slot for row_slice in slices[:num_decoding]]
        slots = to_device(rows, device, torch.int64)
        spans.insert(0, StateSpan(slots, slice(num_decoding), is_trial=not any(rows)))
    return spans


def group_chunks(chunks: Iterable[PlacedChunk]) -> Iterator[list[PlacedChunk]]:
    """Yield chunks that are computed together, the longest first."""
    group: list[PlacedChunk] = []
    for chunk in sorted(chunks, key=lambda one: -one[0].count):
        if group and not fits(group, chunk):
            yield group
            group = []
        group.append(chunk)
    if group:
        yield group


def fits(group: Sequence[PlacedChunk], chunk: PlacedChunk) -> bool:
    longest, count = group[0][0].count, chunk[0].count
    scanned = -(-longest // SCAN_TOKENS) * SCAN_TOKENS
    return longest - count <= max(count // 4, MAX_PADDING) and (len(group) + 1) * scanned <= SPAN_TOKENS


def make_span(group: Sequence[PlacedChunk], device: torch.device) -> StateSpan:
    """A span of chunks, the first of which is the longest."""
    rows = [chunk.row.slot for chunk, _ in group]
    slots = to_device(rows, device, torch.int64)
    is_fresh = [not chunk.begin for chunk, _ in group]
    (first, begin), is_trial = group[0], not any(rows)
    if len(group) == 1:
        place = slice(begin, begin + first.count)
        return StateSpan(slots, place, begins=is_fresh[0], is_trial=is_trial)
    counts = np.array([chunk.count for chunk, _ in group])
    within = np.arange(counts[0])
    is_padding = within >= counts[:, None]
    places = np.minimum(within, counts[:, None] - 1) + np.array([begin for _, begin in group])[:, None]
    is_padded = bool(is_padding.any())
    return StateSpan(
        slots,
        to_device(places, device),
        to_device(places[~is_padding], device),
        begins=all(is_fresh),
        is_trial=is_trial,
        kept=to_device(np.flatnonzero(~is_padding), device) if is_padded else None,
        counts=to_device(counts, device) if is_padded else None,
        padded=to_device(is_padding, device) if is_padded else None,
        fresh=to_device(is_fresh, device) if any(is_fresh) and not all(is_fresh) else None,
    )


StateName = tuple[str, int]
"""Which state of a mixer: its kind, and which one of several."""
CONV, RECURRENT = "conv", "recurrent"


class RowStates:
    """The states of rows in one call of a mixer: has the methods of transformers' `Cache` that mixers call.

    Attributes:
        states: [rows, ...] of the dtypes that the mixer keeps; none of rows that begin.
        counts: int64 [rows]; tokens of each row, where rows are padded at their ends.
        padded: bool [rows, tokens]; which these are; None if none is.
        first: the states with which the next scans of Mamba 1 begin.
        num_scans: scans that have heeded padding.
    """

    def __init__(
        self,
        states: dict[StateName, torch.Tensor] | None = None,
        counts: torch.Tensor | None = None,
        padded: torch.Tensor | None = None,
    ) -> None:
        self.states = states or {}
        self.counts = counts
        self.padded = padded
        self.first: Iterator[torch.Tensor] = iter(())
        self.num_scans = 0

    def first_states(self) -> Iterator[torch.Tensor]:
        """Yield [rows, channels, size] of the dtype that the mixer keeps: Zamba scans its heads one by one,
        the others have one scan.
        """
        first = self.states.get((RECURRENT, 0))
        if first is not None:
            yield from first.unbind(1) if first.dim() == 4 else [first]

    def run(self, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer's own forward with these states: hidden [rows, tokens, hidden] of the model's dtype →
        the same shape.
        """
        self.first = self.first_states()
        forward = with_scans(inspect.unwrap(type(mixer).forward), self)
        return forward(mixer, hidden, **{cache_name_of(type(mixer).forward): self})  # type: ignore[no-any-return]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """→ [rows, channels, width] of the model's dtype, which mixers may change in place"""
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """→ [rows, ...] of the dtype that the mixer keeps, which it may change in place"""
        return self.states.get((RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **rest: object,
    ) -> torch.Tensor:
        """Take new inputs [rows, channels, tokens] → those before them and them, [rows, channels, tokens and
        at least `conv_kernel_size`], of the model's dtype.
        """
        name = CONV, state_idx
        before = self.states.get(name)
        width = before.shape[-1] if before is not None else conv_kernel_size or conv_states.shape[-1]
        if before is not None:
            seen = torch.cat((before, conv_states), -1)
        else:
            missing = max(0, width - conv_states.shape[-1]) if self.counts is None else width
            seen = torch.nn.functional.pad(conv_states, (missing, 0))
        if self.counts is None:
            self.states[name] = seen[..., -width:].contiguous()
        else:
            ends = self.counts + seen.shape[-1] - conv_states.shape[-1]
            self.states[name] = last_inputs(seen, ends, width)
        return seen

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **rest: object
    ) -> torch.Tensor:
        """Take the new state [rows, ...] of the dtype that the mixer keeps."""
        self.states[RECURRENT, state_idx] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.states)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Mixers keep no more than the next token needs."""
        return False


def last_inputs(seen: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """seen [rows, channels, tokens] of any dtype → [rows, channels, width], the inputs before `ends` int64
    [rows].
    """
    places = ends[:, None] + torch.arange(-width, 0, device=seen.device)
    return seen.gather(-1, places[:, None].expand(-1, seen.shape[1], -1))


@dataclass(slots=True, eq=False)
class ModelStates:
    """The states of a model; of one without mixers there are none.

    Attributes:
        mixers: in the order of layers, and what each keeps of a row: tensors [...] of the dtypes that it
            keeps, on the meta device.
        num_slots: slots that rows may have, numbered from 1, in all stages; 0 before they are counted, and in
            a model without states.
        num_snapshots: slots after those, for states at the ends of blocks.
        pool: by mixer and state [slots, ...].
        spans: of the step that is computed.
        packs: rows of different lengths can be computed in one call of each mixer.
        checked: kinds of mixers that are known to carry all that they need.
        is_recording: a forward shows what mixers keep.
        writes_at_once: new states are written by each mixer. Else they wait in `written` until `commit`.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mixers: dict[Any, dict[StateName, torch.Tensor]] = field(default_factory=dict)
    num_slots: int = 0
    num_snapshots: int = 0
    pool: dict[Any, dict[StateName, torch.Tensor]] = field(default_factory=dict)
    spans: Sequence[StateSpan] = ()
    packs: bool = True
    checked: set[type[Any]] = field(default_factory=set)
    is_recording: bool = False
    writes_at_once: bool = False
    written: list[tuple[Any, StateSpan, RowStates]] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether rows have states, in this stage of the model or in another one."""
        return self.num_slots > 0

    @property
    def num_kept(self) -> int:
        """Slots of rows and snapshots."""
        return self.num_slots + self.num_snapshots

    @property
    def slot_bytes(self) -> int:
        """What the states of one row take."""
        return sum(own.nbytes for kept in self.mixers.values() for own in kept.values())

    def allocate(self, num_slots: int) -> None:
        """Make the pool anew, with `num_slots` slots beside the scratch slot."""
        self.pool = {}  # the old one is freed first
        for mixer, kept in self.mixers.items():
            self.pool[mixer] = {
                name: zeros((num_slots + 1, *own.shape), own.dtype, self.device) for name, own in kept.items()
            }

    @torch.inference_mode()
    def fill(self, slots: Sequence[int], value: float) -> None:
        index = to_device(list(slots), self.device, torch.int64)
        for states in self.pool.values():
            for state in states.values():
                state.index_fill_(0, index, value)

    @torch.inference_mode()
    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the states of slots: (source, target), no slot of which is both."""
        sources, targets = to_device(list(zip(*copies, strict=True)), self.device)
        for states in self.pool.values():
            for state in states.values():
                state[targets] = state[sources]

    def prepare_forward(self, inputs: Inputs) -> None:
        """Take the rows of a step: those that decode come first."""
        self.written = []
        self.writes_at_once = False
        self.spans = split_states(inputs.slices, self.packs, self.device) if self.mixers else []

    def prepare_decode(self, slots: torch.Tensor | None) -> None:
        """Take the rows of a step in which all decode: slots int32 [rows]. A captured step does not fail
        half-way.
        """
        if self.mixers and slots is not None:
            self.written = []
            self.writes_at_once = True
            self.spans = [StateSpan(slots.long(), slice(len(slots)))]

    def record(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a forward of the model in which no token sees another by states, and learn what each mixer
        keeps of a row → its result [...] of any dtype. Raises UnservableModel.
        """
        self.mixers.clear()
        self.is_recording = True
        try:
            return forward()
        finally:
            self.is_recording = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens, hidden] of the model's dtype → the same shape"""
        if self.is_recording:
            return self.try_out(mixer, hidden)
        if len(self.spans) == 1 and self.spans[0].tokens is None:
            return self.mix_span(mixer, self.spans[0], hidden)
        mixed = torch.empty_like(hidden)
        for span in self.spans:
            span.put(mixed, self.mix_span(mixer, span, hidden))
        return mixed

    def mix_span(self, mixer: Any, span: StateSpan, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens of the step, hidden] of the model's dtype → [1, tokens of the span, hidden]"""
        states = RowStates(self.read(mixer, span), span.counts, span.padded)
        output = states.run(mixer, span.take(hidden))
        if self.writes_at_once:
            self.write(mixer, span, states)
        elif not span.is_trial:
            self.written.append((mixer, span, states))
        return span.own(output)

    def read(self, mixer: Any, span: StateSpan) -> dict[StateName, torch.Tensor]:
        """→ copies [rows, ...] of any dtype of the states of the rows in a span"""
        if span.begins:
            return {}
        states = {name: state.index_select(0, span.slots) for name, state in self.pool[mixer].items()}
        if span.fresh is not None:
            for state in states.values():
                state.masked_fill_(span.fresh.view(-1, *(1,) * (state.dim() - 1)), 0)
        return states

    def write(self, mixer: Any, span: StateSpan, states: RowStates) -> None:
        for name, state in self.pool[mixer].items():
            state.index_copy_(0, span.slots, states.states[name].to(state.dtype))

    def try_out(self, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens, hidden] of the model's dtype → zeros of that shape, NaN where a token's own
        inputs are. Raises UnservableModel.
        """
        if mixer in self.mixers:
            raise UnservableModel("one of its mixers is used twice")
        states = RowStates()
        output = states.run(mixer, hidden.nan_to_num())
        if not isinstance(output, torch.Tensor):
            raise UnservableModel(
                f"{type(mixer).__name__}, which has states, returns more than hidden states"
            )
        self.mixers[mixer] = {name: state[0].to("meta") for name, state in states.states.items()}
        if type(mixer) not in self.checked:
            check_parts(mixer, hidden)
            self.packs = self.packs and takes_padding(mixer, hidden)
            self.checked.add(type(mixer))
        return torch.zeros_like(output).masked_fill_(hidden.isnan().any(-1, keepdim=True), torch.nan)

    def commit(self) -> None:
        """Write the states of a step that is computed."""
        for mixer, span, states in self.written:
            self.write(mixer, span, states)
        self.written = []


CACHE_NAMES = {"cache_params", "past_key_values"}
IGNORED = {"self", "hidden_states", "attention_mask", "kwargs"}
"""Parameters of a mixer's forward besides its cache. Rows have no padding."""
PARTS = (3, 1, 4)
"""Tokens of the calls by which a trial sequence is computed in parts."""


def find_mixers(model: Any, states: ModelStates) -> None:
    """Give the mixers of a model a forward that takes and leaves states. Raises UnservableModel."""
    for module in list(model.modules()):
        if is_mixer(type(module)):
            cache_name_of(type(module).forward)
            connect(module, mix, states=states)


@functools.cache
def cache_name_of(forward: Callable[..., Any]) -> str:
    """The name of the parameter of a mixer's forward that takes its cache. Raises UnservableModel if the
    forward needs more than hidden states.
    """
    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty and name not in IGNORED}
    needed -= {name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD}
    names = sorted(CACHE_NAMES & parameters.keys())
    if not names or needed - CACHE_NAMES:
        raise UnservableModel(
            f"{forward.__qualname__}, of a layer with states, needs more than hidden states: "
            f"{', '.join(sorted(needed - CACHE_NAMES)) or 'no cache'}"
        )
    return names[0]


def mix(
    module: Any, forward: Forward, hidden_states: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    """hidden_states [1, tokens, hidden] of the model's dtype → the same shape"""
    return module.states.mix(module, hidden_states)  # type: ignore[no-any-return]


def check_parts(mixer: Any, like: torch.Tensor) -> None:
    """Compute a sequence at once and in parts. Raises UnservableModel unless both are the same, within
    rounding. `like` [1, tokens, hidden] has the dtype and hidden size.
    """
    hidden = trial_tokens(like)
    whole = RowStates().run(mixer, hidden)
    states = RowStates()
    parts = [states.run(mixer, part) for part in torch.split(hidden, [*PARTS], 1)]
    if whole.isfinite().all() and not is_near(torch.cat(parts, 1), whole):
        raise UnservableModel(f"{type(mixer).__name__} does not go on from the states that it leaves")


def takes_padding(mixer: Any, like: torch.Tensor) -> bool:
    """Whether two sequences in one call, the shorter of which is padded, give the outputs and states that
    each gives alone, within rounding. `like` [1, tokens, hidden] has the dtype and hidden size.
    """
    hidden = trial_tokens(like)
    count, short = hidden.shape[1], PARTS[0]
    alone = RowStates()
    expected = alone.run(mixer, hidden[:, :short])
    padded = torch.arange(count, device=like.device) >= torch.tensor([[count], [short]], device=like.device)
    together = RowStates(counts=torch.tensor([count, short], device=like.device), padded=padded)
    found = together.run(mixer, hidden.expand(2, -1, -1))
    if not together.num_scans and any(kind == RECURRENT for kind, _ in together.states):
        return False
    return is_near(found[1:, :short], expected) and all(
        is_near(together.states[name][1:], state) for name, state in alone.states.items()
    )


def trial_tokens(like: torch.Tensor) -> torch.Tensor:
    """like [1, tokens, hidden] of a float dtype → [1, sum(PARTS), hidden] of that dtype"""
    places = torch.arange(sum(PARTS) * like.shape[-1], device=like.device)
    return torch.sin(1 + places.double() ** 2).to(like.dtype).view(1, sum(PARTS), -1)


def is_near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors [...] of one dtype are the same within rounding."""
    bound = 2 * torch.finfo(expected.dtype).eps ** 0.5 * expected.abs().max()
    return bool((found - expected).abs().max() <= bound)
