"""The recipes run here against a python3 that only notes its arguments; `recipes.txt` has what they are to be.

python tests/recipes/test_recipes_on_cpu.py --update     writes recipes.txt anew, for the commands that it names
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from glob import has_magic
from importlib import import_module
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config

from gtpo_verl.reward.score import compute_score
from gtpo_verl.verl_plugin import departures, preflight
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from recipes.paper.evaluation import parse_dump_argument
from recipes.runs import run_folder
from recipes.runs.run_folder import overrides

ROOT = Path(__file__).resolve().parents[2]

BASH, CPU_RECIPE = shutil.which("bash"), "recipes/run_gtpo_cpu.sh"

FAKE_PYTHON = f"""#!{sys.executable} -IS
import json, os, pathlib, sys
if sys.argv[1] == "-c" and sys.argv[3:]:
    sys.argv[:2] = []
    exec(sys.argv[0])
    sys.exit()
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
    config = {{"base_model_name_or_path": "/josé's, the/base", "bias": "none", "r": 16, "lora_alpha": 32}}
    (adapter / "adapter_config.json").write_text(json.dumps(config, indent=1))
"""


@pytest.fixture
def call(tmp_path):
    return caller(tmp_path)


def caller(tmp_path):
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
        finished = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=900)
        assert finished.returncode == 0, finished.stderr[-2000:]
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def compose_call(arguments: list[str]) -> DictConfig:
    folder, name = (arguments[arguments.index(option) + 1] for option in ("--config-path", "--config-name"))
    with initialize_config_dir(folder, version_base=None):
        return compose(name, overrides=arguments[arguments.index("--config-name") + 2 :])


def read_golden() -> dict[str, dict[str, str]]:
    """Command -> key, with Hydra's plus signs -> value."""
    commands: dict[str, dict[str, str]] = {}
    for line in (Path(__file__).parent / "recipes.txt").read_text().splitlines():
        if line.startswith("== "):
            command, _, other = line.removeprefix("== ").partition(" < ")
            commands[command] = settings = dict(commands[other]) if other else {}
        elif line.startswith("-") and "=" not in line:
            del settings[line[1:]]
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings[key] = value
    return commands


GOLDEN = read_golden()


def given_settings(arguments: list[str], out: Path) -> dict[str, str]:
    if "--config-name" in arguments:
        words = arguments[arguments.index("--config-name") + 2 :]
    else:  # OpenRLHF's options, some of which have no value
        words = re.sub(r" (?!--)", "=", " ".join(arguments[3:])).split(" ")
    pairs = (word.replace(str(out), "$OUT").replace(str(ROOT), "$ROOT").partition("=") for word in words)
    return {key: value for key, _, value in pairs}


def given_arguments(call, command: str) -> tuple[str, list[str]]:
    """The script that a command runs, and what it gives to verl or OpenRLHF."""
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if "=" in word)
    script, *args = [word for word in words if "=" not in word]
    (arguments,) = [
        x
        for x in call(script.removesuffix(".sh"), *args, **variables)[1:]
        if {"check", "evaluate"}.isdisjoint(x) and ("--config-name" in x or "openrlhf" in x)
    ]
    return script, arguments


def update(folder: Path) -> None:
    """Write `recipes.txt` anew: its comment, its commands, and their settings as they are now."""
    path, call = Path(__file__).parent / "recipes.txt", caller(folder)
    lines = path.read_text().splitlines()
    written, now = [line for line in lines if line.startswith("#")], dict[str, dict[str, str]]()
    for line in lines:
        if not line.startswith("== "):
            continue
        command, _, other = line.removeprefix("== ").partition(" < ")
        now[command] = settings = given_settings(given_arguments(call, command)[1], folder / "out")
        base = now.get(other, {})
        written += ["", line, *(f"{key}={value}" for key, value in settings.items() if base.get(key) != value)]
        written += [f"-{key}" for key in base if key not in settings]
    path.write_text("\n".join(written) + "\n")


