"""What the check does within a process; in processes of their own: tests/e2e/test_check_on_cpu.py."""

import shlex
from pathlib import Path

import pytest
import verl.trainer
from hydra import initialize_config_dir
from hydra._internal import config_loader_impl
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import OmegaConf
from verl_config import COMPLETE, verl_config

from gtpo_verl.tools.check import intercept, settings
from gtpo_verl.tools.check.finding import Finding

GTPO = [*COMPLETE, "algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8"]


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture(autouse=True)
def ends(monkeypatch):
    def end(last_line, status):
        raise Ended(last_line, status)

    monkeypatch.setattr(intercept, "end", end)
    monkeypatch.setattr(intercept, "_command_findings", {})
    loader = config_loader_impl.ConfigLoaderImpl
    apply = loader._apply_overrides_to_config
    monkeypatch.setattr(
        loader, apply.__name__, staticmethod(lambda *args: intercept._apply_overrides(apply, None, args, {}))
    )
    monkeypatch.setenv("GTPO_CHECK", "settings")


def compose(*words):
    with initialize_config_dir(str(Path(verl.trainer.__path__[0], "config")), version_base=None):
        hydra = GlobalHydra.instance().hydra
        call = {"config_name": "ppo_trainer", "overrides": list(words), "run_mode": RunMode.RUN}
        return intercept._compose(hydra.compose_config, hydra, (), call)


def judge(config):
    with pytest.raises(Ended) as ended:
        intercept._check(None, None, (), {"config": config})
    return ended.value.args


def test_all_keys_that_hydra_refuses_are_found_at_once():
    wrong = ["+trainer.val_before_train=False", "trainer.save_frequency=3", "algorithm.adv_estimater=gtpo"]
    config = compose(*wrong, "data.train_batchsize=4", "data.train_batch_size=8", "+mine.own=1")
    assert {x.subject: x.remedy for x in intercept._command_findings} == {
        "trainer.val_before_train": "leave its + out",
        "trainer.save_frequency": "did you mean trainer.save_freq?",
        "algorithm.adv_estimater": "did you mean algorithm.adv_estimator?",
        "data.train_batchsize": "did you mean data.train_batch_size?",
    }
    assert config.data.train_batch_size == 8 and config.mine.own == 1 and not config.trainer.val_before_train


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("++trainer.val_befor_train=False", "did you mean trainer.val_before_train?"),
        ("++data.train_batchsize=4", "did you mean data.train_batch_size?"),
        ("+trainer.savefreq=5", "did you mean trainer.save_freq?"),
        ("+actor_rollout_ref.rollout.temprature=0.9", "did you mean actor_rollout_ref.rollout.temperature?"),
        ("+actor_rollout_ref.actor.load_weight=True", "verl 0.8.0 was the last"),
        ("++algorithm.rollout_is_threshold=3", "write algorithm.rollout_correction.rollout_is_threshold=3"),
    ],
)
def test_a_key_that_plus_adds_to_verls_sections_is_looked_at_as_one_without(word, remedy):
    config = compose(*GTPO, word)
    (finding,) = intercept._command_findings
    assert finding.subject == word.lstrip("+").partition("=")[0] and remedy in finding.remedy
    assert OmegaConf.select(config, finding.subject) is None
    intercept._command_findings.clear()
    key = finding.remedy.partition("mean ")[2].partition("?")[0]
    written = finding.remedy.partition("write ")[2]
    right = [f"{key}={word.partition('=')[2]}"] if key else written.split()
    assert right or finding.remedy.endswith(": remove it")
    compose(*GTPO, *right)
    assert not intercept._command_findings


@pytest.mark.parametrize(
    "word",
    [
        "+actor_rollout_ref.rollout.limit_images=2",  # a field of verl's dataclass
        "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.enforce=True",
        "+algorithm.gtpo.entropy_coeff=0.1",
        "+trainer.collapse_watch=warn",
        "+data.my_own=1",
        "+mine.own=1",
    ],
)
def test_a_key_that_verl_or_somebody_reads_may_be_added(word):
    compose(*GTPO, word)
    assert not intercept._command_findings


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("trainer.val_generations_to_log_to_wandb=5", "trainer.log_val_generations=10"),
        ("reward_model.overlong_buffer.enable=True", "+reward.reward_kwargs.overlong_buffer_cfg.enable=False"),
        ("algorithm.rollout_is=token", "algorithm.rollout_correction.rollout_is=sequence"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["old first", "new first"])
def test_a_remedy_does_not_write_over_what_is_given_already(old, new, is_first):
    compose(*GTPO, *([old, new] if is_first else [new, old]))
    (finding,) = intercept._command_findings
    assert finding.subject == old.partition("=")[0]
    assert f"{new.lstrip('+')} is given" in finding.remedy and finding.remedy.endswith("remove it")
    intercept._command_findings.clear()
    compose(*GTPO, new)
    assert not intercept._command_findings


@pytest.mark.parametrize("word", ["trainer.project_name=x=y", "trainer.default_local_dir=/runs/a{b}c", "data.seed=[1"])
def test_an_override_that_hydra_cannot_read_is_named_with_how_to_write_it(word):
    with pytest.raises(Ended) as ended:
        compose(*GTPO, word)
    line, status = ended.value.args
    assert status == 1 and f"cannot read {word}" in line
    (quoted,) = shlex.split(line.partition("quote the value, ")[2])
    assert OmegaConf.select(compose(*GTPO, quoted), word.partition("=")[0]) == word.partition("=")[2]


