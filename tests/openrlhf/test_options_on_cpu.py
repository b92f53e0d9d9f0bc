"""OpenRLHF's command line with `gtpo`, on a parser with its options; OpenRLHF itself is not needed."""

import argparse
from dataclasses import fields

import pytest
import wrapt
from openrlhf_parser import DEFAULTS, ESTIMATORS, make_parser

from gtpo_verl import GTPOConfig
from gtpo_verl.openrlhf import options
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig

PAPER = {
    "actor.loss_agg_mode": "seq-mean-token-mean",
    "algo.kl.init_coef": 0,
    "rollout.batch_size": 1,
    "rollout.n_samples_per_prompt": 12,
    "train.batch_size": 12,
}


@pytest.fixture(autouse=True)
def no_openrlhf(monkeypatch):
    """The choice `gtpo` would change its classes."""
    monkeypatch.setattr(options.ray_actors, "install", lambda: None)


def parse(estimator="gtpo", **changes):
    """Parse as OpenRLHF does; `changes` have `__` for a dot."""
    parser = make_parser()
    parser.parse_args = wrapt.FunctionWrapper(parser.parse_args, options.parse_args)
    words = [f"--{options.ESTIMATOR}", estimator]
    for name, value in (PAPER | {name.replace("__", "."): value for name, value in changes.items()}).items():
        words += [f"--{name}", *([] if value is True else [str(value)])]
    return parser.parse_args(words)


def refusal(capsys, **changes):
    with pytest.raises(SystemExit) as exit:
        parse(**changes)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gtpo-verl openrlhf: ")
    return line


def test_settings_travel_in_openrlhfs_arguments():
    args = parse(algo__gtpo='{"entropy_coeff": 0.5}')
    assert getattr(args, options.ESTIMATOR) == "gtpo"
    assert getattr(args, options.SETTINGS) == options.OpenRLHFGTPOConfig(entropy_coeff=0.5)


def test_defaults_are_the_papers_and_nothing_is_to_be_said(caplog):
    assert getattr(parse(), options.SETTINGS) == options.OpenRLHFGTPOConfig()
    assert not caplog.records


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_other_estimators_are_left_alone(estimator):
    plain = make_parser().parse_args([f"--{options.ESTIMATOR}", estimator, "--algo.kl.init_coef", "0.3"])
    parsed = parse(estimator, algo__kl__init_coef=0.3)
    changed = vars(plain) | {name: getattr(parsed, name) for name in PAPER if name != "algo.kl.init_coef"}
    assert vars(parsed) == changed


def test_settings_without_the_estimator_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("group_norm", algo__gtpo='{"entropy_coeff": 0.5}')
    err = capsys.readouterr().err
    assert ended.value.code == 2 and '--algo.gtpo {"entropy_coeff": 0.5}: ' in err
    assert "--algo.advantage.estimator gtpo" in err


@pytest.mark.parametrize(
    "option, choices", [("model", None), (options.ESTIMATOR, [*ESTIMATORS, "gtpo"])], ids=["other", "own gtpo"]
)
def test_another_parser_and_one_with_gtpo_of_openrlhfs_own_are_left_alone(option, choices):
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{option}", choices=choices)
    parse_args = wrapt.FunctionWrapper(parser.parse_args, options.parse_args)
    assert vars(parse_args([f"--{option}", "gtpo"])) == {option: "gtpo"}


@pytest.mark.parametrize(
    ("changes", "setting", "remedy"),
    [
        ({"algo__kl__init_coef": 0.01}, "--algo.kl.init_coef 0.01: ", "set it to 0"),
        ({"rollout__n_samples_per_prompt": 1}, "--rollout.n_samples_per_prompt 1: ", "at least 2"),
        ({"algo__gtpo": "entropy_coeff=1"}, "--algo.gtpo entropy_coeff=1: ", """'{"entropy_coeff": 0.1}'"""),
        ({"algo__gtpo": "[1]"}, "--algo.gtpo [1]: ", """'{"entropy_coeff": 0.1}'"""),
        ({"algo__gtpo": '{"gtpo": {}, "entropy_coeff": 1}'}, "--algo.gtpo ", "gtpo is a key of verl's algorithm"),
        ({"algo__gtpo": '{"adv_estimator": "gtpo"}'}, "--algo.gtpo ", "adv_estimator is a key of verl's algorithm"),
        ({"algo__gtpo": '{"entropy_coef": 1}'}, "algo.gtpo.entropy_coef=1: unknown key", " entropy_coeff?"),
        ({"algo__gtpo": '{"entropy_coeff": -1}'}, "algo.gtpo.entropy_coeff=-1: ", "at least 0"),
        ({"algo__gtpo": '{"dump_dir": "x"}'}, "algo.gtpo.dump_dir='x': unknown key", "plugin for verl"),
        ({"algo__gtpo": '{"base": "rloo"}'}, "algo.gtpo.base='rloo': unknown key", "plugin for verl"),
        ({"algo__gtpo": '{"entropy_from": "update"}'}, "algo.gtpo.entropy_from='update': unknown key", "remove it"),
    ],
)
def test_wrong_setting_is_one_line_with_its_remedy(changes, setting, remedy, capsys):
    line = refusal(capsys, **changes)
    assert f" {setting}" in line and remedy in line.partition(setting)[2]
    assert "algorithm." not in line