@pytest.mark.parametrize("command", GOLDEN)
def test_a_recipe_gives_the_settings_on_record_and_they_fit_verl(call, tmp_path, command):
    script, arguments = given_arguments(call, command)
    assert given_settings(arguments, tmp_path / "out") == GOLDEN[command]
    if "--config-name" not in arguments:
        return
    config = compose_call(arguments)
    if script == "run_sft.sh":
        for section in ("optim", "engine", "checkpoint"):
            omega_conf_to_dataclass(config[section])
        return
    run = preflight.validated(config)
    if config.algorithm.adv_estimator == "gtpo":
        # One prompt a step measures ⟨H⟩_ini on few completions; without an old-log-prob pass the ratio is unbounded.
        known = {"algorithm.gtpo.initial_entropy", "algorithm.rollout_correction.bypass_mode"}
        if script == "run_gtpo_qwen3.sh":  # which changes the advantages alone, at the settings of TRL #6407
            known |= {f"actor_rollout_ref.actor.{key}" for key in ("policy_loss.loss_mode", "loss_agg_mode")}
        assert {departure.setting for departure in departures.departures(config, run)} <= known
    OmegaConf.resolve(config)
    config.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl asks an installed vLLM for its largest rank
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    for section in ("actor", "rollout"):
        omega_conf_to_dataclass(config.actor_rollout_ref[section])


def ablations() -> list[str]:
    listed = subprocess.run(["bash", str(ROOT / "recipes/ablations.sh")], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()[1:]]


def test_every_recipe_and_ablation_is_on_record_and_every_ablation_in_the_table_of_experiments():
    recipes = {path.name for path in (ROOT / "recipes").glob("*.sh")}
    recipes -= {"checks.sh", "common.sh", "export.sh", "run_gtpo_cpu.sh"}  # no settings of verl
    words = {word for command in GOLDEN for word in command.split()}
    assert recipes | set(ablations()) <= words
    named = set(re.findall(r"[`\s]([a-z][a-z_]*(?:_[0-9.e-]+)?)`", (ROOT / "docs/reproduce.md").read_text()))
    assert set(ablations()) <= named


FAKE_BASH = """#!/bin/sh
printf '%s\\n' "$MODEL" "$ALGO" "$KL_LOSS_COEF" "$@" >"$CALLS"
"""


@pytest.mark.parametrize("name", ablations())
def test_every_ablation_runs_without_a_gpu_too(tmp_path, name):
    (tmp_path / "bash").write_text(FAKE_BASH)
    (tmp_path / "bash").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "MODEL": "cpu"}
    subprocess.run([BASH, str(ROOT / "recipes/ablations.sh"), name, "trainer.save_freq=7"], env=env, check=True)
    model, algo, kl_loss_coef, script, *words = (tmp_path / "calls").read_text().splitlines()
    assert (model, algo, script) == ("tiny", "grpo" if name[:2] in ("kl", "be") else "gtpo", CPU_RECIPE)
    assert (kl_loss_coef != "0") == (name in ("kl_1e-6", "kl_0.04"))
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        config = compose("gtpo_cpu", overrides=["task_dir=/nowhere", f"algorithm.adv_estimator={algo}", *words])
    preflight.validated(config)
    assert config.trainer.save_freq == 7
    asked = OverridesParser.create().parse_overrides([word for word in words if "algorithm.gtpo." in word])
    assert all(OmegaConf.select(config, word.key_or_group) == word.value() for word in asked)


def test_the_settings_that_all_recipes_share_are_the_papers():
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        config, sft = compose("gtpo"), omega_conf_to_dataclass(compose("sft").optim)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.loss_agg_mode, actor.ppo_epochs, actor.entropy_coeff) == ("seq-mean-token-mean", 1, 0)
    assert not config.algorithm.use_kl_in_reward and config.algorithm.norm_adv_by_std_in_grpo
    for optim in (actor.optim, sft):
        papers = (1e-6, 0.005, 0.1, 0.1)
        assert (optim.lr, optim.lr_warmup_steps_ratio, optim.weight_decay, optim.clip_grad) == papers
    assert (sft.lr_scheduler_type, list(sft.betas)) == ("cosine", [0.9, 0.95])
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert {config.seed, config.data.seed, actor.data_loader_seed, rollout.seed} == {3407}
    reward = config.reward.custom_reward_function
    assert reward.path == "pkg://gtpo_verl.reward"
    assert getattr(import_module(reward.path.removeprefix("pkg://")), reward.name) is compute_score
    assert VerlGTPOConfig(**config.algorithm.gtpo) == VerlGTPOConfig()


