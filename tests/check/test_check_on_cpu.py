import json
from pathlib import Path

import pytest
import verl
from own_process import run_python
from verl.trainer.ppo import core_algos
from verl.utils import config as verl_config

from gtpo_verl import check, verl_plugin
from gtpo_verl.cli import main
from gtpo_verl.verl_plugin import names_and_versions

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ["python3", "-m", "verl.trainer.main_ppo"]
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
# What verl's defaults lack for any run.
COMPLETE = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True"]


@pytest.fixture
def said(capsys, monkeypatch):
    """The lines that `gtpo-verl check` prints for these overrides of verl's own defaults, without the machine's."""
    monkeypatch.setattr(check.machine, "findings", lambda config: [])

    def checked(*overrides, status):
        assert main(["check", "--", *TRAINER, *COMPLETE, *overrides]) == status
        return capsys.readouterr().out.splitlines()

    return checked


@pytest.mark.parametrize(
    "options",
    [
        ["--config-path", "{}", "--config-name", "gtpo"],
        ["--config-path={}", "--config-name=gtpo"],
        ["-cp", "{}", "-cn", "gtpo"],
    ],
)
def test_the_config_is_the_one_that_hydra_reads_however_it_is_named(options):
    options = [option.format(ROOT / "recipes/config") for option in options]
    config, unknown = check.compose([*TRAINER, *options, "seed=7", "~algorithm.rollout_correction"])
    assert config.seed == 7 and config.algorithm.gtpo.entropy_coeff == 0.1
    assert "rollout_correction" not in config.algorithm and unknown == []
    assert "gtpo" not in check.compose([*TRAINER, "-cp", "config"])[0].algorithm


def test_a_config_folder_beside_the_first_is_refused():
    with pytest.raises(ValueError, match="--config-dir /mine is not read here"):
        check.compose([*TRAINER, "--config-dir=/mine"])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("rolout.n=8", "did you mean actor_rollout_ref.rollout.n? (or reward.reward_model.rollout.n)"),
        ("actor_rollout_ref.actor.ppo_mini_batchsize=8", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("trainer.mine=8", "write +trainer.mine=… if your own code reads it"),
    ],
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(said, override, remedy):
    key = override.partition("=")[0]
    assert said(override, status=1) == [
        f"problem: {key}: verl has no such key: {remedy}",
        "1 problem: this command would fail here.",
    ]


def test_several_updates_without_clipping_are_warned_of_with_both_ways_out(said):
    gtpo = ("algorithm.adv_estimator=gtpo", f"{LOSS_MODE}=gtpo", "actor_rollout_ref.rollout.n=8")
    out = said(*gtpo, status=0)
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert any(line.split()[:3] == [mini_batch, "256", "1024:"] for line in out)
    (ways_out,) = [line for line in out if line.startswith("warning: updates: several per rollout")]
    assert ways_out.endswith(f"make one ({mini_batch}=1024), or clip ({LOSS_MODE}=vanilla)")
    assert out[-1].endswith("This command can run here, with the warnings above.")
    for way_out in (f"{mini_batch}=1024", f"{LOSS_MODE}=vanilla"):
        assert not any("warning: updates" in line for line in said(*gtpo, way_out, status=0))


def test_all_problems_are_reported_at_once(said):
    wrong = ["algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=1", "rollout.n=8", f"{LOSS_MODE}=gtop"]
    wrong += ["algorithm.rollout_correction.bypass_mode=True", "actor_rollout_ref.actor.use_dynamic_bsz=False"]
    out = "\n".join(said(*wrong, status=1))
    assert "problem: rollout.n: verl has no such key" in out
    assert f"problem: {LOSS_MODE}=gtop: unknown" in out
    assert "problem: verl: refuses these settings: " in out and "ppo_micro_batch_size_per_gpu" in out
    assert "problem: actor_rollout_ref.rollout.n=1: GTPO compares" in out
    assert "problem: algorithm.rollout_correction.bypass_mode=True: " in out
    assert "5 problems: this command would fail here." in out


def test_a_wrong_key_of_gtpo_is_a_problem_beside_the_others(said):
    out = said("algorithm.adv_estimator=gtpo", "+algorithm.gtpo.gama=1", "actor_rollout_ref.rollout.name=???", status=1)
    assert any(line.startswith("problem: algorithm.gtpo.gama=1: ") for line in out)
    assert "problem: actor_rollout_ref.rollout.name: not given: set it to vllm or sglang" in out


