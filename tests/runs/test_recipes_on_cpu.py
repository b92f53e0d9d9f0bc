"""The recipes run here against a python3 that only notes its arguments; these are then composed with verl's schema."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import torch
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from gtpo_verl.cli import main
from gtpo_verl.paper.data import DATASETS, load_splits, make_rows, make_sft_rows, write_parquet
from gtpo_verl.paper.evaluation import parse_dump_argument
from gtpo_verl.paper.reward import compute_score
from gtpo_verl.runs.run_folder import overrides
from gtpo_verl.verl_plugin import preflight
from gtpo_verl.verl_plugin.config import VerlGTPOConfig

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ("run_gtpo_qwen", "run_gtpo_llama", "run_gtpo_qwen_fsdp2_multinode", "run_gtpo_qwen_megatron")
# Any two settings of a run meet in one of these.
PAIRWISE = [
    ("gtpo", "0", "run_gtpo_qwen", "gsm8k", "lora"),
    ("gtpo", "0", "run_gtpo_llama", "math", "full"),
    ("grpo", "0", "run_gtpo_qwen", "math", "full"),
    ("grpo", "0", "run_gtpo_llama", "gsm8k", "lora"),
    ("grpo", "1e-6", "run_gtpo_qwen", "gsm8k", "full"),
    ("grpo", "1e-6", "run_gtpo_llama", "math", "lora"),
    ("grpo", "0.04", "run_gtpo_qwen", "math", "lora"),
    ("grpo", "0.04", "run_gtpo_llama", "gsm8k", "full"),
]
VERLS_OWN = ["--config-path", str(Path(verl.trainer.__path__[0], "config")), "--config-name", "ppo_trainer"]

FAKE_PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
if sys.argv[1] == "-c":  # GPUs of this machine, attention that is installed
    print(os.environ.get("FAKE_MACHINE", "2 flash_attention_2"))
    sys.exit()
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
if "initial-entropy" in sys.argv:
    print("initial_entropy=0.412300")
if "export" in sys.argv:
    adapter = pathlib.Path(sys.argv[-1])
    adapter.mkdir(exist_ok=True)
    config = {{"base_model_name_or_path": "the/base", "bias": "none", "r": 16, "lora_alpha": 32}}
    (adapter / "adapter_config.json").write_text(json.dumps(config, indent=1))
"""


@pytest.fixture
def call(tmp_path):
    """Run a recipe with these variables and arguments; the arguments of every python3 it started."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "python3").write_text(FAKE_PYTHON)
    (bin_dir / "python3").chmod(0o755)

    def run(script: str, *args: str, **variables: str) -> list[list[str]]:
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        inherited = {key: os.environ[key] for key in ("HOME", "LANG") if key in os.environ}
        env = {
            **inherited,
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "CALLS": str(calls),
            "OUT": str(tmp_path / "out"),
            **variables,
        }
        command = ["bash", str(ROOT / "recipes" / f"{script}.sh"), *args]
        finished = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert finished.returncode == 0, finished.stderr[-2000:]
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run


@pytest.fixture
def composed(call):
    """Run a recipe; the config that verl's trainer would get from it."""

    def run(script: str, *args: str, **variables: str) -> DictConfig:
        return compose_call(call(script, *args, **variables)[-1])

    return run


def compose_call(arguments: list[str]) -> DictConfig:
    folder, name = (arguments[arguments.index(option) + 1] for option in ("--config-path", "--config-name"))
    with initialize_config_dir(folder, version_base=None):
        return compose(name, overrides=arguments[arguments.index("--config-name") + 2 :])


def assert_papers(config):
    """One prompt a step, as in the paper, is few to measure ⟨H⟩_ini on, which is told."""
    assert {x.setting for x in preflight.departures(config)} <= {"algorithm.gtpo.initial_entropy"}


def check_against_verl(config: DictConfig) -> None:
    OmegaConf.resolve(config)
    config.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl asks an installed vLLM for its largest rank
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    for section in ("actor", "rollout"):
        omega_conf_to_dataclass(config.actor_rollout_ref[section])


