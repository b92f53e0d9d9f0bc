"""The documents against the code: links, commands, and facts that stand in both."""

import re
import shlex
from pathlib import Path

import pytest

from gtpo_verl import cli
from gtpo_verl.verl_plugin.names_and_versions import SUPPORTED_VERL

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("patches/*/*.md")])


def blocks(document):
    return re.findall(r"^```(?:bash|console)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each_document
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


@each_document
def test_every_file_that_is_named_exists(document):
    named = re.findall(r"\b(?:docs|gtpo_verl|patches|recipes|scripts|tests)/[\w/.-]+\.\w+\b", document.read_text())
    verls_own = "patches" in document.relative_to(ROOT).parts
    assert verls_own or [path for path in named if not (ROOT / path).exists()] == []


@each_document
def test_every_command_has_the_options_that_are_given(document, capsys):
    for line in "\n".join(blocks(document)).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["gtpo-verl"]:
            with pytest.raises(SystemExit):
                cli.main([words[1], "--help"])
            usage = capsys.readouterr().out
            assert usage and [word for word in words if word.startswith("--") and word not in usage] == [], line


def test_every_supported_verl_has_a_row():
    rows = re.findall(r"^\| (\d\S*) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    assert tuple(reversed(dict.fromkeys(rows))) == SUPPORTED_VERL  # the newest first


def test_every_variable_of_the_gpu_recipe_is_documented_and_no_other():
    recipe = "".join((ROOT / "recipes" / name).read_text() for name in ("run_gtpo_qwen.sh", "common.sh"))
    table = (ROOT / "docs/keys.md").read_text().split("## Variables of the recipes")[1]
    documented = set(re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\|.*?\|", table, re.MULTILINE))))
    read = set(re.findall(r"\$\{([A-Z_]+)(?::-|\})", recipe)) - {"RAY_ADDRESS", "VERL_PLATFORM"}
    assert read == documented
