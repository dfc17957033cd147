"""Layer trial: runs a model on a few tokens and records what its layers are called with, to compare them with
native ones.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import Inputs, build_inputs
from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_slice import RowSlice

TRIAL_TOKENS = 8
TOLERANCES = {torch.float32: (1e-4, 1e-6), torch.bfloat16: (3e-2, 4e-3)}
"""By dtype: of what a layer adds to its input, and of its output."""


class LayerCall(NamedTuple):
    """One call of a decoder layer.

    Attributes:
        arguments: the positional ones: hidden states [1, TRIAL_TOKENS, hidden].
        options: the named ones.
        output: [1, TRIAL_TOKENS, hidden]
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any


def num_trial_blocks(block_size: int) -> int:
    return -(-TRIAL_TOKENS // block_size)


def trial_inputs(model: Any, block_size: int, context: int) -> Inputs:
    """A prompt in the first blocks. Its positions span the whole context: some models have factors that
    depend on them.
    """
    blocks = np.arange(1, 1 + num_trial_blocks(block_size), dtype=np.int32)
    ids = np.arange(TRIAL_TOKENS, dtype=np.int32) * 7 % model.config.get_text_config().vocab_size
    row = RowSlice(Row(0, ids, 0, 1, blocks), 0, TRIAL_TOKENS, samples=True)
    prompt = build_inputs([row], block_size, torch.device("cpu"))
    positions = torch.linspace(0, context - 1, TRIAL_TOKENS).long()
    return replace(prompt, positions=positions[None], lengths=positions + 1)


def record_calls(layers: Iterable[Any], run: Callable[[], object]) -> dict[Any, LayerCall]:
    """The calls that `run` makes of the layers, of those layers that are called as most models call them."""
    seen: dict[Any, LayerCall] = {}

    def record(module: Any, arguments: Any, options: Any, output: Any) -> None:
        seen[module] = LayerCall(arguments, options, output)

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in layers]
    if hooks:
        run()
    for hook in hooks:
        hook.remove()
    return {layer: call for layer, call in seen.items() if is_usual_call(call)}


def is_usual_call(call: LayerCall) -> bool:
    """Hidden states in, hidden states out, and one pair of cosines and sines beside them."""
    embeddings = call.options.get("position_embeddings")
    if len(call.arguments) != 1 or not torch.is_tensor(call.output) or not isinstance(embeddings, tuple):
        return False
    tensors = (*call.arguments, call.output, *embeddings)
    return (
        len(tensors) == 4
        and len({tensor.dtype for tensor in tensors}) == 1
        and all(tensor.is_contiguous() and tensor.shape[:2] == (1, TRIAL_TOKENS) for tensor in tensors)
    )


def is_close(output: torch.Tensor, expected: torch.Tensor, states: torch.Tensor) -> bool:
    """Whether two layers computed the same from `states`; all [1, tokens, hidden] of one dtype."""
    of_added, of_output = TOLERANCES[expected.dtype]
    bound = of_added * (expected.float() - states.float()).norm() + of_output * expected.float().norm()
    return bool((output.float() - expected.float()).norm() <= bound)
