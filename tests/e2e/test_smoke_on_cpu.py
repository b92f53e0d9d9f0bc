"""`SMOKE=1` on CPU: a recipe as it is, LoRA adapters sent to vLLM unmerged, saved, resumed, evaluated, exported."""

import importlib.util
import json
import re

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="bash scripts/setup_cpu.sh vllm installs vLLM")
def test_a_smoke_run_trains_an_adapter_and_finds_that_everything_works(task, run_recipe, tmp_path):
    variables = {
        "SMOKE": "1",
        "SMOKE_MODEL": str(task / "model"),
        "DATA_DIR": str(task),
        "OUT": str(tmp_path / "run"),
        "LORA_RANK": "8",
        "SAVE_LORA_ONLY": "True",
        # Rollouts from the base would differ from the actor at once.
        "ACTOR_LR": "0.1",
        "MAX_PROMPT_LENGTH": "16",
        "PPO_MAX_TOKEN_LEN_PER_GPU": "512",
    }
    status, output = run_recipe("run_gtpo_llama", **variables)
    out = tmp_path / "run_smoke"
    assert status == 0, output[-6000:]
    assert output.count("| ok |") == 6
    assert re.search(r"[\d.]+ s per step .*run of \d+ steps .*[\d.]+ hours", output)

    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # At this learning rate all completions are soon equally bad.
    assert all(step["actor/grad_norm"] > 0 for step in steps[:2])
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 0.01
    assert all(step["gtpo/group/size_min"] == 8 and 0 <= step["gtpo/conflict/token_frac"] <= 1 for step in steps)
    rows = [json.loads(line) for line in (out / "evaluation/arithmetic.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and len({row["input"] for row in rows}) == 4
    adapter = out / "exported"
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 8
    weights = load_file(adapter / "adapter_model.safetensors")
    assert max(weight.abs().max() for name, weight in weights.items() if "lora_B" in name) > 0.1
