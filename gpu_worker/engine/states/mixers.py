"""Mixers: finds a model's modules that carry states from token to token, learns what each keeps of a row, and
gives them the states of the rows that a step computes.

Mixers run transformers' own code. A probe shows what they keep, as for attention: nothing is listed by
family.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from gpu_worker.engine.parallel.shards import is_mixer
from gpu_worker.engine.parallel.tensor_parallel import Forward, connect
from gpu_worker.engine.states.model_states import RECURRENT, RowStates, StateName, StateSpec
from gpu_worker.protocol import UnservableModel

CACHE_NAMES = {"cache_params", "past_key_values"}
IGNORED = {"self", "hidden_states", "attention_mask", "kwargs"}
"""Parameters of a mixer's forward besides its cache. Rows have no padding."""
PARTS = (3, 1, 4)
"""Tokens of the calls by which a trial sequence is computed in parts."""


def find_mixers(model: Any) -> "MixerRecorder":
    """Give the mixers of a model a forward that takes and leaves states → what learns which, in a forward of
    the model. Raises UnservableModel.
    """
    recorder = MixerRecorder()
    for module in list(model.modules()):
        if is_mixer(type(module)):
            connect(module, mix, states=recorder, cache_name=cache_name_of(module))
    return recorder


def cache_name_of(module: Any) -> str:
    """The name of the parameter of a mixer's forward that takes its cache. Raises UnservableModel if it needs
    more than hidden states.
    """
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    needed = {name for name, one in parameters.items() if one.default is one.empty and name not in IGNORED}
    needed -= {name for name, one in parameters.items() if one.kind is one.VAR_KEYWORD}
    names = sorted(CACHE_NAMES & parameters.keys())
    if not names or needed - CACHE_NAMES:
        raise UnservableModel(
            f"{type(module).__name__}, which has states, needs more than hidden states: "
            f"{', '.join(sorted(needed - CACHE_NAMES)) or 'no cache'}"
        )
    return names[0]


def mix(
    module: Any, forward: Forward, hidden_states: torch.Tensor, *rest: Any, **options: Any
) -> torch.Tensor:
    """hidden_states [1, tokens, hidden] of the model's dtype → the same shape"""
    return module.states.mix(module, hidden_states)  # type: ignore[no-any-return]


class MixerRecorder:
    """Stands in for the states of all mixers: records what each keeps of a row, and lets no token see
    another.

    Attributes:
        kept: by mixer, in the order of their calls.
        checked: kinds of mixers that are known to carry all that they need.
        packs: mixers of all these kinds compute rows of different lengths in one call.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, dict[StateName, StateSpec]] = {}
        self.checked: set[type[Any]] = set()
        self.packs = True

    def record(self, forward: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a forward of the model → its result [...] of any dtype. Raises UnservableModel."""
        self.kept.clear()
        return forward()

    def mix(self, mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [1, tokens, hidden] of the model's dtype → zeros of that shape, NaN where a token's own
        inputs are. Raises UnservableModel.
        """
        if mixer in self.kept:
            raise UnservableModel("one of its mixers is used twice")
        states = RowStates()
        output = states.run(mixer, hidden.nan_to_num())
        if not isinstance(output, torch.Tensor):
            raise UnservableModel(
                f"{type(mixer).__name__}, which has states, returns more than hidden states"
            )
        self.kept[mixer] = {
            name: StateSpec(tuple(state.shape[1:]), state.dtype) for name, state in states.states.items()
        }
        if type(mixer) not in self.checked:
            check_parts(mixer, hidden)
            self.packs = self.packs and takes_padding(mixer, hidden)
            self.checked.add(type(mixer))
        return torch.zeros_like(output).masked_fill_(hidden.isnan().any(-1, keepdim=True), torch.nan)


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
    if not together.num_scans and any(name.kind == RECURRENT for name in together.states):
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