def test_missing_data_is_made_and_present_data_is_not(call, tmp_path):
    made, checked, _ = call("run_gtpo_qwen", DATASET="math", DATA_DIR=str(tmp_path / "data"))
    assert "check" in checked  # which refuses a run whose data is missing
    assert made == ["-m", "recipes", "data", "--dataset", "math", "--out", str(tmp_path / "data")]
    (tmp_path / "data").mkdir()
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / "data" / name).touch()
    seen, *_ = call("run_gtpo_qwen", DATASET="math", DATA_DIR=str(tmp_path / "data"))
    files = [str(tmp_path / "data" / name) for name in ("train.parquet", "test.parquet")]
    assert seen == ["-m", "recipes", "data", "--dataset", "math", "--holds", *files]
    made, _ = call("run_sft", DATA_DIR="/nowhere/gsm8k")
    assert made[-5:] == ["--dataset", "gsm8k", "--out", "/nowhere/gsm8k", "--sft"]


@pytest.mark.parametrize("mine", ["train.parquet", "test.parquet"])
def test_data_of_ones_own_is_not_overwritten(call, tmp_path, mine):
    (tmp_path / mine).touch()
    with pytest.raises(AssertionError, match="no such file .*TRAIN_FILE and VAL_FILE"):
        call("run_gtpo_qwen", DATA_DIR=str(tmp_path))
    assert not (tmp_path / "calls").exists()
    both = dict.fromkeys(("TRAIN_FILE", "VAL_FILE"), str(tmp_path / mine))
    assert "--holds" in call("run_gtpo_qwen", DATA_DIR=str(tmp_path), **both)[0]


def test_a_recipe_checks_the_machine_before_it_trains_through_the_launcher(call, tmp_path):
    _, check, *_, launched = call("run_gtpo_qwen")
    assert launched[:6] == ["-m", "recipes", "run", "--out", str(tmp_path / "out"), "--"]
    assert check == ["-m", "gtpo_verl", "check", *launched[5:]]


@pytest.mark.parametrize(("batch", "rollout_n", "gpus"), [("1", "8", "2"), ("1", "9", "1"), ("4", "9", "6")])
def test_a_recipe_takes_the_most_gpus_over_which_its_completions_split_evenly(call, batch, rollout_n, gpus):
    machine = {"TRAIN_BATCH_SIZE": batch, "ROLLOUT_N": rollout_n, "FAKE_MACHINE": "7 flash_attention_2"}
    assert overrides(call("run_gtpo_qwen", **machine)[-1])["trainer.n_gpus_per_node"] == gpus
    assert overrides(call("run_gtpo_qwen", **machine, NGPUS_PER_NODE="1")[-1])["trainer.n_gpus_per_node"] == "1"


OF_A_CLUSTER = {"RAY_ADDRESS": "head:6379", "FAKE_MACHINE": "1 flash_attention_2"}  # 1, of a machine without a GPU too


def test_the_gpus_of_a_ray_cluster_are_those_that_are_given(call):
    assert overrides(call("run_gtpo_qwen", **OF_A_CLUSTER, NGPUS_PER_NODE="2")[-1])["trainer.n_gpus_per_node"] == "2"


def test_openrlhf_goes_on_from_a_whole_checkpoint_only(call, tmp_path):
    latest = tmp_path / "out/checkpoints/_actor/latest"
    (latest.parent / "global_step500").mkdir(parents=True)
    assert "--ckpt.load_enable" not in call("run_gtpo_openrlhf")[-1]
    latest.touch()
    assert "--ckpt.load_enable" in call("run_gtpo_openrlhf")[-1]


