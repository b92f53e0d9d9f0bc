"""The documents against the code: links, commands, and facts that stand in both."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

import gtpo_verl
from gtpo_verl import cli
from gtpo_verl.verl_plugin.compat import SUPPORTED_VERL
from recipes import __main__ as clones

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "[!.]*/*.md", "docs/results/*/*.md", "patches/*/*.md", "tests/*/*.md")
DOCUMENTS = sorted(page for pattern in PAGES for page in ROOT.glob(pattern))


def blocks(document):
    return re.findall(r"^```(?:bash|console)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@each_document
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def anchors(document):
    """Of its headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {title.replace(" ", "-") for title in titles}


@each_document
def test_every_link_to_a_heading_leads_to_one(document):
    links = re.findall(r"\]\(([^)#\s:]*\.md)?#([^)\s]+)\)", document.read_text())
    assert [at for page, at in links if at not in anchors(document.parent / page if page else document)] == []


def expanded(name):
    """`a/{b,c}.py` as a shell has it."""
    head, brace, rest = name.partition("{")
    choices, _, tail = rest.partition("}")
    return [made for choice in choices.split(",") for made in expanded(head + choice + tail)] if brace else [name]


FOLDERS = "docs|examples|gtpo_verl|patches|recipes|scripts|studies|tests"


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, *ROOT.glob("scripts/*.sh")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_file_that_is_named_exists(document):
    named = re.findall(rf"(?<![\w/])(?:{FOLDERS})/[\w/.{{}},-]*(?:\.\w+|/)(?![\w{{]|/\w)", document.read_text())
    verls_own = "patches" in document.relative_to(ROOT).parts
    files = [path for name in named for path in expanded(name) if not path.startswith("tests/AIME")]
    assert verls_own or [path for path in files if not (ROOT / path).exists()] == []


@each_document
def test_every_test_that_is_named_exists(document):
    named = re.findall(r"`((?:tests/[\w/]+\.py::)?test_\w+)`", document.read_text())
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/*.py"))
    verls_own = "patches" in document.relative_to(ROOT).parts
    assert verls_own or [name for name in named if f"def {name.rpartition('::')[2]}(" not in tests] == []


PROGRAMS = {"gtpo-verl": cli, "python3 -m recipes": clones}


def commands(document):
    """The commands of ours that a document gives, as program and words."""
    lines = "\n".join(blocks(document)).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:gtpo-verl|python3 -m recipes) [^`\n]+)`", document.read_text())
    for line in lines:
        line = re.sub(r"^(?:[A-Z_]+=\S+ )*", "", line)
        for program in PROGRAMS:
            if line.startswith(f"{program} "):
                words = shlex.split(line.removeprefix(program), comments=True)
                if not words[0].startswith("-"):
                    yield program, words


COMMANDS = [
    pytest.param(program, words, id=f"{document.relative_to(ROOT)}: {' '.join([program, *words])[:80]}")
    for document in DOCUMENTS
    for program, words in commands(document)
]


def test_the_documents_have_commands():
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("program", "words"), COMMANDS)
def test_every_command_exists_and_has_the_options_that_are_given(program, words, capsys):
    with pytest.raises(SystemExit):
        PROGRAMS[program].main([words[0], "--help"])
    usage = capsys.readouterr().out
    own = words[: words.index("--") if "--" in words else None]
    assert usage
    if words[0] != "openrlhf":  # whose options are OpenRLHF's
        assert [word for word in own if word.startswith("--") and word not in usage] == []


def test_what_this_is_is_said_once_in_one_sentence():
    sentence = cli.DESCRIPTION
    assert (ROOT / "README.md").read_text().startswith(f"# {sentence}\n")
    assert f'description = "{sentence}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f'\ntitle: "{sentence}"\n' in (ROOT / "CITATION.cff").read_text()
    assert (gtpo_verl.__doc__ or "").startswith(f"{sentence}.\n")


def test_a_release_has_one_version():
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    entries = re.findall(r"^## (\S+), \S+$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_recipe_for_verl_recipe_installs_one_commit_of_the_plugin():
    folder = ROOT / "patches/verl-recipe/gtpo"
    address = re.compile(r"pip install git\+https://github.com/gtpo-verl/gtpo-verl(\S*)")
    (readme,) = address.findall((folder / "README.md").read_text())
    (required,) = address.findall((folder / "REQUIRED_VERL.txt").read_text())
    assert readme == required and re.fullmatch("@[0-9a-f]{40}", readme)


def test_every_supported_verl_has_a_row():
    rows = re.findall(r"^\| (\d\S*) \|", (ROOT / "docs/versions.md").read_text(), re.MULTILINE)
    assert tuple(reversed(dict.fromkeys(rows))) == SUPPORTED_VERL  # the newest first


def test_every_variable_of_the_gpu_recipe_is_documented_and_no_other():
    recipe = "".join((ROOT / "recipes" / name).read_text() for name in ("run_gtpo_qwen.sh", "common.sh"))
    table = (ROOT / "recipes/README.md").read_text().split("## Variables\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"`([A-Z_]+)`", "".join(re.findall(r"^\|.*?\|", table, re.MULTILINE))))
    read = set(re.findall(r"\$\{([A-Z_]+)(?::-|\})", recipe)) - {"RAY_ADDRESS", "VERL_PLATFORM"}
    assert read == documented


def test_the_table_of_seconds_on_a_gpu_is_of_its_logs():
    page = (ROOT / "docs/results/gpu/README.md").read_text()
    columns = re.search(r"^\| \| command \| (step .*) \|$", page, re.MULTILINE)[1].replace("of it ", "").split(" | ")
    keys = {"tokens/s": "perf/throughput", "peak GB of training": "actor/perf/max_memory_allocated_gb"}
    rows = re.findall(r"^\| [^|]+ \| \[([\w-]+)\]\(\S+/command.sh\)[^|]* \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for name, cells in rows:
        steps = pd.read_json(ROOT / "docs" / "results" / "gpu" / name / "metrics.jsonl", lines=True)
        medians = steps[2:].median()
        for column, cell in zip(columns, cells.split(" | "), strict=True):
            value = medians.get(keys.get(column, f"timing_s/{column.strip('`')}"))
            assert (cell == "–") == (value is None), (name, column)
            digits = len(cell.partition(".")[2])
            assert value is None or float(cell) == pytest.approx(value, abs=0.5001 * 10**-digits), (name, column)
