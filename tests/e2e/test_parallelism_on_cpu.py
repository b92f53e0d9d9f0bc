"""The parameters after one step of verl's trainer, over every way to split it, against plain torch."""

import one_step
import pytest
import torch
from harness import one_process
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def steps(task, run_script, tmp_path_factory):
    """Mode and name of each split -> what its step left."""
    out = tmp_path_factory.mktemp("steps")
    run_script("one_step.py", task, out)
    return {(path.parent.name, path.stem): torch.load(path, weights_only=False) for path in out.glob("*/*.pt")}


@pytest.fixture(scope="module")
def by_hand(task):
    """Eq. 8 to 11 in plain torch, one completion after another, without padding rows."""
    rows = one_process.rollouts(AutoTokenizer.from_pretrained(task / "model"), one_step.PROMPTS)
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    log_probs, entropy = [], []
    for row in rows.values():
        n = len(row["responses"])
        logp = model(row["input_ids"].unsqueeze(0)).logits[0, -n - 1 : -1].log_softmax(-1)
        log_probs.append(logp.gather(-1, row["responses"].unsqueeze(-1)).squeeze(-1))
        entropy.append(-(logp.exp() * logp).sum(-1).detach())

    def column(name):
        return pad_sequence([row[name] for row in rows.values()], batch_first=True)

    advantages, _ = compute_gtpo_outcome_advantage(
        column("rm_scores"),
        column("response_mask"),
        [row["uid"] for row in rows.values()],
        column("responses"),
        pad_sequence(entropy, batch_first=True),
        config=GTPOConfig(completion_filter="always", entropy_threshold=one_process.ENTROPY_THRESHOLD),
    )
    per_completion = [
        (logp * a[: len(logp)] * row["response_mask"]).sum() / row["response_mask"].sum()
        for logp, a, row in zip(log_probs, advantages, rows.values(), strict=True)
    ]
    (-sum(per_completion) / one_step.ROWS_IN_UPDATE).backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), one_process.MAX_GRAD_NORM).item()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=one_process.LR).step()
    end = {name: p.detach() for name, p in model.named_parameters()}
    advantage_of = {key: a[: len(row["responses"])] for (key, row), a in zip(rows.items(), advantages, strict=True)}
    return {"start": start, "parameters": end, "advantages": advantage_of, "grad_norm": grad_norm}


SPLITS = [name for names in one_step.SPLITS.values() for name in names]


@pytest.mark.parametrize("mode", one_step.MODES)
@pytest.mark.parametrize("split", SPLITS)
def test_one_step_gives_the_parameters_of_plain_torch_however_it_is_split(steps, by_hand, split, mode):
    step = steps[mode, split]
    if mode == "old_log_prob":
        for key, advantages in by_hand["advantages"].items():
            torch.testing.assert_close(step["rows"][key]["advantages"], advantages, rtol=1e-5, atol=1e-6)
    else:
        assert not any("entropy" in fields for fields in step["rows"].values())
    assert step["metrics"]["actor/grad_norm"] == pytest.approx(by_hand["grad_norm"], rel=1e-5)
    for name, parameter in by_hand["parameters"].items():
        torch.testing.assert_close(step["parameters"][name], parameter, rtol=0, atol=5e-7)


@pytest.mark.parametrize("split", SPLITS)
def test_the_metrics_are_the_same_wherever_the_entropy_comes_from(steps, split):
    old, new = ({k: v for k, v in steps[mode, split]["metrics"].items() if "gtpo/" in k} for mode in one_step.MODES)
    assert old.keys() == new.keys() and "gtpo/entropy/initial" in old
    assert new == pytest.approx(old, rel=1e-5)


def test_the_step_has_all_that_a_split_could_get_wrong(steps, by_hand):
    """Conflict tokens, a filtered completion, a clipped gradient, and steps far larger than the tolerance."""
    assert steps["old_log_prob", "one process"]["in_update"] == one_step.ROWS_IN_UPDATE > len(by_hand["advantages"])
    metrics = steps["old_log_prob", "one process"]["metrics"]
    assert 0.1 < metrics["gtpo/conflict/token_frac"] < 0.9
    assert 0 < metrics["gtpo/filter/dropped_frac"] < 0.5
    assert metrics["gtpo/group/size_min"] == one_process.N - 1
    assert metrics["actor/grad_norm"] > one_process.MAX_GRAD_NORM
    largest = max((by_hand["parameters"][name] - start).abs().max() for name, start in by_hand["start"].items())
    assert largest > 0.01