def check_paper_settings(config: DictConfig, algo: str, kl_beta: str = "0") -> None:
    actor, rollout, optim = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.actor_rollout_ref.actor.optim,
    )
    assert config.algorithm.adv_estimator == algo
    assert actor.policy_loss.loss_mode == {"gtpo": "gtpo", "grpo": "vanilla"}[algo]
    assert actor.loss_agg_mode == "seq-mean-token-mean"
    assert actor.use_kl_loss is need_reference_policy(config) is (kl_beta != "0")
    assert actor.kl_loss_coef == float(kl_beta)
    assert not config.algorithm.use_kl_in_reward
    assert (config.data.max_prompt_length, config.data.max_response_length) == (4000, 1500)
    assert (optim.lr, optim.lr_warmup_steps_ratio, optim.weight_decay, optim.clip_grad) == (1e-6, 0.005, 0.1, 0.1)
    assert (actor.ppo_epochs, actor.ppo_mini_batch_size) == (1, config.data.train_batch_size)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert rollout.gpu_memory_utilization == (0.6 if actor.strategy == "megatron" else 0.4)
    assert {config.seed, config.data.seed, actor.data_loader_seed, rollout.seed} == {3407}
    # Listing 1's 500, where a step is the paper's; an epoch of 64 prompts a step has 116 steps.
    assert (config.trainer.total_epochs, config.trainer.save_freq) == (
        1,
        500 if config.data.train_batch_size == 1 else 20,
    )
    assert config.trainer.max_actor_ckpt_to_keep == 2
    assert config.reward.custom_reward_function.path == "pkg://gtpo_verl.paper.reward"
    if algo == "gtpo":
        preflight.validate(config)
        assert VerlGTPOConfig.from_config(config.algorithm) == VerlGTPOConfig()
        assert_papers(config)


@pytest.mark.parametrize(("algo", "kl_beta", "script", "dataset", "finetune"), PAIRWISE)
def test_each_recipe_dataset_and_algorithm_is_the_papers(composed, algo, kl_beta, script, dataset, finetune):
    model, rank = {"run_gtpo_qwen": ("Qwen2.5-3B", 64), "run_gtpo_llama": ("Llama-3.1-8B", 128)}[script]
    config = composed(
        script, DATASET=dataset, ALGO=algo, KL_LOSS_COEF=kl_beta, ROLLOUT_N="12", FINETUNE=finetune, BETAS="paper"
    )
    check_paper_settings(config, algo, kl_beta)
    model_config, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    assert config.actor_rollout_ref.rollout.n == 12
    assert config.data.train_batch_size == 1
    assert Path(config.data.train_files).parent.name == Path(config.data.val_files).parent.name == dataset
    assert model in model_config.path
    assert model_config.lora_rank == (rank if finetune == "lora" else 0)
    assert (config.actor_rollout_ref.rollout.load_format == "safetensors") is (finetune == "lora")
    if finetune == "lora":
        assert len(model_config.target_modules) == 7
    betas = [0.999999, 0.999999] if algo == "gtpo" else [0.9, 0.95]
    assert (actor.strategy, actor.optim.lr_scheduler_type, actor.optim.betas) == ("fsdp2", "cosine", betas)
    check_against_verl(config)


@pytest.mark.parametrize("script", TRAINING)
def test_a_grpo_twin_differs_in_estimator_loss_and_name_alone(composed, script):
    twins = [flat(composed(script, ALGO=algo)) for algo in ("gtpo", "grpo")]
    different = {key for key in twins[0] if twins[0][key] != twins[1][key]}
    assert twins[0].keys() == twins[1].keys()
    assert different == {
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "trainer.experiment_name",
        "actor_rollout_ref.rollout.trace.experiment_name",
    }


def flat(config: DictConfig, prefix: str = "") -> dict:
    values = {}
    for key, value in OmegaConf.to_container(config, resolve=True).items() if prefix == "" else config.items():
        if isinstance(value, dict) and value:
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[f"{prefix}{key}"] = value
    return values


