"""FlashInfer's wrappers: kernels that the host plans, each planned and run in the same way."""

from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch.nn.functional import pad

from common.settings.settings import SettingError
from gpu_worker.engine.attention.flashinfer_inputs import PlanInputs, plan_options
from gpu_worker.engine.attention.flashinfer_support import latent_kernel, planned_heads
from gpu_worker.engine.attention.kv_cache import Geometry, LayerSpec

LOG2_E = 1.4426950408889634
MAX_TILES = 16_384
"""What FlashInfer lays out of a step over latents: 128 queries of a row each, some for parts of long rows. It
refuses more without the name of a setting.
"""
SPLIT_TILES = 512


class StepWrapper:
    """Kernels of steps that are not captured: prompts, and rows that decode. Query and output [tokens, heads,
    dim] of the model's dtype, sinks float32 [heads].
    """

    def __init__(self, workspace: torch.Tensor) -> None:
        """workspace uint8 [bytes]"""
        self.wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        self.wrapper.plan(
            inputs.query_ends,
            inputs.block_ends,
            inputs.blocks,
            inputs.last_lengths,
            head_dim_qk=view.key_dim,
            causal=True,
            seq_lens=inputs.lengths,  # or FlashInfer computes them, in memory that is not pinned
            max_token_per_sequence=inputs.longest,  # or it looks for it, number by number
            **plan_options(geometry, view.spec),
        )

    def run(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        run_over_pages(self.wrapper, module, query, sinks, output)


class DecodeWrapper:
    """Kernels of captured steps of one number of rows, all of which decode. They use tensor cores:
    FlashInfer's other kernel serves few numbers of queries that share a K head. Query and output [rows,
    heads, dim] of the model's dtype, sinks float32 [heads].
    """

    def __init__(self, workspace: torch.Tensor, schedule: torch.Tensor, buffers: PlanInputs) -> None:
        """workspace and schedule uint8 [bytes]; `buffers` are what the graph reads."""
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers.block_ends,
            paged_kv_indices_buffer=buffers.blocks,
            paged_kv_last_page_len_buffer=buffers.last_lengths,
        )
        # Without this each has 8 MiB of its own, on the device and pinned on the host.
        self.wrapper.reset_workspace_buffer(workspace, schedule)

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        self.wrapper.plan(
            inputs.block_ends,
            inputs.blocks,
            inputs.last_lengths,
            head_dim=view.key_dim,
            seq_lens=inputs.lengths,
            **plan_options(geometry, view.spec),
        )

    def run(self, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
        run_over_pages(self.wrapper, module, query, sinks, output)


class LatentWrapper:
    """Kernels of layers that keep latents (AttentionSpec.latent), in steps of either kind. Each has 8 MiB of
    its own for schedules, on the device and on the host.

    The kernel is named: of the others that FlashInfer would choose among on some GPUs, none is planned anew
    for a captured step.

    Attributes:
        heads: of the queries that were planned, see `planned_heads`.
    """

    def __init__(self, workspace: torch.Tensor, generation: int, buffers: PlanInputs | None = None) -> None:
        """workspace uint8 [bytes]; `buffers` are what the graph reads of a captured step."""
        fixed = {} if buffers is None else latent_metadata(buffers)
        self.heads = 0
        self.wrapper = BatchMLAPagedAttentionWrapper(
            workspace, use_cuda_graph=bool(fixed), backend=latent_kernel(generation), **fixed
        )

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        rows, tokens = len(inputs.lengths), int(inputs.query_ends[-1])
        self.heads = heads = planned_heads(view.spec.group, inputs.longest)
        if tokens * heads // 128 + 2 * rows + SPLIT_TILES > MAX_TILES:
            raise SettingError(
                "max_batch_prefill_tokens", f"{tokens} tokens with {heads} heads are too many for one step"
            )
        self.wrapper.plan(
            metadata=MLAPlanMetadata.csr(**latent_metadata(inputs)),
            num_heads=heads,
            head_dim_ckv=view.value_dim,
            head_dim_kpe=view.key_dim,
            page_size=geometry.block_size,
            causal=True,
            sm_scale=view.spec.scaling,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.kv_dtype,
            query_layout="split",
            kv_cache_layout="split",
        )

    def run(self, module: Any, query: torch.Tensor, sinks: None, output: torch.Tensor) -> None:
        """query [tokens, heads, rank + rotary_dim], output [tokens, heads, rank], of the model's dtype"""
        rank, heads = module.values.shape[3], query.shape[1]
        if heads < self.heads:
            query = pad(query, (0, 0, 0, self.heads - heads))
        out = output if heads == self.heads else query.new_empty(len(query), self.heads, rank)
        self.wrapper.run(
            query=(query[..., :rank], query[..., rank:]),
            kv_cache=(module.values[:, 0], module.keys[:, 0]),
            out=out,
        )
        if out is not output:
            output.copy_(out[:, :heads])


def latent_metadata(inputs: PlanInputs) -> dict[str, torch.Tensor]:
    """→ int32 [rows + 1], [rows + 1], [blocks], [rows], by FlashInfer's names"""
    return {
        "qo_indptr": inputs.query_ends,
        "kv_indptr": inputs.block_ends,
        "kv_indices": inputs.blocks,
        "kv_len_arr": inputs.lengths,
    }


def run_over_pages(wrapper: Any, module: Any, query: torch.Tensor, sinks: Any, output: torch.Tensor) -> None:
    """A sink takes its share of a softmax whose sum is known: what is left of the output is `sigmoid(log sum
    - sink)`. query and output [tokens, heads, dim] of the model's dtype, sinks float32 [heads]
    """
    cache = (module.keys, module.values)
    scales = {"k_scale": module.key_scale, "v_scale": module.value_scale}
    if sinks is None:
        wrapper.run(query, cache, out=output, **scales)
    else:
        _, log2_sum = wrapper.run(query, cache, out=output, return_lse=True, **scales)
        output.mul_(torch.sigmoid(log2_sum / LOG2_E - sinks)[..., None])