def test_a_temperature_is_refused_where_its_entropy_would_be_wrong(monkeypatch, capsys):
    parse(rollout__temperature=0.6)
    monkeypatch.setattr(options, "version", lambda name: "0.11.0")
    parse()
    assert "--rollout.temperature 0.6: OpenRLHF 0.11.0 gives the" in refusal(capsys, rollout__temperature=0.6)


def test_a_newer_openrlhf_is_named(monkeypatch, caplog):
    monkeypatch.setattr(options, "version", lambda name: "0.12.0")
    parse()
    assert "this is 0.12.0" in caplog.text


@pytest.mark.parametrize(
    ("changes", "setting", "papers"),
    [
        ({"train__batch_size": 6}, "--train.batch_size 6", "12"),
        ({"train__max_epochs": 2}, "--train.max_epochs 2", "1: one update"),
        ({"train__async_enable": True}, "--train.async_enable True", "no rollouts"),
        ({"actor__loss_agg_mode": "token-mean"}, "--actor.loss_agg_mode token-mean", "seq-mean-token-mean"),
        ({"actor__entropy_coef": 0.1}, "--actor.entropy_coef 0.1", "none"),
        ({"actor__policy_loss_type": "gspo"}, "--actor.policy_loss_type gspo", "ppo"),
        ({"algo__advantage__is_correction_enable": True}, "--algo.advantage.is_correction_enable True", "off"),
        ({"algo__advantage__is_correction_level": "seq"}, "--algo.advantage.is_correction_level seq", "off"),
        ({"algo__dynamic_filtering_enable": True}, "--algo.dynamic_filtering_enable True", "groups without"),
        ({"algo__advantage__no_std_norm": True}, "--algo.advantage.no_std_norm True", "A_i over"),
        ({"rollout__temperature": 0.9}, "--rollout.temperature 0.9", "1.0"),
        ({"rollout__top_p": 0.9}, "--rollout.top_p 0.9", "1.0"),
    ],
)
def test_departure_from_the_paper_is_told(changes, setting, papers, caplog):
    parse(**changes)
    (record,) = caplog.records
    assert f"{setting}: in the paper {papers}" in record.getMessage()


def test_a_loss_of_another_mean_is_told_where_there_is_no_option_for_it(caplog, monkeypatch):
    monkeypatch.delitem(DEFAULTS, "actor.loss_agg_mode")
    monkeypatch.delitem(PAPER, "actor.loss_agg_mode")
    parse()
    assert "0.11.2" in caplog.text and "--actor.loss_agg_mode seq-mean-token-mean" in caplog.text


def resume(folder, **changes):
    (folder / "_actor").mkdir(exist_ok=True)
    return parse(ckpt__load_enable=True, ckpt__path=folder, **changes)


def test_resumed_run_needs_its_initial_entropy_and_one_without_a_checkpoint_is_new(tmp_path, capsys):
    parse(ckpt__load_enable=True, ckpt__path=tmp_path)
    with pytest.raises(SystemExit) as ended:
        resume(tmp_path)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and f"{InitialEntropy.path(tmp_path)}" in err and "algo.gtpo.initial_entropy " in err
    resume(tmp_path, algo__gtpo='{"initial_entropy": 0.5}')
    InitialEntropy(0.5).save(tmp_path, GTPOConfig())
    resume(tmp_path)


def test_a_damaged_record_is_told_and_ends_no_run_that_does_not_need_it(tmp_path, caplog):
    InitialEntropy.path(tmp_path).write_text("{")
    resume(tmp_path, algo__gtpo='{"completion_filter": "never"}')
    assert str(InitialEntropy.path(tmp_path)) in caplog.text and "settings changed is unknown" in caplog.text


def test_resumed_run_with_other_settings_is_told(tmp_path, caplog):
    InitialEntropy(0.5).save(tmp_path, GTPOConfig())
    resume(tmp_path, algo__gtpo='{"entropy_coeff": 0.2}')
    assert "algo.gtpo.entropy_coeff=0.2, was 0.1" in caplog.text


def test_verls_keys_are_those_of_its_config():
    own = {field.name for field in fields(VerlGTPOConfig)} - {field.name for field in fields(GTPOConfig)}
    assert own == {*options.KEYS_OF_VERL}