@pytest.mark.parametrize("algo", ["gtpo", "grpo"])
def test_the_multinode_recipe_fits_verl(composed, algo):
    config = composed("run_gtpo_qwen_fsdp2_multinode", ALGO=algo)
    check_paper_settings(config, algo)
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    assert config.actor_rollout_ref.model.lora_rank == 0
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    check_against_verl(config)


@pytest.mark.parametrize("algo", ["gtpo", "grpo"])
def test_the_megatron_recipe_fits_verls_schema(composed, algo):
    config = composed("run_gtpo_qwen_megatron", ALGO=algo, BETAS="paper")
    check_paper_settings(config, algo)
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.optim.lr_decay_style) == ("megatron", "cosine")
    beta1, beta2 = (0.999999, 0.999999) if algo == "gtpo" else (0.9, 0.95)
    assert actor.optim.override_optimizer_config == {"adam_beta1": beta1, "adam_beta2": beta2}
    assert actor.megatron.override_transformer_config.recompute_granularity == "full"
    check_against_verl(config)


def test_the_yaml_states_the_defaults_of_gtpo(composed):
    assert VerlGTPOConfig(**composed("run_gtpo_qwen").algorithm.gtpo) == VerlGTPOConfig()


def test_betas_are_equal_for_both_algorithms_unless_the_papers_are_asked_for(composed):
    betas = [composed("run_gtpo_qwen", ALGO=algo).actor_rollout_ref.actor.optim.betas for algo in ("gtpo", "grpo")]
    assert betas == [[0.9, 0.95], [0.9, 0.95]]


def test_a_users_override_comes_last(composed):
    config = composed("run_gtpo_qwen", "data.max_response_length=7", "actor_rollout_ref.rollout.name=sglang")
    assert (config.data.max_response_length, config.actor_rollout_ref.rollout.name) == (7, "sglang")


def test_paths_do_not_depend_on_where_a_recipe_or_a_ray_worker_starts(composed):
    config = composed("run_gtpo_qwen")
    paths = (config.data.train_files, config.data.val_files, config.trainer.default_local_dir)
    assert all(Path(path).is_absolute() for path in paths)


def test_missing_data_is_made_and_present_data_is_not(call, tmp_path):
    _, made, _ = call("run_gtpo_qwen", DATASET="math", DATA_DIR=str(tmp_path / "data"))
    assert made == ["-m", "gtpo_verl", "data", "--dataset", "math", "--out", str(tmp_path / "data")]
    (tmp_path / "data").mkdir()
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / "data" / name).touch()
    _, seen, _ = call("run_gtpo_qwen", DATASET="math", DATA_DIR=str(tmp_path / "data"))
    files = [str(tmp_path / "data" / name) for name in ("train.parquet", "test.parquet")]
    assert seen == ["-m", "gtpo_verl", "data", "--dataset", "math", "--holds", *files]


@pytest.mark.parametrize("label", ["Qwen/GTPO", "Qwen/GSM8K/GRPO beta=0.04", "a/b/c/d/e", "a//c"])
def test_a_label_that_the_table_cannot_take_is_an_error_before_anything_is_sampled(call, tmp_path, label):
    with pytest.raises(AssertionError, match=f"LABEL={label}: write METHOD"):
        call("evaluate", "the/model", LABEL=label)
    assert not (tmp_path / "calls").exists()


def test_data_of_another_name_are_not_trained_on(tmp_path, capsys):
    sources = {"math": "MATH", "mine": "my own"}
    for name, source in sources.items():
        datasets.Dataset.from_list([{"data_source": source}]).to_parquet(tmp_path / name)
    datasets.Dataset.from_list([{"messages": "of run_sft.sh"}]).to_parquet(tmp_path / "sft")
    (tmp_path / "half").write_bytes(b"PAR1")
    holds = ["data", "--dataset", "gsm8k", "--holds"]
    assert main([*holds, str(tmp_path / "mine"), str(tmp_path / "sft")]) == 0
    assert main([*holds, str(tmp_path / "math")]) == 2
    assert f"{tmp_path / 'math'} holds math, not gsm8k: set DATASET" in capsys.readouterr().err
    assert main([*holds, str(tmp_path / "half")]) == 2
    assert f"{tmp_path / 'half'} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("script", [*TRAINING, "run_sft"])
