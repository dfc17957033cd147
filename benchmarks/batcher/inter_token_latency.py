"""Prints the curve of INTER_TOKEN_LATENCY_TARGET_MS: `python -m benchmarks.batcher.inter_token_latency`.

The curve shows what a lower target gives (a shorter gap between tokens while prompts arrive) and what it
costs (time to first token, tokens/s). Without a target prompts get whole steps beside rows that decode, as in
vLLM. The scheduler runs alone, in simulated time, with a simulated worker for each kind of machine.
"""

from benchmarks.batcher.timed_pool import Load, StepCosts, TimedPool
from benchmarks.serve import Figures

MACHINES = (
    StepCosts("two cores with AVX2, float32", 6.0, 2.7, 2.0, 2048),
    StepCosts("two cores with AVX512-BF16", 7.5, 0.55, 0.3, 2048),
    StepCosts("two cores with AMX", 6.0, 0.25, 0.06, 2048),
    StepCosts("one GPU, 8B", 5.0, 0.025, 0.015, 8192),
)
LOADS = (
    Load("8 streams", 8, 64, 128),
    Load("32 streams", 32, 128, 128),
    Load("32 streams, lengths differ by half", 32, 192, 128, spread=0.5),
    Load("8 streams, long prompts", 8, 32, 1309),
    Load("4 arrive a second", 32, 200, 256, 128, spread=0.8, per_s=4.0),
    Load("256 streams", 256, 600, 256, 128, spread=0.8),
)
TARGETS_MS = (0.0, 150.0, 100.0, 75.0, 50.0)


def line(name: str, figures: Figures) -> str:
    return (
        f"  {name:24} {figures.tokens_per_s:7.1f} tokens/s, "
        f"first token p50 {figures.first_token_ms:5.0f} ms, p99 {figures.first_token_p99_ms:6.0f} ms, "
        f"gap p50 {figures.gap_ms:5.1f} ms, p99 {figures.gap_p99_ms:5.1f} ms"
    )


if __name__ == "__main__":
    for costs in MACHINES:
        for load in LOADS:
            print(f"{costs.name}; {load.name}: {load.in_tokens} in, {load.out_tokens} out")
            for target_ms in TARGETS_MS:
                name = f"target {target_ms:.0f} ms" if target_ms else "no target (default)"
                print(line(name, TimedPool(costs, load, target_ms).play()), flush=True)