def test_what_hydra_refuses_is_one_line(capsys):
    assert main(["check", "--", "model_engine=megatrn"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gtpo-verl")]
    assert "verl does not accept this command: " in line and "Could not find 'model_engine/megatrn'" in line


LORA = "actor_rollout_ref.model.lora_rank=64"
QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
QWEN |= {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "vocab_size": 151936}
QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("vllm", "overrides", "tied", "fails"),
    [
        ("0.30.0", [], True, True),
        ("0.30.0", [LORA], True, True),  # verl first sends the base under it
        ("0.30.0", [LORA, "actor_rollout_ref.rollout.load_format=safetensors"], True, False),
        ("0.30.0", ["actor_rollout_ref.rollout.name=sglang"], True, False),
        ("0.30.0", [], False, False),
        ("0.28.1", [], True, False),
    ],
)
def test_a_vllm_that_refuses_tied_embeddings_is_a_problem(capsys, monkeypatch, tmp_path, vllm, overrides, tied, fails):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"tie_word_embeddings": tied}))  # of Qwen2.5-3B
    package = tmp_path / f"vllm-{vllm}.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {vllm}\n")
    monkeypatch.syspath_prepend(tmp_path)
    main(["check", "--", *TRAINER, *COMPLETE, f"actor_rollout_ref.model.path={tmp_path}", *overrides])
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: vLLM")]
    if not fails:
        assert said == []
        return
    assert f"{tmp_path} has tied embeddings, which vLLM {vllm} takes in one part only; verl sends" in said[0]
    assert "in 7 " in said[0] and "install vLLM 0.24 to 0.28" in said[0] and "LoRA adapter" in said[0]


def test_a_model_that_is_not_there_is_a_problem(capsys, tmp_path):
    model = f"actor_rollout_ref.model.path={tmp_path}/none"
    assert main(["check", "--", model, "trainer.save_freq=1"]) == 1
    assert f"problem: model: {tmp_path}/none cannot be read: " in capsys.readouterr().out


def test_without_verl_or_torch_there_is_a_sentence_and_no_traceback():
    absent = "import sys; sys.modules.update(torch=None, verl=None)\n"
    code = absent + "from gtpo_verl.cli import main; exit(main(['check']))"
    finished = run_python(code, status=1)
    assert "no torch and no verl" in finished.stdout
    assert "Traceback" not in finished.stderr


ROOT = Path(__file__).resolve().parents[2]


NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}


def last_line(code, **environment):
    return run_python(code, **environment).stdout.strip().splitlines()[-1]


def validate(config):
    verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)


def group_turn_policy_optimization(**kwargs): ...


KNOWN = "algorithm.gtpo.initial_entropy=0.2"


@pytest.fixture
def no_load_errors(monkeypatch):
    monkeypatch.setattr(names_and_versions, "_load_errors", [])


@pytest.fixture
def install_in(monkeypatch, no_load_errors):
    def install(version):
        monkeypatch.setattr(verl, "__version__", version)
        monkeypatch.setattr(verl_plugin.wrapt, "register_post_import_hook", lambda *args: None)
        verl_plugin._install()

    return install


NOT_TESTED = ["0.9.1.dev", "0.9.1+fork", "0.10.0.dev", "1.0", "main"]


def test_report_is_one_sentence_and_says_what_is_registered_where_if_asked_for(capsys, monkeypatch):
    assert main(["check"]) == 0
    (verdict,) = capsys.readouterr().out.splitlines()
    assert verdict.startswith("GTPO is installed and hooked into verl ") and "To check a command: " in verdict
    assert main(["check", "-v"]) == 0
    out = capsys.readouterr().out
    assert "advantage estimator gtpo: gtpo_verl.verl_plugin.state.estimate_gtpo_advantage" in out
    assert "loaded by verl: yes" in out and "hook on legacy trainer: yes" in out and "hook on V1 trainer: yes" in out
    monkeypatch.setattr(names_and_versions, "_load_errors", ["the sky has fallen"])
    assert main(["check"]) == 1
    assert "the sky has fallen" in capsys.readouterr().out


def test_report_says_what_is_not_hooked(capsys, monkeypatch):
    monkeypatch.setattr(core_algos, "get_policy_loss_fn", core_algos.get_policy_loss_fn.__wrapped__)
    assert main(["check"]) == 1
    assert "verl.trainer.ppo.core_algos.get_policy_loss_fn is not hooked" in capsys.readouterr().out


def test_report_says_that_verl_did_not_load_the_plugin():
    code = """
import contextlib, io
from gtpo_verl.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["check"]) == 1
print(said.getvalue().replace(chr(10), " "))
"""
    assert "none leaves gtpo out: unset it" in last_line(code, **NOT_LOADED)