def test_folders_may_have_any_name(call, tmp_path):
    folder = tmp_path / 'josé\'s [1] {x}, a=b#("*")'
    for name in ("data", "model"):
        (folder / name).mkdir(parents=True)
    for name in ("train.parquet", "test.parquet"):
        (folder / "data" / name).touch()
    named = {"OUT": str(folder / "out"), "DATA_DIR": str(folder / "data"), "MODEL_PATH": str(folder / "model")}
    _, check, *_, measured, trained = call(
        "run_gtpo_qwen", **named, ROLLOUT_DUMP="rollouts #1", STRICT_INITIAL_ENTROPY="1"
    )
    for arguments in (check[4:], trained):
        config = compose_call(arguments)
        assert config.trainer.default_local_dir == f"{folder}/out/checkpoints"
        assert config.trainer.rollout_data_dir == str(ROOT / "rollouts #1")  # a worker of Ray runs in another folder
        for path, own in (
            (config.data.train_files, "data/train.parquet"),
            (config.actor_rollout_ref.model.path, "model"),
        ):
            assert not has_magic(path) and Path(path).resolve() == folder / own  # which datasets and vLLM look for
    assert measured[measured.index("--model") + 1] == compose_call(trained).actor_rollout_ref.model.path
    assert trained[4] == f"{folder}/out"
    assert run_folder.unquoted(overrides(trained)["trainer.default_local_dir"]) == f"{folder}/out/checkpoints"


def reserved_link(folder: Path) -> Path:
    """Return the place in /tmp at which a recipe makes its link to `folder`."""
    digest = hashlib.sha256(f"{folder}\n".encode()).hexdigest()
    return Path(f"/tmp/gtpo-{os.getuid()}-{digest[:16]}")


@pytest.fixture
def occupied():
    """Make the folder of somebody else where a recipe would make its link to a folder, and remove it at the end."""
    made = []

    def occupy(folder: Path) -> Path:
        made.append(reserved_link(folder))
        made[-1].mkdir()
        return made[-1]

    yield occupy
    for path in made:
        shutil.rmtree(path)


def test_no_python_is_started_from_a_folder_that_somebody_else_made_in_tmp(tmp_path, occupied):
    environment = tmp_path / "my environment"
    started = tmp_path / "started"
    for folder in (environment, occupied(environment)):
        (folder / "bin").mkdir(parents=True)
        python = folder / "bin/python3"
        python.write_text(f"#!/bin/sh\necho {shlex.quote(str(python))} >> {started}\nexit 1\n")
        python.chmod(0o755)
    env = {"PATH": f"{environment}/bin:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    command = ["bash", str(ROOT / "recipes/run_gtpo_qwen.sh")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert not started.exists()
    assert done.returncode == 2 and str(reserved_link(environment)) in done.stderr


@pytest.mark.parametrize(
    ("script", "variable", "folder"),
    [
        ("run_gtpo_qwen", "MODEL_PATH", "model"),
        ("run_gtpo_qwen", "DATA_DIR", "data"),
        ("run_sft", "MODEL_PATH", "model"),
        ("run_sft", "DATA_DIR", "data"),
        ("evaluate some/model", "DATA_ROOT", "data"),
        ("evaluate MODEL", "MODEL", "model"),
    ],
)
def test_no_model_and_no_data_are_taken_from_a_folder_that_somebody_else_made_in_tmp(
    call, tmp_path, occupied, script, variable, folder
):
    given = tmp_path / "[1]" / folder
    linked = given / "gsm8k" if variable == "DATA_ROOT" else given
    linked.mkdir(parents=True)
    link = occupied(linked)
    with pytest.raises(AssertionError, match=str(link)):
        call(*script.replace("MODEL", str(given)).split(), **{variable: str(given)})


def test_a_link_that_leads_elsewhere_is_made_anew(call, tmp_path):
    model = tmp_path / "model[1]"
    model.mkdir()
    link = reserved_link(model)
    link.symlink_to(tmp_path)
    trained = call("run_gtpo_qwen", MODEL_PATH=str(model))[-1]
    assert compose_call(trained).actor_rollout_ref.model.path == str(link) and link.readlink() == model
    link.unlink()


@pytest.mark.parametrize("name", ["run_gtpo_qwen", "run_sft", "evaluate"])
@pytest.mark.parametrize("smoke", ["0", "1"])
def test_a_python_without_verl_is_named(tmp_path, name, smoke):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "SMOKE": smoke}
    command = ["bash", str(ROOT / f"recipes/{name}.sh"), "some/model"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 2 and f"{tmp_path}/python3 has no verl" in done.stderr


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("run_gtpo_openrlhf.sh", "no torch: activate"),
        ("export.sh", "required: checkpoint"),
        ("export.sh outputs/run/checkpoints/global_step_5", "filelock here: activate"),
    ],
)
def test_a_python_without_packages_gives_one_line(tmp_path, command, missing):
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without what is installed
    python.chmod(0o755)
    script, *arguments = command.split()
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        ["bash", ROOT / "recipes" / script, *arguments], env=env, capture_output=True, text=True, timeout=60
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and missing in line


