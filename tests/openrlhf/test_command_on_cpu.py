"""`gtpo-verl openrlhf`."""

import argparse

import pytest
import wrapt

from gtpo_verl.openrlhf import command, hooks, options

ESTIMATORS = ["gae", "group_norm", "dr_grpo"]
# As of OpenRLHF 0.11.2, with its defaults.
DEFAULTS = {
    "actor.entropy_coef": None,
    "actor.loss_agg_mode": "token-mean",
    "algo.advantage.no_std_norm": False,
    "algo.dynamic_filtering_enable": False,
    "algo.kl.init_coef": 0.01,
    "ckpt.load_enable": False,
    "ckpt.path": "./ckpt/checkpoints_ppo_ray",
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.async_enable": False,
    "train.batch_size": 128,
    "train.max_epochs": 1,
}
PAPER = {
    "actor.loss_agg_mode": "seq-mean-token-mean",
    "algo.kl.init_coef": 0,
    "rollout.batch_size": 1,
    "rollout.n_samples_per_prompt": 12,
    "train.batch_size": 12,
}


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """A version of OpenRLHF."""
    monkeypatch.setattr(options, "version", lambda name: "0.11.2")


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{options.ESTIMATOR}", choices=ESTIMATORS, default="gae")
    for name, default in DEFAULTS.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default or 0.0), "default": default}
        parser.add_argument(f"--{name}", **kind)
    return parser


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


def resume(folder, **changes):
    (folder / "_actor").mkdir(exist_ok=True)
    return parse(ckpt__load_enable=True, ckpt__path=folder, **changes)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_the_hooks_are_for_gtpo_alone(estimator, monkeypatch):
    installed = []
    monkeypatch.setattr(hooks, "install", lambda: installed.append(True))
    words = [f"--{options.ESTIMATOR}", estimator, "--algo.kl.init_coef", "0", "--rollout.n_samples_per_prompt", "8"]
    parser = make_parser()
    command._parse_args(parser.parse_args, parser, (words,), {})
    assert bool(installed) == (estimator == "gtpo")


def test_an_older_openrlhf_is_refused_before_it_is_imported(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "version", lambda name: "0.10.3")
    with pytest.raises(SystemExit, match="needs OpenRLHF 0.10.4 or later; this is 0.10.3: upgrade openrlhf$"):
        command.main()
