"""What `import gtpo_verl` gives."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

import gtpo_verl

PAGE = Path(__file__).resolve().parents[1] / "docs/api.md"


@pytest.mark.parametrize("name", gtpo_verl.__all__)
def test_every_exported_name_is_there_and_is_shown(name):
    assert name in dir(gtpo_verl) and getattr(gtpo_verl, name) is vars(gtpo_verl)[name]
    assert name in gtpo_verl.__doc__ or name in ("GTPOAdvantage", "__version__")


def test_another_name_is_an_error():
    with pytest.raises(AttributeError, match="'compute_gpto'"):
        gtpo_verl.compute_gpto  # noqa: B018


def test_the_version_is_that_of_the_installed_package():
    assert gtpo_verl.__version__ == version("gtpo-verl")


def test_each_example_of_the_page_gives_what_its_last_line_says():
    """They run one after the other; behind the last line of each stands what its expression gives."""
    scope = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    for block in blocks:
        *_, last = block.splitlines()
        expression, _, expected = last.partition("  # ")
        exec(block, scope)
        assert str(eval(expression, scope)) == expected


def test_the_page_names_every_function():
    named = {*re.findall(r"`(\w+)`", PAGE.read_text())}
    assert {name for name in gtpo_verl.__all__ if name != "__version__"} <= named