def test_a_recipe_checks_the_machine_first_and_trains_through_the_launcher_last(call, tmp_path, script):
    check, *_, launched = call(script)
    assert launched[:6] == ["-m", "gtpo_verl", "run", "--out", str(tmp_path / "out"), "--"]
    assert check == ["-m", "gtpo_verl", "check", *launched[5:]]


@pytest.mark.parametrize(("batch", "rollout_n", "gpus"), [("1", "8", "2"), ("1", "9", "1"), ("4", "9", "6")])
def test_a_recipe_takes_the_most_gpus_over_which_its_completions_split_evenly(call, batch, rollout_n, gpus):
    machine = {"TRAIN_BATCH_SIZE": batch, "ROLLOUT_N": rollout_n, "FAKE_MACHINE": "7 flash_attention_2"}
    assert overrides(call("run_gtpo_qwen", **machine)[-1])["trainer.n_gpus_per_node"] == gpus
    assert overrides(call("run_gtpo_qwen", **machine, NGPUS_PER_NODE="1")[-1])["trainer.n_gpus_per_node"] == "1"


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_a_recipe_takes_the_attention_that_is_installed(call, attention):
    given = overrides(call("run_gtpo_qwen", FAKE_MACHINE=f"2 {attention}")[-1])
    assert given["actor_rollout_ref.model.override_config.attn_implementation"] == attention


def test_verls_variables_reach_their_keys(composed):
    config = composed(
        "run_gtpo_qwen",
        ACTOR_LR="3e-6",
        TRAIN_BATCH_SIZE="4",
        PPO_MINI_BATCH_SIZE="2",
        ROLLOUT_GPU_MEM_UTIL="0.6",
        INFER_BACKEND="sglang",
        PROJECT_NAME="mine",
        SAVE_FREQ="7",
        TEST_FREQ="9",
        TOTAL_EPOCHS="3",
        ROLLOUT_DUMP="/dump",
        KEEP="null",
        SAVE_LORA_ONLY="True",
    )
    actor, rollout, trainer = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer
    assert (actor.optim.lr, actor.ppo_mini_batch_size, actor.checkpoint.save_lora_only) == (3e-6, 2, True)
    assert (rollout.gpu_memory_utilization, rollout.name, rollout.agent.num_workers) == (0.6, "sglang", 4)
    assert (trainer.project_name, trainer.save_freq, trainer.test_freq, trainer.total_epochs) == ("mine", 7, 9, 3)
    assert (trainer.rollout_data_dir, trainer.max_actor_ckpt_to_keep) == ("/dump", None)


def test_one_prompt_a_step_asks_for_few_workers(composed):
    config = composed("run_gtpo_qwen")
    assert config.transfer_queue.backend.SimpleStorage.num_data_storage_units == 2
    assert (config.actor_rollout_ref.rollout.agent.num_workers, config.reward.num_workers) == (1, 2)
    assert config.data.dataloader_num_workers == 1


def test_many_prompts_a_step_get_the_workers_that_verl_gives_them(composed):
    config, verls = composed("run_gtpo_qwen", TRAIN_BATCH_SIZE="64"), compose_call(VERLS_OWN)
    for key in (
        "transfer_queue.backend.SimpleStorage.num_data_storage_units",
        "actor_rollout_ref.rollout.agent.num_workers",
        "reward.num_workers",
        "data.dataloader_num_workers",
    ):
        assert OmegaConf.select(config, key) == OmegaConf.select(verls, key) is not None


