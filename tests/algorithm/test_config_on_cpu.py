import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gtpo_verl import GTPOConfig
from gtpo_verl.verl_plugin.config import VerlGTPOConfig

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
    ("key", "value"),
    [
        ("entropy_coeff", -0.1),
        ("entropy_coeff", "much"),
        ("entropy_threshold", 0),
        ("entropy_threshold", math.nan),
        ("completion_filter", "maybe"),
        ("completion_filter", 1),
        ("filter_scope", True),
        ("initial_entropy", -1.0),
        ("conflict_span", "trailing"),
        ("conflict_masks", "upward"),
        ("conflict_weight_positive", None),
        ("conflict_weight_negative", math.inf),
    ],
)
def test_value_out_of_range_names_key_and_value(key, value):
    with pytest.raises(ValueError, match=rf"algorithm\.gtpo\.{key}={value!r}"):
        GTPOConfig.from_config({"adv_estimator": "gtpo", "gtpo": {key: value}})


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("filter_scope", "some", " is not one of all, negative"),
        ("entropy_coeff", -1, ": must be a number of at least 0"),
        ("entropy_threshold", 0, ": must be a number of nats per token above 0 (ln 2 in the paper)"),
        (
            "initial_entropy",
            -1,
            ": must be a number of nats per token of at least 0, or null to measure it on the first rollouts",
        ),
        ("entropy_from", "rollout", " is not one of old_log_prob, update"),
        ("dump_freq", 0, ": must be a whole number of steps of at least 1"),
        ("dump_freq", 1.5, ": must be a whole number of steps of at least 1"),
    ],
)
def test_an_error_gives_the_remedy(key, value, remedy):
    with pytest.raises(ValueError) as raised:
        VerlGTPOConfig(**{key: value})
    assert str(raised.value) == f"algorithm.gtpo.{key}={value!r}{remedy}"


def test_the_ends_of_the_ranges_are_allowed():
    config = VerlGTPOConfig(entropy_coeff=0, conflict_weight_positive=0, initial_entropy=0, dump_freq=1)
    assert (config.initial_entropy, config.dump_freq) == (0, 1)


def test_unknown_key_that_is_like_none_is_told_all():
    with pytest.raises(
        ValueError, match=r"algorithm\.gtpo\.x=1: there is no such key; the keys are entropy_coeff, entropy_"
    ):
        GTPOConfig.from_config({"x": 1})


def test_a_key_of_verls_is_refused_elsewhere_with_the_remedy():
    of_verl = asdict(VerlGTPOConfig()).keys() - asdict(GTPOConfig()).keys()
    assert of_verl == {"entropy_from", "dump_dir", "dump_freq"}
    for key in of_verl:
        with pytest.raises(
            ValueError,
            match=rf"^algorithm\.gtpo\.{key}=1: there is no such key; it is one of the plugin for verl: remove",
        ):
            GTPOConfig.from_config({key: 1})


@pytest.mark.parametrize("value", [0.1, "gtpo", [1], True])
def test_a_value_in_place_of_the_section_is_refused(value):
    with pytest.raises(ValueError, match=rf"^algorithm\.gtpo={re.escape(repr(value))} is no section: set a key of it"):
        GTPOConfig.from_config({"gtpo": value})


def test_unknown_key_names_the_nearest_one():
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.entropy_coef=.*did you mean entropy_coeff"):
        GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": {"entropy_coef": 0.1}}))


def test_section_algorithm_and_missing_section_are_read_alike():
    section = OmegaConf.create({"entropy_coeff": 0.2})
    assert GTPOConfig.from_config(section) == GTPOConfig(entropy_coeff=0.2)
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": section})).entropy_coeff == 0.2
    assert GTPOConfig.from_config({"gtpo": section}).entropy_coeff == 0.2
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo"})) == GTPOConfig()
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": None})) == GTPOConfig()


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
    with pytest.raises(ValueError) as raised:
        GTPOConfig().filter_is_active(None)
    assert str(raised.value) == (
        "algorithm.gtpo.completion_filter='auto' needs the initial entropy, which is None: measure it and set "
        "algorithm.gtpo.initial_entropy (nats per token), or set completion_filter to always or never"
    )
