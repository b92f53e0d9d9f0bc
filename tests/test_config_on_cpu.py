import math

import pytest
from omegaconf import OmegaConf

from gtpo_verl import GTPOConfig


def test_defaults_are_the_papers():
    config = GTPOConfig.from_config(None)
    assert config == GTPOConfig(0.1, math.log(2), "auto", "all", None, "leading", 2.0, 0.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("entropy_coeff", -0.1),
        ("entropy_coeff", "much"),
        ("entropy_threshold", 0),
        ("entropy_threshold", math.nan),
        ("completion_filter", "maybe"),
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


def test_unquoted_on_and_off_of_yaml_are_understood():
    assert GTPOConfig(completion_filter=True).completion_filter == "on"
    assert GTPOConfig(completion_filter=False).completion_filter == "off"


def test_section_algorithm_and_missing_section_are_read_alike():
    section = OmegaConf.create({"entropy_coeff": 0.2})
    assert GTPOConfig.from_config(section) == GTPOConfig(entropy_coeff=0.2)
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": section})).entropy_coeff == 0.2
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo"})) == GTPOConfig()
    assert GTPOConfig.from_config(OmegaConf.create({"adv_estimator": "gtpo", "gtpo": None})) == GTPOConfig()


@pytest.mark.parametrize(
    ("completion_filter", "initial_entropy", "active"),
    [("auto", 0.69, True), ("auto", 0.7, False), ("auto", math.log(2), False), ("on", None, True), ("off", 0.1, False)],
)
def test_filter_is_active_iff_the_initial_entropy_is_low(completion_filter, initial_entropy, active):
    assert GTPOConfig(completion_filter=completion_filter).filter_is_active(initial_entropy) is active
