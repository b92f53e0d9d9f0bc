import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from gtpo_verl import GTPOConfig, config

ROOT = Path(__file__).resolve().parents[1]


def test_defaults_are_the_papers():
    assert GTPOConfig.from_config(None) == GTPOConfig(0.1, math.log(2), "auto", "all", None, "leading", 2.0, 0.0)


def test_the_recipes_config_has_every_key_with_its_default():
    recipe = OmegaConf.load(ROOT / "recipes/config/gtpo.yaml").algorithm.gtpo
    given_by_users = {"dump_dir": None, "dump_freq": 10}  # with a +, which Hydra refuses for a key that is there
    assert OmegaConf.to_container(recipe) | given_by_users == asdict(GTPOConfig())


def test_the_document_of_keys_has_every_key_with_its_default():
    section = (ROOT / "docs/keys.md").read_text().split("## ")[1]
    table = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE))
    assert {key: yaml.safe_load(default) for key, default in table.items()} == asdict(GTPOConfig())


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
        ("conflict_weight_positive", None),
        ("conflict_weight_negative", math.inf),
    ],
)
def test_value_out_of_range_names_key_and_value(key, value):
    with pytest.raises(ValueError, match=rf"algorithm\.gtpo\.{key}={value!r}"):
        GTPOConfig.from_config({"adv_estimator": "gtpo", "gtpo": {key: value}})


def test_unknown_key_names_the_nearest_one():
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.entropy_coef=.*did you mean entropy_coeff"):
        GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": {"entropy_coef": 0.1}}))


@pytest.mark.parametrize(("old", "new"), [("on", "always"), (True, "always"), ("off", "never"), (False, "never")])
def test_old_words_of_the_completion_filter_are_read_with_one_note(old, new, caplog):
    config._note_old_filter_word.cache_clear()
    assert [GTPOConfig(completion_filter=old).completion_filter for _ in range(2)] == [new, new]
    (record,) = caplog.records
    assert record.getMessage() == f"algorithm.gtpo.completion_filter={old} is the old word for {new}; both are read"


def test_section_algorithm_and_missing_section_are_read_alike():
    section = OmegaConf.create({"entropy_coeff": 0.2})
    assert GTPOConfig.from_config(section) == GTPOConfig(entropy_coeff=0.2)
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": section})).entropy_coeff == 0.2
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
