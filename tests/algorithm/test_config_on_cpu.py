import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gtpo_verl import GTPOConfig
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig

ROOT = Path(__file__).resolve().parents[2]


def test_defaults_are_the_papers():
    assert GTPOConfig.from_config(None) == GTPOConfig(0.1, math.log(2), "auto", "all", None, "leading", 2.0, 0.0)


def test_the_recipes_config_has_every_key_with_its_default():
    recipe = OmegaConf.load(ROOT / "recipes/config/gtpo.yaml").algorithm.gtpo
    given_by_users = {"dump_dir": None, "dump_freq": 10}  # with a +, which Hydra refuses for a key that is there
    assert OmegaConf.to_container(recipe) | given_by_users == asdict(VerlGTPOConfig())


def test_the_document_of_keys_has_every_key_with_its_default():
    section = (ROOT / "docs/keys.md").read_text().split("## ")[1]
    table = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE))
    assert {key: yaml.safe_load(default) for key, default in table.items()} == asdict(VerlGTPOConfig())


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("entropy_coeff", -0.1, "at least 0$"),
        ("entropy_coeff", "much", "at least 0$"),
        ("entropy_threshold", 0, "nats .*above 0"),
        ("entropy_threshold", math.nan, "nats .*above 0"),
        ("completion_filter", "maybe", " auto, always, never$"),
        ("completion_filter", 1, " auto, always, never$"),
        ("filter_scope", True, " all, negative$"),
        ("initial_entropy", -1.0, "nats per token .*at least 0, or null"),
        ("conflict_span", "trailing", " leading, first, all, none$"),
        ("conflict_masks", "upward", " both, forward, backward$"),
        ("conflict_weight_positive", None, "at least 0$"),
        ("conflict_weight_negative", math.inf, "at least 0$"),
        ("min_correct_reward", "all", "right answer, or null$"),
        ("base", "rlo", " gtpo, rloo, opo$"),
        ("entropy_from", "rollout", " old_log_prob, update$"),
        ("dump_freq", 0, "whole number .*at least 1$"),
        ("dump_freq", 1.5, "whole number .*at least 1$"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_key_and_what_it_takes(key, value, takes):
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo\.{key}={value!r}(:| is) .*{takes}"):
        VerlGTPOConfig.from_config({"adv_estimator": "gtpo", "gtpo": {key: value}})


def test_the_ends_of_the_ranges_are_allowed():
    config = VerlGTPOConfig(entropy_coeff=0, conflict_weight_positive=0, initial_entropy=0, dump_freq=1)
    assert (config.initial_entropy, config.dump_freq) == (0, 1)


OF_VERL = sorted(asdict(VerlGTPOConfig()).keys() - asdict(GTPOConfig()).keys())


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("entropy_coef", r"entropy_coeff\b"),
        ("x", ", ".join(asdict(GTPOConfig()))),
        *((key, "plugin for verl .*remove") for key in OF_VERL),
    ],
)
def test_an_unknown_key_gives_the_nearest_one_or_all_and_one_of_verls_the_remedy(key, hint):
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo\.{key}=1: unknown key; .*{hint}"):
        GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": {key: 1}}))


def test_these_keys_are_the_plugins_alone():
    assert OF_VERL == ["allow_changed_advantages", "base", "dump_dir", "dump_freq", "entropy_from"]


@pytest.mark.parametrize(
    ("symbol", "keys"),
    [
        ("gamma", ["entropy_coeff"]),
        ("gama", ["entropy_coeff"]),
        ("lambda", ["conflict_weight_positive", "conflict_weight_negative"]),
        ("delta", ["completion_filter", "entropy_threshold"]),
    ],
)
def test_a_symbol_of_the_paper_gives_the_keys_that_set_it(symbol, keys):
    assert set(keys) <= asdict(GTPOConfig()).keys()
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo\.{symbol}=1: unknown key; .*{'.*'.join(keys)}"):
        GTPOConfig.from_config({"gtpo": {symbol: 1}})


def test_every_unknown_key_is_named():
    with pytest.raises(ValueError) as error:
        GTPOConfig.from_config({"gtpo": {"gama": 0.1, "entropy_coeff": 0.1, "lamda": 2, "x": 1}})
    named = [text.partition(": ")[0] for text in str(error.value).split("; algorithm")]
    assert named == ["algorithm.gtpo.gama=0.1", ".gtpo.lamda=2", ".gtpo.x=1"]


@pytest.mark.parametrize("value", [0.1, "gtpo", [1], True, False])
def test_a_value_in_place_of_the_section_is_refused(value):
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo={re.escape(repr(value))} is no mapping: .*entropy_coeff"):
        GTPOConfig.from_config({"gtpo": value})


def test_settings_that_are_no_mapping_are_named():
    with pytest.raises(ValueError, match=r"^algorithm\.gtpo=5 is no mapping: .*entropy_coeff"):
        GTPOConfig.from_config(5)


SECTION = OmegaConf.create({"entropy_coeff": 0.2})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SECTION, GTPOConfig(entropy_coeff=0.2)),
        (OmegaConf.create({"adv_estimator": "gtpo", "gtpo": SECTION}), GTPOConfig(entropy_coeff=0.2)),
        ({"gtpo": SECTION}, GTPOConfig(entropy_coeff=0.2)),
        (OmegaConf.create({"adv_estimator": "gtpo"}), GTPOConfig()),
        (OmegaConf.create({"adv_estimator": "gtpo", "gtpo": None}), GTPOConfig()),
    ],
    ids=["section", "algorithm", "dictionary", "no section", "empty section"],
)
def test_section_algorithm_and_missing_section_are_read_alike(config, expected):
    assert GTPOConfig.from_config(config) == expected


@pytest.mark.parametrize(
    ("completion_filter", "initial_entropy", "active"),
    [
        ("auto", 0.69, True),
        ("auto", 0.7, False),
        ("auto", math.log(2), False),
        ("always", None, True),
        ("never", 0.1, False),
    ],
)
def test_filter_is_active_iff_the_initial_entropy_is_low(completion_filter, initial_entropy, active):
    assert GTPOConfig(completion_filter=completion_filter).filter_is_active(initial_entropy) is active


def test_auto_without_an_initial_entropy_says_what_to_do():
    with pytest.raises(ValueError, match=r"^algorithm\.gtpo\.completion_filter='auto' .*None") as raised:
        GTPOConfig().filter_is_active(None)
    _, _, remedy = str(raised.value).partition(": ")
    assert "algorithm.gtpo.initial_entropy (nats per token)" in remedy
    assert remedy.endswith("always or never")


def test_an_initial_entropy_of_0_is_one():
    assert GTPOConfig().filter_is_active(0.0)
