"""FlashInfer's wrappers: kernels that the host plans, each planned and run in the same way."""

from typing import Any

import flashinfer
import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper

from common.settings.settings import SettingError
from gpu_worker.engine.attention.flashinfer_inputs import PlanInputs, plan_options
from gpu_worker.engine.attention.kv_cache import Geometry, LayerSpec

LOG2_E = 1.4426950408889634
MAX_TILES = 16_384
"""What FlashInfer lays out of a step over latents: 128 queries of a row each, some for parts of long rows."""
SPLIT_TILES = 512


class StepWrapper:
    """For steps that are not captured: prompts, and rows that decode. Query and output [tokens, heads, dim]
    of the model's dtype, sinks float32 [heads].
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
    """For captured steps of one number of rows, all of which decode. By tensor cores: FlashInfer's other
    kernel serves few numbers of queries that share a K head. Query and output [rows, heads, dim] of the
    model's dtype, sinks float32 [heads].
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
    """For layers that keep latents (AttentionSpec.latent), in steps of either kind. Each has 8 MiB of its own
    for schedules, on the device and on the host.
    """

    def __init__(self, workspace: torch.Tensor, buffers: PlanInputs | None = None) -> None:
        """workspace uint8 [bytes]; `buffers` are what the graph reads of a captured step."""
        fixed = (
            {}
            if buffers is None
            else {
                "qo_indptr": buffers.query_ends,
                "kv_indptr": buffers.block_ends,
                "kv_indices": buffers.blocks,
                "kv_len_arr": buffers.lengths,
            }
        )
        self.wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=bool(fixed), **fixed)

    def plan(self, inputs: PlanInputs, geometry: Geometry, view: LayerSpec) -> None:
        heads, rows, tokens = view.spec.group, len(inputs.lengths), int(inputs.query_ends[-1])
        if tokens * heads // 128 + 2 * rows + SPLIT_TILES > MAX_TILES:  # nothing checks it
            raise SettingError(
                "max_batch_prefill_tokens", f"{tokens} tokens with {heads} heads are too many for one step"
            )
        self.wrapper.plan(
            qo_indptr=inputs.query_ends,
            kv_indptr=inputs.block_ends,
            kv_indices=inputs.blocks,
            kv_len_arr=inputs.lengths,
            num_heads=heads,
            head_dim_ckv=view.value_dim,
            head_dim_kpe=view.key_dim,
            page_size=geometry.block_size,
            causal=True,
            sm_scale=view.spec.scaling,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.kv_dtype,
        )

    def run(self, module: Any, query: torch.Tensor, sinks: None, output: torch.Tensor) -> None:
        """query [tokens, heads, rank + rotary_dim], output [tokens, heads, rank], of the model's dtype"""
        rank = module.values.shape[3]
        self.wrapper.run(
            q_nope=query[..., :rank],
            q_pe=query[..., rank:],
            ckv_cache=module.values[:, 0],
            kpe_cache=module.keys[:, 0],
            out=output,
        )


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
