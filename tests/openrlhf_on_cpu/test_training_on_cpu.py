"""GTPO in OpenRLHF's own trainer: every advantage that reaches its loss; `bash scripts/check_openrlhf.sh` runs it."""

import asyncio
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from compare import compare
from datasets import Dataset
from packaging.version import Version
from runs import GROUP, OPENRLHF, PROMPTS, ROOT, command, environment, train
from transformers import AutoTokenizer

from gtpo_verl import GTPOConfig
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics
from gtpo_verl.run.initial_entropy import InitialEntropy

# Rounding of float32 through OpenRLHF's own arithmetic; a conflict or a filter decision is off by 0.1 and more.
ADVANTAGE_TOLERANCE = 1e-5
# bfloat16, whose spacing at logits of 16 is 1/8: batches with padding against single rows, vLLM's kernels against
# transformers'. Wrong weights are off by 15.
LOG_PROB_TOLERANCE, ENTROPY_TOLERANCE = 0.3, 0.1
# A random policy may start above ln 2, where `auto` drops nothing.
ALWAYS_FILTERS = {"completion_filter": "always"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    tiny.write(folder)
    return folder


@pytest.fixture(scope="module")
def trained(task, tmp_path_factory):
    """Runs of GTPO that drop completions, by their number of ranks, with a checkpoint of each step."""
    runs = {}
    settings = {"ckpt__save_steps": 1, "algo.gtpo": json.dumps(ALWAYS_FILTERS)}

    def with_ranks(ranks):
        if ranks not in runs:
            runs[ranks] = train(task, tmp_path_factory.mktemp("gtpo"), "gtpo", ranks=ranks, **settings)
        return runs[ranks]

    return with_ranks


def assert_same(found):
    print(found)
    assert found.weights, "an update starts from other weights than those that the last one left"
    assert found.log_prob < LOG_PROB_TOLERANCE
    assert found.entropy < ENTROPY_TOLERANCE
    assert found.advantage < ADVANTAGE_TOLERANCE


@pytest.mark.parametrize("ranks", [1, 2])
def test_group_norm_is_openrlhfs_own(task, tmp_path, ranks):
    run = train(task, tmp_path, "group_norm", ranks=ranks, steps=2)
    assert_same(compare(run, task / "model")[0])
    assert run.metrics and not any(name.startswith("gtpo/") for step in run.metrics.values() for name in step)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_advantage_in_the_loss_is_gtpos(task, trained, ranks):
    run = trained(ranks)
    found, results, initial_entropy = compare(run, task / "model", GTPOConfig(**ALWAYS_FILTERS))
    assert_same(found)
    assert found.conflict_tokens > 100 and 0 < found.dropped < found.completions, "nothing to see"
    record = InitialEntropy.load(run.out / "checkpoints")
    assert record.value == pytest.approx(initial_entropy, abs=1e-5)
    assert (record.completions, record.prompts) == (PROMPTS * GROUP, PROMPTS)
    assert_metrics_are_logged(run, results, GTPOConfig(**ALWAYS_FILTERS), initial_entropy)


def assert_metrics_are_logged(run, results, config, initial_entropy):
    cut = torch.tensor([content["truncated"] for _, _, content in run.recorded("rollout")]).view(len(results), -1)
    for logged, result, truncated in zip(run.metrics.values(), results, cut, strict=True):
        of_gtpo = {name: value for name, value in logged.items() if name.startswith("gtpo/")}
        expected = compute_gtpo_metrics(result, config, initial_entropy, truncated)
        assert of_gtpo == pytest.approx(expected, abs=1e-4)


def test_resumed_run_keeps_the_initial_entropy_and_takes_other_settings(task, trained, tmp_path):
    first = trained(1)
    *_, initial_entropy = compare(first, task / "model", GTPOConfig(**ALWAYS_FILTERS))
    settings = {"entropy_coeff": 0.5, "conflict_span": "all"}
    goes_on = {"ckpt__path": first.out / "checkpoints", "ckpt__load_enable": True, "train__num_episodes": 2}
    temperature = 1.5 if OPENRLHF >= Version("0.11.1") else 1.0  # before, there is no entropy of another
    changes = {"algo.gtpo": json.dumps(settings), "rollout__temperature": temperature}
    resumed = train(task, tmp_path, "gtpo", **goes_on, **changes)
    config = GTPOConfig(**settings)
    again, results, _ = compare(resumed, task / "model", config, initial_entropy, temperature)
    assert_same(again)
    # Trained at this rate, completions may have equal rewards: no conflicts, but the regularizer.
    assert all(result.regularizer.max() > 1e-3 for result in results), "nothing to see"
    last, start = first.recorded("after")[-1][2]["weights"], resumed.recorded("before")[0][2]["weights"]
    assert all((last[name] == start[name]).all() for name in last), "the run did not go on from its checkpoint"
    steps = first.metrics | resumed.metrics
    assert list(first.metrics) == [1, 2, 3] and list(steps) == [1, 2, 3, 4, 5, 6]
    assert len({step["gtpo/entropy/initial"] for step in steps.values()}) == 1
    assert_metrics_are_logged(resumed, results, config, initial_entropy)
    assert "algo.gtpo.entropy_coeff=0.5, was 0.1" in (resumed.out / "log").read_text()


def test_comparison_rejects_weights_that_do_not_arrive_and_tokens_shifted_by_one(task, tmp_path):
    """Two mistakes in one run, each seen in a number that the other leaves alone."""
    run = train(task, tmp_path, "gtpo", broken="sync,tokens")
    found, *_ = compare(run, task / "model", GTPOConfig())
    print(found)
    assert found.log_prob > 10 * LOG_PROB_TOLERANCE
    assert found.advantage > 0.1


def test_wrong_setting_is_an_error_before_ray_starts(task, tmp_path):
    words = command(task, tmp_path, "gtpo", **{"algo.gtpo": '{"entropy_coef": 1}'})
    del words[2]  # the stand-ins, which start Ray
    done = subprocess.run(words, env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].endswith("did you mean entropy_coeff?")


# In place of `python3 -m gtpo_verl openrlhf`: OpenRLHF's own parser and checks, up to the start of Ray; of the recipe's
# look at the data nothing, and two GPUs.
PARSES = """
import sys
if sys.argv[1] == "-c":
    sys.exit(print(2))
if sys.argv[2] == "recipes":
    sys.exit()
import ray
from gtpo_verl.openrlhf.command import main
del sys.argv[1:4]
ray.init = lambda **settings: sys.exit("Ray would start")
main()
"""


@pytest.mark.skipif(OPENRLHF != Version("0.11.2"), reason="the recipe is for this one")
@pytest.mark.parametrize(
    "algo, more, last_line",
    [
        ("gtpo", [], "Ray would start"),
        ("grpo", [], "Ray would start"),
        ("gtpo", ["--algo.kl.init_coef", "0.5"], r"gtpo-verl openrlhf: --algo\.kl\.init_coef 0\.5: .*KL"),
        ("grpo", ["--algo.kl.coef", "0.5"], r"train_ppo_ray\.py: error: .*: --algo\.kl\.coef 0\.5"),
    ],
)
def test_openrlhf_takes_every_option_of_the_recipe(algo, more, last_line, tmp_path):
    (tmp_path / "train.parquet").touch()
    (tmp_path / "python3").write_text(f"#!{sys.executable}\n{PARSES}")
    (tmp_path / "python3").chmod(0o755)
    variables = environment(ALGO=algo, DATA_DIR=str(tmp_path), PATH=f"{tmp_path}:{os.environ['PATH']}")
    words = ["bash", ROOT / "recipes/run_gtpo_openrlhf.sh", *more]
    done = subprocess.run(words, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert re.match(last_line, done.stderr.splitlines()[-1])


@pytest.mark.skipif(OPENRLHF != Version("0.11.2"), reason="the recipe is for this one")
def test_openrlhf_reads_the_papers_data_and_reward_as_the_recipe_has_them(task, tmp_path):
    from openrlhf.datasets import PromptDataset
    from openrlhf.datasets.utils import blending_datasets
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    chat = [{"role": "user", "content": "1+1?"}]
    row = {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "2"}}
    Dataset.from_list([row]).to_parquet(tmp_path / "train.parquet")
    options = SimpleNamespace(input_key="prompt", label_key="reward_model", apply_chat_template=True)
    strategy = SimpleNamespace(args=SimpleNamespace(data=options), is_rank_0=lambda: True, print=print)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    tokenizer.chat_template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}="
    rows = PromptDataset(blending_datasets(f"{tmp_path}/train.parquet", strategy=strategy), tokenizer, strategy)
    _, prompt, label, _ = rows[0]
    assert prompt == "<user>1+1?="

    class Engine:
        async def generate(self, *args, **kwargs):
            tokens = tokenizer("<reasoning>one</reasoning><answer>2</answer>")["input_ids"]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, finish_reason="stop", logprobs=None)])

    executor = SingleTurnAgentExecutor([str(ROOT / "gtpo_verl/openrlhf/reward.py")])
    sampling = SimpleNamespace(max_tokens=64, logprobs=None)
    completion = asyncio.run(executor.execute(prompt, label, sampling, 128, tokenizer, Engine()))
    assert (completion["reward"], completion["scores"]) == (20, 1)
    assert completion["extra_logs"]["format"] == 10
