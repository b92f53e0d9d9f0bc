"""The wall between what a user's run loads and what makes this project's evidence; its contracts: `lint-imports`."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from own_process import run_python

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
NOT_IN_THE_WHEEL = re.compile(r"(?<![/\w-])(?:docs|recipes|scripts|tests|studies|patches|examples)/[\w.-]+")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The folder of the wheel's files, which is then first on `sys.path`, and no clone is on it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    own = ["--no-deps", "--no-build-isolation", str(ROOT)]
    subprocess.run([*pip, "install", "--no-compile", "--target", str(folder), *own], check=True, cwd=folder)
    return folder


def in_the_wheel(wheel, code, *arguments, status=0):
    """What the code prints where the wheel is installed and this clone is not."""
    site = f"import sys; sys.path[:] = [{str(wheel)!r}, *sys.path, {sysconfig.get_path('purelib')!r}]\n"
    command = [sys.executable, "-S", "-I", "-c", site + code, *map(str, arguments)]  # no .pth files, no PYTHONPATH
    done = subprocess.run(command, cwd=wheel.parent, capture_output=True, text=True, timeout=900)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


COMMAND = "from gtpo_verl.cli import main; sys.exit(main(sys.argv[1:]))"


def test_the_wheel_has_the_package_and_nothing_else(wheel):
    assert {path.name for path in wheel.iterdir() if path.suffix != ".dist-info"} == {"bin", "gtpo_verl"}
    code = "import importlib.util; print(*(importlib.util.find_spec(x) for x in ('recipes', 'studies')))"
    assert in_the_wheel(wheel, code).split() == ["None", "None"]
    assert not (ROOT / "build").exists() and not list(ROOT.glob("*.egg-info"))


def test_the_wheel_names_no_file_that_it_has_not(wheel):
    texts = (path for path in (wheel / "gtpo_verl").rglob("*") if path.suffix in (".py", ".js", ".html", ".css"))
    named = {f"{path.name}: {found}" for path in texts for found in NOT_IN_THE_WHEEL.findall(path.read_text())}
    assert named == set()


def test_the_wheel_checks_a_command_and_computes_gtpo(wheel):
    assert "GTPO is installed" in in_the_wheel(wheel, COMMAND, "check")
    code = """
import verl
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
import torch, gtpo_verl
print(get_adv_estimator_fn("gtpo").__module__, gtpo_verl.__file__)
one = dict(token_level_rewards=torch.eye(2), response_mask=torch.ones(2, 2), index=[0, 0], entropy=torch.zeros(2, 2))
print(gtpo_verl.compute_gtpo_outcome_advantage(responses=torch.ones(2, 2, dtype=int), initial_entropy=0.1, **one)[0])
"""
    printed = in_the_wheel(wheel, code)
    assert f"gtpo_verl.verl_plugin.state {wheel}" in printed and "tensor" in printed


def test_the_wheel_shows_a_run_and_diagnoses_one(wheel, tmp_path):
    page = tmp_path / "view.html"
    assert str(page) in in_the_wheel(wheel, COMMAND, "view", "--demo", "-o", page) and page.stat().st_size > 0
    log = ROOT / "studies/results/verl/letter_counting/gtpo-lr0.0001-seed1.jsonl.gz"
    assert "HEALTHY" in in_the_wheel(wheel, COMMAND, "diagnose", log)


def test_a_process_that_does_not_ask_for_gtpo_loads_no_report():
    code = "import sys, verl, verl.trainer.main_ppo\nprint('modules', *sys.modules)"
    with_plugin, without = (
        set(run_python(code, VERL_USE_EXTERNAL_PLUGINS=plugins).stdout.partition("modules ")[2].split())
        for plugins in ("auto", "none")
    )
    added = {".".join(name.split(".")[:2]) for name in with_plugin - without}
    tools = {name for name in with_plugin - without if name.startswith("gtpo_verl.tools")}
    assert "gtpo_verl.verl_plugin" in added
    check = ("gtpo_verl.tools", "gtpo_verl.tools.check", "gtpo_verl.tools.check.stop_before_start")
    assert tools == set(check)  # which does nothing unless it is asked to
    assert not added & {"gtpo_verl.reward", "recipes", "studies", "pandas", "matplotlib"}


def test_importing_verl_imports_no_engine_and_chooses_no_platform():
    """A platform may be another plugin's, which verl loads after this one."""
    code = (
        "import sys, verl, gtpo_verl.verl_plugin.hooks\nprint([x for x in sys.modules if x.startswith('verl.workers')])"
    )
    later = {"VERL_PLATFORM": "of_a_later_plugin", "VERL_USE_EXTERNAL_MODULES": ""}
    assert run_python(code, VERL_USE_EXTERNAL_PLUGINS="gtpo", **later).stdout.strip() == "[]"