@pytest.mark.parametrize(("word", "says"), [("", "is empty"), ("my/grpo.yaml", "--config-path")])
def test_an_argument_that_is_no_override_is_named(word, says):
    with pytest.raises(Ended) as ended:
        compose(*GTPO, word)
    assert says in ended.value.args[0]


def test_an_interrupt_ends_the_check_with_130_and_no_trace(monkeypatch, capfd):
    def interrupted(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(settings, "check", interrupted)
    with pytest.raises(Ended) as judging:
        intercept._check(None, None, (), {"config": verl_config(*GTPO)})
    with pytest.raises(Ended) as running:
        intercept._run_main(interrupted, None, (), {})
    with pytest.raises(Ended) as composing:
        intercept._compose(interrupted, None, (), {})
    assert {ended.value.args[1] for ended in (judging, running, composing)} == {130}
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("words", [["algorithm=null"], ["~critic"], ["actor_rollout_ref.rollout=null"], ["~data"]])
def test_a_section_that_is_taken_away_ends_in_a_line(words, capsys):
    try:
        config = compose(*GTPO, *words)
        intercept._check(None, None, (), {"config": OmegaConf.masked_copy(config, set(config) - {"hydra"})})
    except Ended as ended:
        line, status = ended.args
    assert status == 1 and line.startswith(("checked: ", "not checked: ")) and "check itself failed" not in line


def test_hydras_folder_is_a_temporary_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(*GTPO)
    assert "gtpo-check-" in config.hydra.run.dir and Path(config.hydra.run.dir).is_dir()
    assert config.hydra.sweep.dir == config.hydra.run.dir and not any(tmp_path.iterdir())


def test_what_hydra_refuses_otherwise_ends_the_run_unchecked():
    with pytest.raises(Ended) as ended:
        compose("my/grpo.yaml")
    line, status = ended.value.args
    assert line.startswith("not checked: ") and "grpo.yaml" in line and status == 1


USE_DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz"


def test_an_empty_variable_of_the_shell_is_named_with_all_else_that_is_wrong(capsys):
    wrong = ["trainer.nnodes=", "trainer.n_gpus_per_node=eight", f"{USE_DYNAMIC}=maybe"]
    config = compose(*COMPLETE, *wrong, "actor_rollout_ref.rollout.mode=sync")
    line, status = judge(OmegaConf.masked_copy(config, set(config) - {"hydra"}))
    out = capsys.readouterr().out
    assert line.startswith("checked: ") and status == 1 and "Rollout mode 'sync'" in out
    for key, value in (("trainer.nnodes", ""), ("trainer.n_gpus_per_node", "eight"), (USE_DYNAMIC, "maybe")):
        assert f"problem: {key}: is '{value}': give " in out


WARNING, PROBLEM = Finding("a", "b", advice="c"), Finding("d", "e", "f")


@pytest.mark.parametrize(
    ("found", "counts", "printed"),
    [
        (([WARNING], []), "no problem", "warning: a: b: c\n"),
        (
            ([WARNING, PROBLEM], [PROBLEM]),
            "1 problem in its settings, 1 problem on this machine",
            "warning: a: b: c\n" + "problem: d: e: f\n" * 2,
        ),
    ],
    ids=["sound", "problems"],
)
def test_the_last_line_counts_the_problems_and_the_status_says_whether_there_are_any(
    found, counts, printed, monkeypatch, capsys
):
    monkeypatch.setattr(settings, "check", lambda config, with_machine: found)
    monkeypatch.setattr(intercept, "status_if_sound", 0)
    line, status = judge(verl_config(*GTPO))
    assert line.startswith("checked: ") and line.endswith(counts) and status == (0 if counts == "no problem" else 1)
    assert capsys.readouterr().out == printed


def test_the_config_of_its_caller_stays_as_it_is():
    config = verl_config(*GTPO, "trainer.logger=[wanbd]")
    before = config.copy()
    judge(config)
    assert config == before


def test_a_check_that_fails_is_no_judgement(capfd):
    line, status = judge({"not": "a config"})
    assert line.startswith("not checked: ") and status == 1 and "Traceback" in capfd.readouterr().err


@pytest.mark.parametrize(
    "module",
    ["trainer.sft_trainer", "trainer.main_generation_server", "trainer.main_eval", "model_merger"],
)
def test_modules_of_verl_that_are_no_ppo_trainers_end_before_they_start(module):
    with pytest.raises(Ended, match="not checked: "):
        intercept.end_if_never_checked(f"verl.{module}")


@pytest.mark.parametrize(
    "module", ["", "mine", "verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo", "verl.no_such"]
)
def test_other_modules_start(module):
    intercept.end_if_never_checked(module)


def exits():
    raise SystemExit(0)


@pytest.mark.parametrize("main", [lambda: None, exits], ids=["ends", "exits"])
def test_a_main_that_ends_or_fails_without_a_judgement_ends_there(main, capfd):
    with pytest.raises(Ended, match="not checked: ") as ended:
        intercept._run_main(main, None, (), {})
    assert ended.value.args[1] == 1


@pytest.mark.parametrize("value", ["0", "yes", "machine"])
def test_another_value_of_the_variable_is_named(monkeypatch, value):
    monkeypatch.setenv("GTPO_CHECK", value)
    with pytest.raises(ValueError, match=f"GTPO_CHECK={value}: .*1 or settings; .*unset"):
        intercept.install()
