"""`gtpo-verl openrlhf`."""

import pytest
from openrlhf_parser import make_parser

from gtpo_verl.openrlhf import command, options, ray_actors


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_the_hooks_are_for_gtpo_alone(estimator, monkeypatch):
    installed = []
    monkeypatch.setattr(ray_actors, "install", lambda: installed.append(True))
    words = [f"--{options.ESTIMATOR}", estimator, "--algo.kl.init_coef", "0", "--rollout.n_samples_per_prompt", "8"]
    parser = make_parser()
    options.parse_args(parser.parse_args, parser, (words,), {})
    assert bool(installed) == (estimator == "gtpo")


def test_an_older_openrlhf_is_refused_before_it_is_imported(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "version", lambda name: "0.10.3")
    with pytest.raises(SystemExit, match=r"OpenRLHF 0\.10\.4 or later; .*0\.10\.3: upgrade openrlhf$"):
        command.main()
