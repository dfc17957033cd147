"""vLLM without a model: its engine gives every row the next of some token ids, as often as the scripted
worker of `benchmarks/gateway.py` does. For figures of vLLM's API server, with vLLM's own Python:

    TOKEN_IDS=$(python -m benchmarks.gateway --ids) PYTHONPATH=benchmarks vllm serve MODEL --enforce-eager \
        --distributed-executor-backend vllm_executor.ScriptedExecutor --max-num-batched-tokens 32768

With VLLM_USE_RUST_FRONTEND=1 the front is vLLM's in Rust, the child process `vllm-rs frontend`. The wheel for
CUDA has its binary, that of the CPU build has not; VLLM_RUST_FRONTEND_PATH names it.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import ModelRunnerOutput

IDS = [int(word) for word in os.environ.get("TOKEN_IDS", "1").split(",")]
PACES = ((1, 0.01), (32, 0.04), (256, 0.1))
"""(most rows, seconds between steps)"""


class ScriptedExecutor(UniProcExecutor):  # type: ignore[misc]  # not installed here
    """An executor that computes nothing.

    Attributes:
        left: request id → tokens of the prompt that no step has had.
        made: request id → tokens that it was given.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        self.left: dict[str, int] = {}
        self.made: dict[str, int] = {}

    def determine_available_memory(self) -> list[int]:
        return [2**31]

    def compile_or_warm_up_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            self.left[new.req_id] = len(new.prompt_token_ids) - new.num_computed_tokens
            self.made[new.req_id] = 0
        for name in scheduler_output.finished_req_ids:
            self.left.pop(name, None)
            self.made.pop(name, None)
        scheduled = scheduler_output.num_scheduled_tokens
        sampled = [self.sample(name, num_tokens) for name, num_tokens in scheduled.items()]
        if scheduled:
            pace_s = next(pace_s for rows, pace_s in PACES if len(scheduled) <= rows)
            time.sleep(pace_s - time.monotonic() % pace_s)
        output = ModelRunnerOutput(
            req_ids=[*scheduled],
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=sampled,
        )
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def sample(self, name: str, num_tokens: int) -> list[int]:
        """The next token of a row that was given `num_tokens` to compute; none before its prompt ends."""
        self.left[name] -= num_tokens
        if self.left[name] > 0:
            return []
        self.made[name] += 1
        return [IDS[(self.made[name] - 1) % len(IDS)]]