@pytest.mark.parametrize(
    ("script", "gpus", "sleeps"),
    [("run_gtpo_llama", 1, True), ("run_gtpo_llama", 2, False), ("run_gtpo_qwen", 1, False)],
)
def test_vllm_sleeps_in_every_step_only_where_the_memory_is_short(composed, script, gpus, sleeps):
    config = composed(script, FAKE_MACHINE=f"{gpus} flash_attention_2")
    assert config.actor_rollout_ref.rollout.free_cache_engine is sleeps


def test_a_recipe_on_a_machine_without_accelerator_has_the_settings_of_the_cpu_recipe(composed):
    config = composed("run_gtpo_llama", VERL_PLATFORM="cpu")
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        cpu = compose("gtpo_cpu", overrides=["task_dir=/nowhere"])
    machine = OmegaConf.load(ROOT / "recipes/config/machine/cpu.yaml")
    machine = flat(OmegaConf.merge(machine, {"trainer": {"n_gpus_per_node": 1}}))
    assert len(machine) > 15
    for key in machine:
        assert OmegaConf.select(config, key) == OmegaConf.select(cpu, key), key
    check_against_verl(config)


def test_the_strict_initial_entropy_is_measured_on_the_untrained_model_and_given_to_the_run(call):
    *_, measured, trained = call("run_gtpo_qwen", STRICT_INITIAL_ENTROPY="1", MODEL_PATH="a/model")
    assert measured[:5] == ["-m", "gtpo_verl", "initial-entropy", "--model", "a/model"]
    assert measured[measured.index("--samples") + 1] == "100"
    config = compose_call(trained)
    assert measured[measured.index("--data") + 1] == config.data.train_files
    assert config.algorithm.gtpo.initial_entropy == 0.4123


def test_the_strict_initial_entropy_is_that_of_the_overrides(call):
    changes = (
        "actor_rollout_ref.model.path=my/model",
        "data.train_files=/mine",
        "data.max_response_length=7",
        "seed=5",
    )
    *_, measured, _ = call("run_gtpo_qwen", *changes, STRICT_INITIAL_ENTROPY="1")
    options = dict(zip(measured[3::2], measured[4::2], strict=True))
    assert options == {
        "--model": "my/model",
        "--data": "/mine",
        "--samples": "100",
        "--seed": "5",
        "--max-response-length": "7",
    }
    *_, before, trained = call("run_gtpo_qwen", "algorithm.gtpo.initial_entropy=0.2", STRICT_INITIAL_ENTROPY="1")
    assert "initial-entropy" not in before
    assert compose_call(trained).algorithm.gtpo.initial_entropy == 0.2


def test_the_entropy_from_the_update_comes_without_the_old_log_prob_pass_and_with_its_initial_entropy(call):
    check, *_, measured, trained = call("run_gtpo_qwen", ENTROPY_FROM="update")
    preflight.validate(compose_call(check[4:]))  # before the value is measured
    config = compose_call(trained)
    assert "initial-entropy" in measured and config.algorithm.gtpo.initial_entropy == 0.4123
    assert config.algorithm.gtpo.entropy_from == "update" and config.algorithm.rollout_correction.bypass_mode
    preflight.validate(config)
    check_against_verl(config)


