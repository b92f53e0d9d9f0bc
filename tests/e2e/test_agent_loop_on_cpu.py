"""A tool-calling agent loop in verl's trainer: holes in the mask, several outputs per session, a failed session."""

import json
import re
from collections import Counter

import pytest
import reference
from transformers import AutoTokenizer

from gtpo_verl import GTPOConfig

pytestmark = pytest.mark.e2e


def test_a_tools_tokens_earlier_outputs_and_a_failed_session_count_for_nothing(train, task, tmp_path):
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: calculator\n  _target_: calculator.CalculatorLoop\n")
    result = train(
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=calculator",
        f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}",
        "+algorithm.gtpo.dump_freq=1",
        options=(),  # with --stall the run would end where a session fails
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"GTPO: .* 28 outputs in 14 sessions", result.stdout)

    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    initial = train.records()[0]["gtpo/entropy/initial"]
    for record in train.records():
        rows = [json.loads(x) for x in (tmp_path / f"dump/step_{record['step']:06d}.jsonl").read_text().splitlines()]
        ids, masks, uids, entropy = (
            [row[name] for row in rows] for name in ("token_ids", "response_mask", "uid", "entropy")
        )
        # Of each session the answer alone, and in it some tokens of the tool.
        assert sorted(Counter(uids).values()) == [7, 7] and record["gtpo/group/size_min"] == 7
        assert not any("?" in tokenizer.decode(row["prompt_ids"]) for row in rows)
        assert sum(0 in mask for mask in masks) > 8
        for row in rows:
            for token, own, advantage in zip(row["token_ids"], row["response_mask"], row["advantages"], strict=True):
                assert own or (tokenizer.decode([token]).isdigit() and advantage == 0)

        of = {"rewards": [row["reward"] for row in rows], "index": uids, "responses": ids, "entropy": entropy}
        of |= {"config": GTPOConfig(), "initial_entropy": initial, "norm_by_std": True, "epsilon": 1e-6}
        by_definition = reference.advantages(response_mask=masks, **of)
        for row, advantages in zip(rows, by_definition, strict=True):
            assert row["advantages"] == pytest.approx(advantages, abs=2e-3)
        assert by_definition != reference.advantages(response_mask=[[1] * len(mask) for mask in masks], **of)
        conflicts = reference.conflict_mask(ids, masks, [row["group_advantage"] for row in rows], uids, "leading")
        own_tokens = sum(map(sum, masks))
        assert record["gtpo/conflict/token_frac"] == pytest.approx(sum(map(sum, conflicts)) / own_tokens)
        trajectory_entropy = [row["trajectory_entropy"] for row in rows]
        assert record["gtpo/entropy/mean"] == pytest.approx(sum(trajectory_entropy) / len(rows))
