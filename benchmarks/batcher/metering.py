"""Prints whether usage drifts: `python -m benchmarks.batcher.metering [--kills 1000] [--seed 1]`.

Workers (the real agents, over engines without a model), batchers and gateways are killed while clients ask,
and three in ten hang up. At the end, requests, tokens of prompts and tokens of answers that were counted for
each API key, tenant and model are compared with what the requests' terminals say. Exit status 1 if one token
differs, if something is left set aside, or if the key with a budget has more than a step's tokens beyond it.
"""

import argparse
import asyncio
import sys
import time

from common.broker.usage import Used
from tests.support import brokers
from tests.support.chaos.metered import MeteringOutcome, MeteringPlan, run


def describe(plan: MeteringPlan, outcome: MeteringOutcome, seconds: float) -> str:
    kills = ", ".join(f"{kind} {number}" for kind, number in sorted(outcome.kills.items()))
    ends = ", ".join(f"{reason} {number}" for reason, number in sorted(outcome.ends.items()))
    counted = sum(outcome.counted.values(), Used())
    committed = sum(outcome.committed.values(), Used())
    return "\n".join(
        [
            f"seed {plan.seed}: {outcome.kills.total()} kills ({kills}) in {seconds:.0f} s",
            f"requests: {ends}",
            f"committed: {describe_used(committed)}",
            f"counted:   {describe_used(counted)}",
            f"drift: {outcome.drift}; left set aside: {outcome.pending or 0}; wrong: {len(outcome.wrong)}",
            f"budget: {outcome.spent} of {outcome.budget} tokens spent",
        ]
    )


def describe_used(used: Used) -> str:
    return f"{used.requests} prompts of {used.prompt} tokens, {used.generated} tokens of answers"


def is_right(plan: MeteringPlan, outcome: MeteringOutcome) -> bool:
    is_kept = outcome.spent <= plan.budget + plan.num_clients
    return is_kept and not (outcome.drift or outcome.pending or outcome.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of a run to repeat")
    parser.add_argument("--kills", type=int, default=1000)
    args = parser.parse_args()
    plan = MeteringPlan(seed=args.seed, kills=args.kills, budget=20_000)
    with brokers.running() as broker:
        started_s = time.monotonic()
        outcome = asyncio.run(run(plan, broker.url))
    print(describe(plan, outcome, time.monotonic() - started_s))
    return 0 if is_right(plan, outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