@pytest.mark.parametrize(
    ("overrides", "variables"),
    [
        (["algorithm.gtpo.initial_entropy=0.2"], {}),
        (["algorithm.gtpo.completion_filter=never"], {}),
        ([], {"ALGO": "grpo"}),  # whose twin has bypass mode too
    ],
)
def test_the_initial_entropy_is_not_measured_where_the_update_can_do_without(call, overrides, variables):
    *_, before, trained = call("run_gtpo_qwen", *overrides, ENTROPY_FROM="update", **variables)
    assert "initial-entropy" not in before
    config = compose_call(trained)
    assert config.algorithm.rollout_correction.bypass_mode
    preflight.validate(config)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ALGO": "ppo"}, "ALGO=ppo: must be gtpo or grpo"),
        ({"KL_LOSS_COEF": "0.04"}, "KL_LOSS_COEF=0.04: GTPO has no KL term"),
        ({"FINETUNE": "some"}, "FINETUNE=some: must be lora or full"),
        ({"BETAS": "0.9"}, "BETAS=0.9: must be default or paper"),
        ({"ENTROPY_FROM": "rollout"}, "ENTROPY_FROM=rollout: must be old_log_prob or update"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_starts(call, tmp_path, variables, message):
    with pytest.raises(AssertionError, match=message):
        call("run_gtpo_qwen", **variables)
    assert not (tmp_path / "calls").exists()


# ---------------------------------------------------------------- ablations


def ablations() -> list[str]:
    listed = subprocess.run(["bash", str(ROOT / "recipes/ablations.sh")], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()[1:]]


@pytest.mark.parametrize("name", ablations())
def test_each_listed_ablation_fits_verl_and_has_a_name_of_its_own(composed, name):
    config = composed("ablations", name)
    assert f"_{name}_" in config.trainer.experiment_name
    if config.algorithm.adv_estimator == "gtpo":
        preflight.validate(config)
        assert_papers(config)
    check_against_verl(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conflict_only", {"entropy_coeff": 0, "completion_filter": "never"}),
        ("gamma_1e-6", {"entropy_coeff": 1e-6}),
        ("no_filter", {"completion_filter": "never"}),
        ("threshold_1.05", {"completion_filter": "always", "entropy_threshold": 1.05}),
        ("only_negative_2.0", {"completion_filter": "always", "filter_scope": "negative", "entropy_threshold": 2.0}),
        ("grpo_entropy_control", {"conflict_span": "none", "completion_filter": "always", "entropy_threshold": 1.05}),
        ("span_all", {"conflict_span": "all"}),
    ],
)
def test_an_ablation_changes_what_it_names_and_nothing_else(composed, name, expected):
    assert VerlGTPOConfig.from_config(composed("ablations", name).algorithm) == VerlGTPOConfig(**expected)


def test_ablations_of_grpo_change_its_beta_or_adams_betas(composed):
    assert composed("ablations", "kl_0.04").actor_rollout_ref.actor.kl_loss_coef == 0.04
    assert composed("ablations", "kl_1e-6").algorithm.adv_estimator == "grpo"
    assert composed("ablations", "betas_paper").actor_rollout_ref.actor.optim.betas == [0.999999, 0.999999]
    assert composed("ablations", "group_12").actor_rollout_ref.rollout.n == 12


def test_an_ablation_takes_another_model_and_dataset(composed):
    config = composed("ablations", "kl_0.04", MODEL="qwen", DATASET="math")
    assert "Qwen" in config.actor_rollout_ref.model.path
    assert Path(config.data.train_files).parent.name == "math"


def test_an_unknown_ablation_is_an_error(call):
    with pytest.raises(AssertionError, match="gama_0.1: there is no such ablation"):
        call("ablations", "gama_0.1")


