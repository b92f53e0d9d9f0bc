"""GTPO's work is done by the thread that asks for it."""

from own_process import run_python

CODE = """
import os
import numpy as np
import torch
from gtpo_verl import compute_gtpo, compute_gtpo_metrics

rng = np.random.default_rng(0)
shape = (1024, 256)
batch = {
    "responses": torch.from_numpy(rng.integers(0, 3, shape)),
    "response_mask": torch.from_numpy(np.ones(shape, dtype=int)),
    "group_ids": [row // 8 for row in range(1024)],
    "entropy": torch.from_numpy(rng.random(shape, dtype=np.float32)),
    "rewards": torch.from_numpy(rng.integers(0, 3, 1024)).float(),
}
before = len(os.listdir("/proc/self/task"))
result = compute_gtpo(**batch, initial_entropy=0.3)
compute_gtpo_metrics(result, None, 0.3)
after = len(os.listdir("/proc/self/task"))
batch["entropy"] + 1
later = len(os.listdir("/proc/self/task"))
print(after - before, later - after, len(result.conflicts.rows) > 1000)
"""


def test_no_operation_of_gtpo_waits_for_torchs_other_threads():
    """They are started by the first operation that is shared out, as the addition is."""
    started, by_addition, has_conflicts = run_python(CODE, OMP_NUM_THREADS="4").stdout.split()
    assert (started, has_conflicts) == ("0", "True") and int(by_addition) > 0
