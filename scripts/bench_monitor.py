"""What the monitor costs a step, in CPU time, in a run of 10,000 steps that log 60 numbers.

python scripts/bench_monitor.py [STEPS]        a run that rises, one that is flat and one that fails: minutes
"""

import random
import sys
import time
from collections.abc import Callable

from gtpo_verl.monitor.explain import LABELS
from gtpo_verl.monitor.frameworks import PART
from gtpo_verl.monitor.watch import Watch

NUMBERS = 60
COMPLETIONS = 512
RUNS: dict[str, Callable[[float], float]] = {
    "rises": lambda done: 0.3 + 0.4 * done,
    "is flat": lambda done: 0.5,
    "fails": lambda done: 0.3 + 0.4 * done if done < 0.5 else 0.05,
}
"""The reward of each run, by the share of it that is done."""


def cost(reward: Callable[[float], float], steps: int) -> tuple[float, float]:
    """Return the mean cost of a step, and that of the dearest one, in seconds of CPU time."""
    others = [name for name in LABELS if name not in ("reward", "accuracy", "validation")]
    parts = [f"{PART}{number}" for number in range(NUMBERS - len(others) - 3)]
    drawn = random.Random(1)
    watch = Watch("verl", COMPLETIONS)
    total = 0.0
    dearest = 0.0
    for step in range(1, steps + 1):
        numbers = {name: 0.5 + drawn.gauss(0, 0.05) for name in [*others, *parts]}
        outcome = reward(step / steps)
        numbers |= {"reward": outcome + drawn.gauss(0, 0.05), "accuracy": outcome + drawn.gauss(0, 0.05)}
        if step % 10 == 0:
            numbers["validation"] = outcome + drawn.gauss(0, 0.02)
        before = time.process_time()
        watch.observe(step, numbers)
        spent = time.process_time() - before
        total += spent
        dearest = max(dearest, spent)
    return total / steps, dearest


def main() -> None:
    """Print what each run costs."""
    steps = int(sys.argv[1]) if sys.argv[1:] else 10_000
    for name, reward in RUNS.items():
        mean, dearest = cost(reward, steps)
        print(f"a run that {name}: {1e3 * mean:.2f} ms a step, {1e3 * dearest:.0f} ms at most", flush=True)


if __name__ == "__main__":
    main()