# ---------------------------------------------------------------- SFT and evaluation


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_the_sft_recipe_is_the_papers(call, finetune):
    _, made, trained = call("run_sft", DATASET="math", DATA_DIR="/nowhere/math", FINETUNE=finetune)
    assert made[-5:] == ["--dataset", "math", "--out", "/nowhere/math", "--sft"]
    assert trained[trained.index("--") + 2 :][:2] == ["-m", "torch.distributed.run"]
    config = compose_call(trained)
    optim, engine = omega_conf_to_dataclass(config.optim), omega_conf_to_dataclass(config.engine)
    assert (optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == (1e-6, "cosine", 0.005)
    assert (optim.weight_decay, optim.clip_grad, list(optim.betas)) == (0.1, 0.1, [0.9, 0.95])
    assert (engine.strategy, config.data.max_length, config.data.train_batch_size) == ("fsdp2", 5500, 1)
    assert config.data.train_files == "/nowhere/math/sft_train.parquet"
    assert config.model.lora_rank == (64 if finetune == "lora" else 0)
    omega_conf_to_dataclass(config.checkpoint)


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_sft_texts_are_solutions_in_the_papers_format(name, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    splits = load_splits(DATASETS[name], str(ROOT / "tests/paper/fixtures" / name))
    write_parquet(DATASETS[name], splits, tmp_path / "data", sft=True)
    rows = pq.read_table(tmp_path / "data/sft_train.parquet").to_pylist()
    assert len(rows) == len(splits["train"])
    for row, raw in zip(rows, make_rows(DATASETS[name], "train", splits["train"]), strict=True):
        *prompt, solution = row["messages"]
        assert prompt == raw["prompt"]
        score = compute_score(name, solution["content"], raw["reward_model"]["ground_truth"])
        assert (solution["role"], score["score"], score["strict"]) == ("assistant", 20.0, 1.0)
        assert "<<" not in solution["content"] and "####" not in solution["content"]


def test_a_set_of_answers_has_no_sft_texts():
    with pytest.raises(ValueError, match="AIME2024 has answers but no solutions"):
        make_sft_rows(DATASETS["aime2024"], "test", [])


def test_evaluation_draws_64_completions_of_every_question_in_one_start_of_verl(call, tmp_path):
    *made, checked, sampled, evaluated = call("evaluate", "a/model", DATA_ROOT=str(tmp_path), LABEL="Qwen/GSM8K/GTPO")
    names = ["gsm8k", "math", "aime2024", "aime2025", "amc2023"]
    assert [arguments[arguments.index("--dataset") + 1] for arguments in made] == names
    assert checked == ["-m", "gtpo_verl", "check", "--", "python3", *sampled]
    config = compose_call(sampled)
    assert config.trainer.val_only and config.trainer.val_before_train
    assert config.trainer.v1.trainer_mode == "batched_validation"
    assert config.data.val_files == [str(tmp_path / name / "test.parquet") for name in names]
    rollout = config.actor_rollout_ref.rollout
    assert (config.actor_rollout_ref.model.path, rollout.val_kwargs.n, rollout.val_kwargs.do_sample) == (
        "a/model",
        64,
        True,
    )
    assert config.data.val_batch_size * 64 <= config.transfer_queue.backend.SimpleStorage.total_storage_size
    assert (
        config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES
        == "gtpo_verl.paper.batched_validation"
    )
    check_against_verl(config)
    assert evaluated[1:3] == ["gtpo_verl", "evaluate"] and evaluated[evaluated.index("--samples") + 1] == "64"
    label, _, dump = parse_dump_argument(evaluated[3])
    assert (label.method, dump.parent) == ("GTPO", Path(config.trainer.validation_data_dir))


def test_a_checkpoint_of_verl_is_exported_and_its_adapter_sampled_on_its_base(call, tmp_path):
    (tmp_path / "global_step_5/actor").mkdir(parents=True)
    variables = {"DATASETS": "gsm8k", "DATA_ROOT": str(tmp_path)}
    _, exported, _, sampled, _ = call("evaluate", str(tmp_path / "global_step_5"), **variables)
    out = tmp_path / "global_step_5/exported"
    assert exported == ["-m", "gtpo_verl", "export", str(tmp_path / "global_step_5"), str(out)]
    model = compose_call(sampled).actor_rollout_ref.model
    assert (model.path, Path(model.lora_adapter_path), model.lora_rank) == ("the/base", out, 16)


# ---------------------------------------------------------------- the initial entropy as the paper measures it


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A random model whose own generation settings, like Qwen2.5's, narrow the distribution."""
    from transformers import GenerationConfig

    from gtpo_verl.cpu.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(tokenizer)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.1,
        top_k=2,
        top_p=0.5,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    import pyarrow as pa

    rows = [{"prompt": [{"role": "user", "content": f"{'1' * (1 + i % 3)}+{i}="}]} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def test_the_initial_entropy_is_sampled_from_the_whole_distribution_at_temperature_1(tiny_model, prompts, monkeypatch):
    from gtpo_verl.paper import measure_initial_entropy as measure

    settings = []
    sample_entropies = measure.sample_entropies

    def noting(model, *args):
        settings.append(model.generation_config)
        return sample_entropies(model, *args)

    monkeypatch.setattr(measure, "sample_entropies", noting)
    measured = measure.measure_initial_entropy(str(tiny_model), prompts, 10, 12, batch_size=4, seed=0)
    assert (measured.completions, measured.prompts, len(settings)) == (10, 10, 3)
    for used in settings:
        assert used.do_sample and (used.temperature, used.top_k, used.top_p) == (1.0, 0, 1.0)
        assert used.repetition_penalty == 1.0
    # A random model is all but uniform over its 71 tokens.
    assert math.log(71) - 0.6 < measured.value < math.log(71)


def test_the_recorded_entropies_are_those_of_a_second_pass(tiny_model, prompts):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gtpo_verl.paper import measure_initial_entropy as measure

    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.generation_config.update(temperature=1.0, top_k=0, top_p=1.0)
    seen = {}
    generate = model.generate

    def noting(**kwargs):
        seen["prompt"] = kwargs["input_ids"]
        seen["sequences"] = generate(**kwargs)
        return seen["sequences"]

    model.generate = noting
    torch.manual_seed(1)
    messages = measure.read_prompts(prompts, 6)
    entropies, lengths = measure.sample_entropies(model, tokenizer, messages, max_response_length=40)
    assert lengths.min() < 40  # some completions end by themselves
    for row, (entropy, length) in enumerate(zip(entropies, lengths.tolist(), strict=True)):
        width = seen["prompt"].shape[1]
        ids = seen["sequences"][row, : width + length]
        real = ids[:width] != tokenizer.pad_token_id
        ids = torch.cat([ids[:width][real], ids[width:]])
        assert length == 40 or ids[-1] == tokenizer.eos_token_id
        probabilities = model(ids[None]).logits[0, int(real.sum()) - 1 : -1].softmax(-1)
        torch.testing.assert_close(entropy, torch.special.entr(probabilities).sum(-1).mean(), rtol=1e-4, atol=1e-4)


def test_more_samples_than_rows_are_an_error(tiny_model, prompts, capsys):
    assert main(["initial-entropy", "--model", str(tiny_model), "--data", str(prompts), "--samples", "100"]) == 2
    assert "has 12 rows" in capsys.readouterr().err


def test_the_command_prints_the_value_its_spread_and_the_decision(tiny_model, prompts, capsys):
    arguments = ["--model", str(tiny_model), "--data", str(prompts), "--samples", "4", "--max-response-length", "8"]
    assert main(["initial-entropy", *arguments]) == 0
    value, spread, decision = capsys.readouterr().out.splitlines()
    assert value.startswith("initial_entropy=") and math.log(2) < float(value.split("=")[1]) < math.log(71)
    assert spread.startswith("standard deviation over the completions: ")
    assert decision.startswith("completion filter off: ")


# ---------------------------------------------------------------- the documents


def test_the_table_of_experiments_has_every_ablation():
    named = set(re.findall(r"[`\s]([a-z][a-z_]*(?:_[0-9.e-]+)?)`", (ROOT / "docs/reproduce.md").read_text()))
    assert set(ablations()) <= named


def test_openrlhfs_grpo_twin_differs_in_the_estimator_alone(call, tmp_path):
    shared = {"DATA_DIR": str(tmp_path), "N_SAMPLES_PER_PROMPT": "12"}
    _, gtpo = call("run_gtpo_openrlhf", "--actor.adam.lr", "2e-6", **shared)
    _, grpo = call("run_gtpo_openrlhf", "--actor.adam.lr", "2e-6", ALGO="grpo", **shared)
    assert [(a, b) for a, b in zip(gtpo, grpo, strict=True) if a != b] == [("gtpo", "group_norm")]
    value = dict(zip(gtpo, gtpo[1:], strict=False))
    assert value["--algo.kl.init_coef"] == "0" and value["--train.batch_size"] == "12"
    assert gtpo[-1] == "2e-6"
    assert Path(value["--reward.remote_url"]).is_file()
