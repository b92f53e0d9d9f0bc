"""Random batches through verl's own stages, with sessions of several outputs, padding, tool output and prompts that
differ, against the definitions: advantages, metrics and token dump."""

import json
import math
import random
import statistics

import pytest
import torch
from reference import conflict_mask

from gtpo_verl.verl_plugin.update_pass import UpdateInputs

GAMMA, THRESHOLD = 0.1, 0.5
COLUMNS = ("uid", "prompts", "responses", "response_mask", "rm_scores", "entropy", "old_log_probs")


def random_batch(seed, trainer):
    """Rows and keys; each row is (uid, session, output), or one of padding. Only verl's V1 trainer has sessions."""
    rng = random.Random(seed)
    names = []
    for uid in ("p", "q", "r"):
        for session in range(rng.choice([1, 3, 4])):
            outputs = rng.choice([1, 1, 3]) if trainer == "v1" else 1
            names += [(uid, session, output) for output in range(outputs)]
    names += [("pad", 0, 0), ("pad", 1, 0)]
    rng.shuffle(names)
    rows = {column: [] for column in COLUMNS}
    for uid, _, _ in names:
        length = 1 if uid == "pad" else rng.randint(1, 6)
        own = [0 if uid == "pad" else int(rng.random() < 0.8) for _ in range(length)]
        if uid != "pad":
            own[rng.randrange(length)] = 1
        rows["uid"].append(uid)
        # Prompts of one length, so that only their tokens tell them apart.
        rows["prompts"].append(torch.tensor([1, rng.choice([2, 2, 3])]))
        rows["responses"].append(torch.tensor([rng.choice([5, 5, 6]) for _ in range(length)]))
        rows["response_mask"].append(torch.tensor(own))
        rows["rm_scores"].append(torch.tensor([0.0] * (length - 1) + [float(rng.choice([0, 1, 2]))]))
        rows["entropy"].append(torch.tensor([rng.random() for _ in range(length)]))
        rows["old_log_probs"].append(torch.tensor([-rng.random() for _ in range(length)]))
    keys = [f"{uid}_{session}_{output}" for uid, session, output in names]
    return rows, keys, names


def expected_of(rows, names, base, each_outputs_entropy):
    """Advantages of all rows; of the last outputs A_i, ⟨H⟩_i, δ_i, M and λ."""
    last = {}
    for row, (uid, session, output) in enumerate(names):
        if uid != "pad" and output >= names[last.get((uid, session), row)][2]:
            last[uid, session] = row
    a = {}
    for (uid, session), row in last.items():
        rewards = {other: rows["rm_scores"][r].sum().item() for (u, other), r in last.items() if u == uid}
        mine = rewards[session]
        if len(set(rewards.values())) == 1:
            a[row] = 0.0
        elif base == "rloo":
            others = [reward for other, reward in rewards.items() if other != session]
            a[row] = mine - sum(others) / len(others)
        else:
            a[row] = (mine - statistics.mean(rewards.values())) / (statistics.stdev(rewards.values()) + 1e-6)
    width = 6
    chosen = list(last.values())
    padded = {
        name: [rows[name][row].tolist() + [0] * (width - len(rows[name][row])) for row in chosen]
        for name in ("responses", "response_mask")
    }
    prompts = [(names[row][0], tuple(rows["prompts"][row].tolist())) for row in chosen]
    masks = conflict_mask(*padded.values(), [a[row] for row in chosen], prompts, "leading")
    found = {}
    for row, mask in zip(chosen, masks, strict=True):
        weight = 1 + (a[row] > 0) - (a[row] < 0)
        found[row] = {"a": a[row], "mask": mask, "lambda": [weight if on else 1 for on in mask]}
    advantages = torch.zeros(len(names), max(map(len, rows["responses"])))
    for row, (uid, session, _) in enumerate(names):
        own = rows["response_mask"][row].bool()
        if uid == "pad":
            continue
        of = row if each_outputs_entropy else last[uid, session]
        mean = rows["entropy"][of][rows["response_mask"][of].bool()].mean().item()
        keep = mean <= THRESHOLD
        if row in found:
            found[row] |= {"mean": mean, "keep": keep}
        value = (a[last[uid, session]] - GAMMA * mean) if keep else 0.0
        weights = torch.tensor(found[row]["lambda"][: len(own)] if row in found else [1] * len(own))
        advantages[row, : len(own)] = value * weights * own
    return advantages, found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("base", ["gtpo", "rloo"])
