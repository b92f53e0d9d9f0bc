from pathlib import Path

import pytest
import torch

from gtpo_verl import GTPOConfig
from gtpo_verl.algorithm.config import LN2
from gtpo_verl.openrlhf.options import OpenRLHFGTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy, changed_settings
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig


def test_padding_rows_are_not_measured():
    entropy = torch.tensor([0.2, 0.6, 0.0])
    measured = InitialEntropy.measure(entropy, torch.tensor([1, 5, 0]), ["a", "b", "pad"])
    assert (measured.value, measured.completions, measured.prompts) == (pytest.approx(0.4), 2, 2)
    assert measured.std == pytest.approx(0.2)


def test_no_completion_is_an_error():
    with pytest.raises(ValueError, match="^the initial entropy .*no completion"):
        InitialEntropy.measure(torch.zeros(2), torch.zeros(2, dtype=torch.int64), ["a", "a"])


@pytest.mark.parametrize(
    ("entropy", "config", "decision", "source", "may_be_chance"),
    [
        (InitialEntropy(0.48, 0.1, 8, 1), GTPOConfig(), "on: 0.480 < 0.693 nats", "8 completions of 1 prompts", True),
        (
            InitialEntropy(0.8, 0.1, 800, 100),
            GTPOConfig(),
            "off: 0.800 >= 0.693 nats",
            "800 completions of 100 prompts",
            False,
        ),
        (InitialEntropy(LN2), GTPOConfig(), "off: 0.693 >= 0.693 nats", "algorithm.gtpo.initial_entropy", False),
        (
            InitialEntropy(0.8),
            GTPOConfig(completion_filter="always"),
            "on: 0.800 >= 0.693 nats",
            "algorithm.gtpo.initial_entropy",
            False,
        ),
    ],
    ids=["few prompts", "many prompts", "set", "always"],
)
def test_decision_has_the_numbers_that_it_rests_on(entropy, config, decision, source, may_be_chance):
    numbers, origin, setting = entropy.decision(config).split(", ")
    assert numbers == f"completion filter {decision}" and origin.endswith(source)
    assert setting.startswith(f"completion_filter={config.completion_filter}")
    for remedy in ("algorithm.gtpo.initial_entropy", "`gtpo-verl initial-entropy`"):
        assert (remedy in setting) is may_be_chance


@pytest.mark.parametrize(
    ("value", "prompts", "chance"),
    [(0.346, 2, False), (0.347, 2, True), (1.386, 2, True), (1.387, 2, False), (0.6, 15, True), (0.6, 16, False)],
)
def test_few_prompts_near_the_threshold_may_be_chance(value, prompts, chance):
    measured = InitialEntropy(value, 0.1, 8 * prompts, prompts)
    assert measured.may_be_chance(GTPOConfig()) is chance
    assert not measured.may_be_chance(GTPOConfig(completion_filter="always"))
    assert not InitialEntropy(value).may_be_chance(GTPOConfig())  # given, not measured


def test_a_run_begins_with_what_is_set_or_recorded(tmp_path):
    record, auto, never = InitialEntropy(0.1), GTPOConfig(), GTPOConfig(completion_filter="never")
    assert InitialEntropy.known_before(auto, None) is InitialEntropy.known_before(never, tmp_path) is None
    with pytest.raises(
        ValueError, match=rf"{InitialEntropy.path(tmp_path)} .*missing; .*algorithm\.gtpo\.initial_entropy"
    ):
        InitialEntropy.known_before(auto, tmp_path)
    record.save(tmp_path, auto)
    assert InitialEntropy.known_before(auto, tmp_path) == InitialEntropy.known_before(never, tmp_path) == record
    assert InitialEntropy.known_before(GTPOConfig(initial_entropy=0.5), tmp_path) == InitialEntropy(0.5)


def test_record_survives_a_round_trip(tmp_path):
    measured = InitialEntropy(0.1234567890123, 0.5, 64, 8)
    path = measured.save(tmp_path / "run/checkpoints", GTPOConfig())
    assert path == InitialEntropy.path(tmp_path / "run/checkpoints")
    assert InitialEntropy.load(tmp_path / "run/checkpoints") == measured
    assert path.read_text().splitlines()[1] == '  "value": 0.1234567890123,'
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    InitialEntropy(0.0).save(tmp_path / "run/checkpoints", GTPOConfig())
    assert InitialEntropy.load(tmp_path / "run/checkpoints").value == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ('{"value": 0.1, "st', "Unterminated string"),
        ("[]", "expected an object"),
        ("{}", "missing 1 required"),
        ('{"value": NaN}', "value=nan"),
        ('{"value": "high"}', "real number"),
        ('{"value": -1}', "value=-1"),
        ('{"v": 0.1}', "'v'"),
        ('{"value": 0.1, "prompts": null}', "real number"),
        ('{"value": 0.1, "prompts": "few"}', "real number"),
        ('{"value": 0.1, "completions": -1}', "completions=-1"),
        ('{"value": 1' + "0" * 400 + "}", "too large"),
    ],
)
def test_a_truncated_or_edited_record_names_its_file_and_the_key_to_set(tmp_path, text, why):
    path = InitialEntropy.path(tmp_path)
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{path} is not .*{why}.*algorithm\.gtpo\.initial_entropy"):
        InitialEntropy.load(tmp_path)


@pytest.mark.parametrize("completion_filter", ["always", "never"])
def test_a_damaged_record_is_no_error_where_the_filter_needs_none(tmp_path, caplog, completion_filter):
    InitialEntropy.path(tmp_path).touch()
    assert InitialEntropy.known_before(GTPOConfig(completion_filter=completion_filter), tmp_path) is None
    assert f"{InitialEntropy.path(tmp_path)} is not" in caplog.text
    with pytest.raises(ValueError, match=f"{InitialEntropy.path(tmp_path)} is not"):
        InitialEntropy.known_before(GTPOConfig(), tmp_path)


@pytest.mark.parametrize("config", [GTPOConfig(), OpenRLHFGTPOConfig()], ids=["verl", "OpenRLHF"])
def test_a_full_disk_leaves_the_old_record_and_the_run_goes_on(tmp_path, monkeypatch, caplog, config):
    old = InitialEntropy(0.1)
    old.save(tmp_path, GTPOConfig())

    def write_bytes(path, content):
        with path.open("wb") as file:
            file.write(content[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert InitialEntropy(0.2).save(tmp_path, config) is None
    assert "([Errno 28]" in caplog.text and f"set {config.section}.initial_entropy=0.2" in caplog.text
    assert InitialEntropy.load(tmp_path) == old


def test_changed_settings_name_key_new_and_old_value(tmp_path):
    assert changed_settings(tmp_path, GTPOConfig()) == []
    InitialEntropy(0.1).save(tmp_path, VerlGTPOConfig(entropy_coeff=0.2, dump_dir="before"))
    assert changed_settings(tmp_path, GTPOConfig(entropy_coeff=0.2)) == []
    assert changed_settings(tmp_path, VerlGTPOConfig(conflict_span="all", dump_dir="now")) == [
        "algorithm.gtpo.entropy_coeff=0.1, was 0.2",
        "algorithm.gtpo.conflict_span=all, was leading",
    ]
    InitialEntropy.path(tmp_path).write_text('{"value": 0.1}')  # an earlier version wrote no settings
    assert changed_settings(tmp_path, GTPOConfig()) == []
    InitialEntropy.path(tmp_path).write_text('{"value": 0.1, "gtpo": 5}')
    with pytest.raises(ValueError, match=r"gtpo_initial_entropy\.json .*object gtpo"):
        changed_settings(tmp_path, GTPOConfig())
