"""The rules of `examples/token_weights.py` in verl's real trainer, for two steps each."""

import json
from itertools import groupby

import pytest
import torch

from examples import token_weights

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def rows_of_group(rows, name):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)


def weights_of(rule, rows):
    """λ of a step's completions, by the same function on what the dump has of them."""
    groups = torch.tensor([sorted({row["uid"] for row in rows}).index(row["uid"]) for row in rows])
    fields = {"response_mask": rows_of_group(rows, "response_mask").bool()}
    if rule == "highest_entropy":
        return token_weights.highest_entropy(**fields, entropy=rows_of_group(rows, "entropy"))
    fields |= {"responses": rows_of_group(rows, "token_ids"), "groups": groups}
    if rule == "lambda_grpo":
        return token_weights.lambda_grpo(**fields)
    return token_weights.shared_beginning(**fields, advantages=torch.tensor([row["group_advantage"] for row in rows]))


@pytest.mark.parametrize(
    ("rule", "entropy_from"),
    [
        ("lambda_grpo", "old_log_prob"),
        ("highest_entropy", "old_log_prob"),
        ("shared_beginning", "old_log_prob"),
    ],
)
def test_a_run_is_trained_with_the_rules_weights(train, tmp_path, rule, entropy_from):
    result = train(
        f"++algorithm.gtpo.token_weights=pkg://examples.token_weights.{rule}",
        "++algorithm.gtpo.completion_filter=never",
        f"++algorithm.gtpo.entropy_from={entropy_from}",
        f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}",
        "++algorithm.gtpo.dump_freq=1",
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "token_weights" in result.stdout and "Eq. 9" in result.stdout
    for record in train.records():
        assert record["gtpo/lambda/mean"] > 0 and "gtpo/conflict/token_frac" not in record
        assert record["actor/grad_norm"] > 0

    is_weighed = False
    for path in sorted((tmp_path / "dump").glob("step_*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        weights = weights_of(rule, rows)
        assert [key for key, _ in groupby(row["uid"] for row in rows)] == list(dict.fromkeys(r["uid"] for r in rows))
        for row, of_row in zip(rows, weights, strict=True):
            own = torch.tensor(row["response_mask"]).bool()
            dumped = torch.tensor(row["lambda"])[own]
            # The dump rounds entropies to four decimals, by which two tokens may change places.
            assert ((dumped - of_row[: len(own)][own]).abs() > 1e-4).float().mean() <= 0.05
            advantage = row["group_advantage"] - 0.1 * row["trajectory_entropy"]
            torch.testing.assert_close(torch.tensor(row["advantages"])[own], advantage * dumped, rtol=1e-3, atol=3e-4)
            is_weighed = is_weighed or bool((dumped != 1).any())
    assert is_weighed
