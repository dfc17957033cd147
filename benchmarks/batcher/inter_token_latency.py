"""Prints the curve of INTER_TOKEN_LATENCY_TARGET_MS: `python -m benchmarks.batcher.inter_token_latency`.

The curve shows what a lower target gives (a shorter gap between tokens while prompts arrive) and what it
costs (time to first token, tokens/s), and where the learnt target stands, which is the default. The scheduler
runs alone, with a simulated worker for each kind of machine. Beside it stands what a server does that has no
target, and steps of 2,048 prompt tokens (8,192 on a GPU), as vLLM.

Exit status 1 if the default has less than 97% of the tokens/s without a target, or at a load of `WON` a p99
more than 5% above that of such a server.
"""

import sys
from collections.abc import Callable

from benchmarks.batcher.timed_pool import Load, StepCosts, TimedPool
from benchmarks.serve import Figures

MACHINES = (
    StepCosts("two cores with AVX512-BF16", 7.5, 0.55, 0.3, 2048),
    StepCosts("two cores with AMX", 6.0, 0.25, 0.06, 2048),
    StepCosts("one GPU, 8B", 5.0, 0.025, 0.015, 8192),
)
WON = (
    Load("8 streams", 8, 64, 128),
    Load("32 streams", 32, 128, 128),
    Load("32 streams, lengths differ by half", 32, 192, 128, spread=0.5),
    Load("16 streams", 16, 64, 160),
    Load("8 streams, long prompts", 8, 32, 1309),
)
LOADS = (
    *WON,
    Load("4 arrive a second", 32, 200, 256, 128, spread=0.8, per_s=4.0),
    Load("256 streams", 256, 600, 256, 128, spread=0.8),
)
TARGETS_MS = (0.0, 150.0, 100.0, 75.0, 50.0, None)
PEER_TOKENS = 2048
LEAST_SHARE, MOST_OVER = 0.97, 1.05


def line(name: str, figures: Figures) -> str:
    return (
        f"  {name:24} {figures.tokens_per_s:7.1f} tokens/s, "
        f"first token p50 {figures.first_token_ms:5.0f} ms, p99 {figures.first_token_p99_ms:6.0f} ms, "
        f"gap p50 {figures.gap_ms:5.1f} ms, p99 {figures.gap_p99_ms:5.1f} ms"
    )


def curve(measure: Callable[[float | None], Figures]) -> dict[float | None, Figures]:
    """Measures and prints each target."""
    found = {}
    for target_ms in TARGETS_MS:
        found[target_ms] = measure(target_ms)
        name = "learnt (default)" if target_ms is None else f"target {target_ms:.0f} ms"
        print(line("no target" if target_ms == 0 else name, found[target_ms]), flush=True)
    return found


def play(costs: StepCosts, load: Load) -> bool:
    """Prints the curve of one load on a simulated worker. Returns whether the default is good there."""
    print(f"{costs.name}; {load.name}: {load.in_tokens} in, {load.out_tokens} out")
    most = max(PEER_TOKENS, costs.prefill_tokens)
    peer = TimedPool(StepCosts("", costs.step_ms, costs.row_ms, costs.token_ms, most), load, 0.0).play()
    print(line(f"no target, {most} a step", peer))
    found = curve(lambda target_ms: TimedPool(costs, load, target_ms).play())
    learnt = found[None]
    is_fast = learnt.tokens_per_s >= LEAST_SHARE * found[0.0].tokens_per_s
    is_even = learnt.gap_p99_ms <= MOST_OVER * peer.gap_p99_ms
    is_prompt = learnt.first_token_p99_ms <= MOST_OVER * peer.first_token_p99_ms
    return is_fast and ((is_even and is_prompt) or load not in WON)


if __name__ == "__main__":
    good = [play(costs, load) for costs in MACHINES for load in LOADS]
    sys.exit(int(not all(good)))