@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
@pytest.mark.parametrize("trainer", ["v1", "legacy"])
def test_advantages_metrics_and_dump_are_those_of_the_definitions(
    make_stage, tmp_path, trainer, entropy_from, base, seed
):
    rows, keys, names = random_batch(seed, trainer)
    overrides = [
        "algorithm.gtpo.initial_entropy=0.3",
        "algorithm.gtpo.completion_filter=always",
        f"++algorithm.gtpo.entropy_threshold={THRESHOLD}",
        f"++algorithm.gtpo.base={base}",
        f"algorithm.gtpo.entropy_from={entropy_from}",
        f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}",
    ]
    stage = make_stage(trainer, *overrides, rows=rows, keys=keys)
    order = list(range(len(keys)))
    random.Random(seed).shuffle(order)
    metrics, advantages = stage.step(order)
    is_from_update = entropy_from == "update"
    if is_from_update:
        assert UpdateInputs.from_batch(stage.batch).row.tolist() == list(range(len(keys)))
        advantages = stage.in_own_order(stage.used)
    expected, found = expected_of(rows, names, base, each_outputs_entropy=is_from_update)
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-6)

    tokens = sum(int(rows["response_mask"][row].sum()) for row in found)
    assert metrics["gtpo/conflict/token_frac"] == pytest.approx(sum(sum(x["mask"]) for x in found.values()) / tokens)
    assert metrics["gtpo/filter/dropped_frac"] == pytest.approx(1 - statistics.mean(x["keep"] for x in found.values()))
    assert metrics["gtpo/entropy/max"] == pytest.approx(max(x["mean"] for x in found.values()))
    for name, sign in (("positive", 1), ("negative", -1)):
        means = [
            rows["old_log_probs"][row][rows["response_mask"][row].bool()].mean().item()
            for row, values in found.items()
            if values["a"] * sign > 0
        ]
        assert metrics.get(f"gtpo/log_prob/{name}", math.nan) == pytest.approx(
            statistics.mean(means) if means else math.nan, nan_ok=True
        )

    lines = [json.loads(line) for line in (tmp_path / "dump/step_000001.jsonl").read_text().splitlines()]
    dumped = {}
    for row, values in found.items():
        length = len(rows["responses"][row])
        line = {
            "uid": names[row][0],
            "reward": rows["rm_scores"][row].sum().item(),
            "group_advantage": values["a"],
            "keep": values["keep"],
            "prompt_ids": rows["prompts"][row].tolist(),
            "token_ids": rows["responses"][row].tolist(),
            "response_mask": rows["response_mask"][row].tolist(),
            "lambda": values["lambda"][:length],
            "advantages": expected[row, :length].tolist(),
            "trajectory_entropy": values["mean"],
        }
        own = rows["response_mask"][row].tolist()
        line["entropy"] = [
            entropy for entropy, is_own in zip(rows["entropy"][row].tolist(), own, strict=True) if is_own
        ]
        dumped[row] = line
    for line in lines:
        line["entropy"] = [x for x, is_own in zip(line["entropy"], line["response_mask"], strict=True) if is_own]

    def key(line):
        return line["uid"], line["token_ids"], round(line["trajectory_entropy"], 4)

    assert len(lines) == len(dumped)
    for line, wanted in zip(sorted(lines, key=key), sorted(dumped.values(), key=key), strict=True):
        for name, value in wanted.items():
            assert line[name] == (value if isinstance(value, str) else pytest.approx(value, abs=2e-4)), name