@pytest.mark.parametrize(
    ("command", "variables", "message"),
    [
        ("run_gtpo_qwen", {"ALGO": "ppo"}, "ALGO=ppo: .*gtpo or grpo"),
        ("run_gtpo_qwen", {"KL_LOSS_COEF": "0.04"}, r"KL_LOSS_COEF=0\.04: .*ALGO=grpo"),
        ("run_gtpo_qwen", {"FINETUNE": "some"}, "FINETUNE=some: .*lora or full"),
        ("run_gtpo_qwen", {"BETAS": "0.9"}, "BETAS=0.9: .*default or paper"),
        ("run_gtpo_qwen", {"ENTROPY_FROM": "rollout"}, "ENTROPY_FROM=rollout: .*old_log_prob or update"),
        ("run_gtpo_qwen", {"SMOKE": "False"}, "SMOKE=False: .*0 or 1"),
        ("run_gtpo_qwen", {"EXTEND": "no"}, "EXTEND=no: .*0 or 1"),
        ("run_gtpo_qwen", {"STRICT_INITIAL_ENTROPY": "False"}, "STRICT_INITIAL_ENTROPY=False: .*0 or 1"),
        ("run_gtpo_qwen", {"TRAIN_BATCH_SIZE": "abc"}, "TRAIN_BATCH_SIZE=abc: .*whole number"),
        ("run_gtpo_qwen", {"TRAIN_BATCH_SIZE": "0"}, "TRAIN_BATCH_SIZE=0: .*number above 0"),
        ("run_gtpo_qwen", {"TRAIN_BATCH_SIZE": "9" * 19}, "TRAIN_BATCH_SIZE=9+: .*number above 0"),
        ("run_gtpo_qwen", {"LORA_RANK": "-1"}, "LORA_RANK=-1: .*number above 0"),
        ("run_gtpo_qwen", {"TOTAL_EPOCHS": "0"}, "TOTAL_EPOCHS=0: .*number above 0"),
        ("run_gtpo_qwen", {"TOTAL_EPOCHS": "1.0"}, r"TOTAL_EPOCHS=1\.0: .*number above 0"),
        ("run_gtpo_qwen", {"ROLLOUT_TP": "[1]"}, r"ROLLOUT_TP=\[1\]: .*number above 0"),
        ("run_gtpo_qwen", {"KEEP": "abc"}, "KEEP=abc: .*number above 0"),
        ("run_gtpo_qwen", {"TEST_FREQ": "-2"}, "TEST_FREQ=-2: .*number of steps"),
        ("run_gtpo_qwen", {"ROLLOUT_GPU_MEM_UTIL": "2"}, "ROLLOUT_GPU_MEM_UTIL=2: .*share"),
        ("run_gtpo_qwen", {"ROLLOUT_GPU_MEM_UTIL": "0.0"}, r"ROLLOUT_GPU_MEM_UTIL=0\.0: .*share"),
        ("run_gtpo_qwen", {"ROLLOUT_GPU_MEM_UTIL": "40%"}, "ROLLOUT_GPU_MEM_UTIL=40%: .*number"),
        ("run_gtpo_qwen", {"ACTOR_LR": "nan"}, "ACTOR_LR=nan: .*number"),
        ("run_gtpo_qwen", {"ACTOR_LR": "-1e-6"}, "ACTOR_LR=-1e-6: .*number"),
        ("run_gtpo_qwen", {"KL_LOSS_COEF": "x", "ALGO": "grpo"}, "KL_LOSS_COEF=x: .*number"),
        ("run_gtpo_qwen", {"OFFLOAD": "yes"}, "OFFLOAD=yes: .*True, False, .*false"),
        ("run_gtpo_qwen", {"SAVE_LORA_ONLY": "1"}, "SAVE_LORA_ONLY=1: .*True"),
        ("run_gtpo_qwen", {"FREE_CACHE_ENGINE": "null"}, "FREE_CACHE_ENGINE=null: .*True"),
        ("run_gtpo_qwen", {"SEED": "4294967296"}, "SEED=4294967296: .*whole number"),
        ("run_sft", {"TEST_FREQ": "0"}, "TEST_FREQ=0: .*number of steps"),
        ("run_sft", {"MAX_LENGTH": "-5"}, "MAX_LENGTH=-5: .*number above 0"),
        ("evaluate the/model", {"BATCH": "08"}, "BATCH=08: .*number above 0"),
        ("run_gtpo_cpu", {"STEPS": "abc"}, "STEPS=abc: .*whole number"),
        ("run_gtpo_cpu", {"SEED": "-1"}, "SEED=-1: .*whole number"),
        ("run_gtpo_cpu", {"SAVE_FREQ": "0"}, "SAVE_FREQ=0: .*number of steps"),
        ("run_gtpo_cpu", {"TASK": "a${b}"}, "name has .{ "),
        ("run_gtpo_cpu", {"OUT": "a\nb"}, "name has .{ "),
        ("run_gtpo_qwen", {"TRAIN_FILE": "a${b}.parquet"}, "^TRAIN_FILE=a.{b}"),
        ("run_gtpo_qwen", {"ROLLOUT_DUMP": "a${b}"}, "^ROLLOUT_DUMP=a.{b}"),
        ("evaluate the/model", {"DATA_ROOT": "a${b}"}, "^DATA_ROOT=a.{b}"),
        ("evaluate a${b}", {}, "^checkpoint=a.{b}"),
        ("run_gtpo_qwen", {"TRAIN_FILE": "of [1].parquet"}, r"^of \[1\]\.parquet: .*rename the file"),
        ("run_sft", {"VAL_FILE": "data/*.parquet"}, r"^data/\*\.parquet: .*rename the file"),
        ("ablations gtpo", {"MODEL": "foo"}, "MODEL=foo: .*qwen, llama or cpu"),
        ("run_gtpo_qwen", OF_A_CLUSTER, "RAY_ADDRESS=head:6379: set NGPUS_PER_NODE"),
        ("run_gtpo_openrlhf", {"SMOKE": "1"}, "SMOKE: unset it"),
        ("run_gtpo_openrlhf", {"KL_LOSS_COEF": "1e-6"}, "KL_LOSS_COEF: unset it"),
        ("run_gtpo_openrlhf", {"ROLLOUT_N": "12"}, "ROLLOUT_N: unset it"),
        ("run_gtpo_openrlhf", {"BATCH_SIZE": "x"}, "BATCH_SIZE=x: .*number above 0"),
        ("run_gtpo_openrlhf", {"SAVE_STEPS": "0"}, "SAVE_STEPS=0: .*number of steps"),
        ("run_gtpo_openrlhf", {"GPU_MEMORY_UTILIZATION": "x"}, "GPU_MEMORY_UTILIZATION=x: .*number"),
        ("run_gtpo_openrlhf", {"ACTOR_LR": "1e"}, "ACTOR_LR=1e: .*number"),
        ("run_gtpo_openrlhf", {"NGPUS_PER_NODE": "3", "FAKE_MACHINE": "4"}, "NGPUS_PER_NODE=3 must divide"),
        ("run_gtpo_openrlhf", {"NGPUS_PER_NODE": "4"}, "NGPUS_PER_NODE=4: .*has 2 GPUs"),
        ("run_gtpo_openrlhf", {"FAKE_MACHINE": "0"}, "NGPUS_PER_NODE=1: .*has 0 GPUs"),
        ("run_gtpo_openrlhf", OF_A_CLUSTER, "RAY_ADDRESS=head:6379: set NGPUS_PER_NODE"),
        ("run_gtpo_openrlhf", {"DATA_DIR": "a,b"}, "a,b/train.parquet: .*set DATA_DIR"),
        ("ablations span_.....", {}, "span_.....: .*no such ablation"),
        ("ablations gama_0.1", {}, "gama_0.1: .*no such ablation"),
        ("evaluate the/model", {"LABEL": "Qwen/GTPO"}, "LABEL=Qwen/GTPO: write METHOD"),
        ("evaluate the/model", {"LABEL": "Qwen/GSM8K/GRPO b=4"}, "LABEL=Qwen/GSM8K/GRPO b=4: write METHOD"),
        ("evaluate the/model", {"LABEL": "a//c"}, "LABEL=a//c: write METHOD"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_starts(call, tmp_path, command, variables, message):
    with pytest.raises(AssertionError, match=message):
        call(*command.split(), **variables)
    assert not (tmp_path / "calls").exists()


ANY_KIND = (
    "1.5",
    "null",
    "[1]",
    "???",
    "-1",
    "nan",
    "inf",
    "abc",
    "1 2",
    "1\n2",
    "$(touch pwned)",
    "07",
    "1e",
    "+1",
    "9" * 20,
)


TAKES = {
    "check_counts X": ["1", "64", "999999999"],
    "check_steps X": ["1", "64", "-1"],
    "check_seed": ["0", "1", "4294967295"],
    "check_number X": ["0", "1.5", "07", "1e-6", ".5", "3E4", "9" * 20],
    "check_share X": ["1", "0.4", ".5", "4e-1"],
    "check_choice X True False": ["True", "False"],
}


def checked(check, value, folder):
    """Check a variable of this value as the recipes do; its name and what bash made of it."""
    name = "SEED" if check == "check_seed" else "X"
    done = subprocess.run(
        ["bash", "-euc", f"source {shlex.quote(str(ROOT / 'recipes/checks.sh'))}; {check}"],
        env={"PATH": os.environ["PATH"], name: value},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert list(folder.iterdir()) == []
    return name, done


@pytest.mark.parametrize(
    ("check", "value"), [(check, value) for check, takes in TAKES.items() for value in ["", *takes]]
)
def test_each_kind_of_variable_takes_what_it_says(tmp_path, check, value):
    """Without a value the recipe's default holds."""
    _, done = checked(check, value, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("check", "value"), [(check, value) for check, takes in TAKES.items() for value in ANY_KIND if value not in takes]
)
def test_each_kind_of_variable_names_all_else(tmp_path, check, value):
    name, done = checked(check, value, tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"{name}={value}: must be")


def test_every_variable_of_the_table_is_looked_at():
    table = (ROOT / "recipes/README.md").read_text().split("## Variables")[1].split("## How")[0]
    named = set()
    for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE):
        named.update(re.findall(r"`(\w+)`", row))
    common = (ROOT / "recipes/common.sh").read_text().replace("\\\n", " ")
    looked_at = {"SEED"}
    for line in common.splitlines():
        if "check_" in line or line.startswith("for name in"):
            looked_at.update(re.findall(r"\b[A-Z][A-Z_]+\b", line))
    of_text = {"MODEL_PATH", "DATASET", "DATA_DIR", "TRAIN_FILE", "VAL_FILE", "INFER_BACKEND", "ROLLOUT_DUMP"}
    of_text |= {"LOGGER", "PROJECT_NAME", "EXPERIMENT_NAME", "OUT"}
    by_name = {"ALGO", "BETAS", "ENTROPY_FROM", "FINETUNE", "STRATEGY"}  # each in a `case` of its own
    assert {"SEED", "KEEP", "ROLLOUT_TP"} <= named
    assert named - of_text - by_name <= looked_at


def test_the_initial_entropy_is_measured_with_the_runs_own_settings(call):
    changes = (
        "actor_rollout_ref.model.path=my/model",
        "data.train_files=/mine",
        "data.max_response_length=7",
        "seed=5",
        "+data.apply_chat_template_kwargs.enable_thinking=False",
    )
    *_, measured, trained = call("run_gtpo_qwen", *changes, STRICT_INITIAL_ENTROPY="1")
    assert measured[:3] == ["-m", "gtpo_verl", "initial-entropy"] and measured[-2:] == ["--", changes[-1]]
    options = "--model my/model --data /mine --samples 100 --seed 5 --max-response-length 7".split()
    pairs = zip(measured[3:-2:2], measured[4:-2:2], strict=True)
    assert sorted(pairs) == sorted(zip(options[::2], options[1::2], strict=True))
    assert compose_call(trained).algorithm.gtpo.initial_entropy == 0.4123


def test_a_run_that_is_started_again_does_not_measure_its_initial_entropy_again(call):
    *_, measured, first = call("run_gtpo_llama")
    *_, before, second = call("run_gtpo_llama")
    assert "initial-entropy" in measured and "initial-entropy" not in before
    assert first == second
    *_, measured, _ = call("run_gtpo_llama", MODEL_PATH="another/model")
    assert "another/model" in measured


@pytest.mark.parametrize("variables", [{"ENTROPY_FROM": "update"}, {"STRICT_INITIAL_ENTROPY": "1"}])
@pytest.mark.parametrize(
    ("override", "algo"),
    [
        ("algorithm.gtpo.initial_entropy=0.2", "gtpo"),
        ("algorithm.gtpo.completion_filter=never", "gtpo"),
        ("seed=1", "grpo"),
    ],
)
def test_the_initial_entropy_is_not_measured_where_it_is_given_or_not_needed(call, variables, override, algo):
    *_, before, trained = call("run_gtpo_qwen", override, ALGO=algo, **variables)
    assert "initial-entropy" not in before
    preflight.validated(compose_call(trained))


def test_a_config_whose_initial_entropy_is_yet_to_be_measured_passes_the_check(call):
    _, check, *_ = call("run_gtpo_qwen", ENTROPY_FROM="update")
    preflight.validated(compose_call(check[4:]))


def test_evaluation_checks_first_and_reads_what_verl_has_sampled(call, tmp_path):
    *made, checked, sampled, evaluated = call("evaluate", "a/model", DATA_ROOT=str(tmp_path), LABEL="Qwen/GSM8K/GTPO")
    names = ["gsm8k", "math", "aime2024", "aime2025", "amc2023"]
    assert [arguments[arguments.index("--dataset") + 1] for arguments in made] == names
    assert checked == ["-m", "gtpo_verl", "check", "--", "python3", *sampled]
    config = compose_call(sampled)
    samples = config.actor_rollout_ref.rollout.val_kwargs.n
    assert config.data.val_batch_size * samples <= config.transfer_queue.backend.SimpleStorage.total_storage_size
    assert evaluated[1:3] == ["recipes", "evaluate"] and evaluated[evaluated.index("--samples") + 1] == str(samples)
    label, _, dump = parse_dump_argument(evaluated[3])
    assert (label.method, dump.parent) == ("GTPO", Path(config.trainer.validation_data_dir))


def test_a_label_may_have_any_character_but_the_two_that_part_it(call, tmp_path):
    *_, evaluated = call("evaluate", "a/model", DATASETS="gsm8k", DATA_ROOT=str(tmp_path), LABEL="R&D \\& [1]*")
    label, _, _ = parse_dump_argument(evaluated[3])
    assert label.method == "R&D \\& [1]*"


def test_a_checkpoint_of_verl_is_exported_and_its_adapter_sampled_on_its_base(call, tmp_path):
    checkpoint = tmp_path / "run/checkpoints/global_step_5"
    (checkpoint / "actor").mkdir(parents=True)
    settings = {"data.apply_chat_template_kwargs.enable_thinking": "False", "seed": "7"}
    (tmp_path / "run/settings.json").write_text(json.dumps(settings))
    variables = {"DATASETS": "gsm8k", "DATA_ROOT": str(tmp_path)}
    _, exported, _, sampled, evaluated = call("evaluate", str(checkpoint), **variables)
    out = checkpoint / "exported"
    assert exported == ["-m", "recipes", "export", str(checkpoint), str(out)]
    assert evaluated[3].startswith("run_global_step_5=")
    config = compose_call(sampled)
    assert config.data.apply_chat_template_kwargs.enable_thinking is False and config.seed != 7  # as in its run
    model = config.actor_rollout_ref.model
    assert (model.path, Path(model.lora_adapter_path), model.lora_rank) == ("/josé's, the/base", out, 16)


if __name__ == "__main__" and sys.argv[1:] == ["--update"]:
    with tempfile.TemporaryDirectory() as folder:
        update(Path(folder).resolve())
