"""What `gtpo-verl check` starts: the user's own program, which ends where Hydra has composed its config.

All programs of verl pass there, whatever their module, config and launcher, before they make a folder, start Ray or
load anything. `site/sitecustomize.py` installs the guard in every Python that the command starts.
"""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import wrapt

VARIABLE = "GTPO_VERL_CHECK"
STAND_INS = ("rm", "mv", "ray", "pip", "pip3", "pkill", "kill", "huggingface-cli", "hf", "wandb", "sbatch", "docker")
_STAND_IN = """\
if [ "$1 $2" = "job submit" ]; then
    while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
    shift
    exec "$@"
fi
echo "$NAME" "$@" >>"${GTPO_VERL_CHECK:?}/left_out"
"""


class Verdict(NamedTuple):
    """What became of a command.

    Args:
        said (dict): what the guard wrote if the command composed a config: the `program` and its `config`, the findings
            on its `settings` and on the `machine`.
        left_out: commands of a script that were not run.
        status: of the command, None if it was ended.
        last_lines: that it printed.
        without: a Python that it started and that does not have this package.
    """

    said: dict[str, Any]
    left_out: list[str]
    status: int | None
    last_lines: list[str]
    without: str


def run(command: Sequence[str], environment: dict[str, str], is_script: bool, timeout: float) -> Verdict:
    """Start one of verl's programs, and end it with its first verdict or after `timeout` seconds.

    Where `is_script`, lines of the user's run before the program: the stand-ins keep them from removing or stopping
    anything.
    """
    with _folder() as folder:
        site = Path(__file__).parent / "site"
        variables = os.environ | environment | {VARIABLE: str(folder), "HF_HUB_OFFLINE": "1"}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), variables.get("PYTHONPATH"))))
        if is_script:
            variables |= {"PATH": f"{folder}:{variables['PATH']}", "BASH_ENV": f"{folder}/bash"}
        with (folder / "printed").open("wb") as printed:
            process = subprocess.Popen(
                list(command), env=variables, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
                start_new_session=True,
            )  # fmt: skip
            deadline = time.monotonic() + timeout
            while process.poll() is None and time.monotonic() < deadline and not (folder / "verdict").exists():
                time.sleep(0.05)
            status = process.poll()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

        def lines(name: str) -> list[str]:
            path = folder / name
            return path.read_text(errors="replace").splitlines() if path.exists() else []

        said = json.loads((folder / "verdict").read_text()) if (folder / "verdict").exists() else {}
        return Verdict(said, lines("left_out"), status, lines("printed")[-8:], "".join(lines("without")[:1]))


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of the check, with the stand-ins: as programs, and as bash's own functions, which come before both its
    builtins and what a script puts on PATH."""
    with tempfile.TemporaryDirectory(prefix="gtpo-verl-check-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        for name in STAND_INS:
            path = folder / name
            path.write_text(f"#!/bin/sh\nNAME={name}\n{_STAND_IN}")
            path.chmod(0o755)
        functions = (f'{name}() {{ command "${{GTPO_VERL_CHECK:?}}/{name}" "$@"; }}\n' for name in STAND_INS)
        (folder / "bash").write_text("".join(functions))
        yield folder


def install() -> None:
    """Stop this process where Hydra composes a config; `python -m pip`, and one that starts Ray itself, at once."""
    if sys.orig_argv[1:3] == ["-m", "pip"]:
        _leave_out(sys.orig_argv)
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "init", lambda *_: _leave_out(["ray.init"])), "ray"
    )
    wrapt.register_post_import_hook(
        lambda module: wrapt.wrap_function_wrapper(module, "Hydra.compose_config", _compose), "hydra._internal.hydra"
    )


def instead_of_a_command(arguments: Sequence[str]) -> None:
    """In place of one of our own commands in a checked script: go on with the command behind its `--`, or leave."""
    if "--" in arguments:
        inner = list(arguments[arguments.index("--") + 1 :])
        os.execvp(inner[0], inner)
    _leave_out(sys.orig_argv)


def _leave_out(command: Sequence[str]) -> None:
    with Path(os.environ[VARIABLE], "left_out").open("a") as file:
        print(*command, file=file)
    os._exit(0)


def _compose(wrapped: Callable, instance: Any, args: Any, kwargs: Any) -> Any:
    """Compose, and judge; keys that the config does not have are gathered, not one a round."""
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    overrides, unknown = list(call.arguments["overrides"]), list[str]()
    verdict: dict[str, Any] = {"program": sys.orig_argv[1:], "config": call.arguments["config_name"]}

    def compose(chosen: Sequence[str]) -> Any:
        call.arguments["overrides"] = list(chosen)
        return wrapped(*call.args, **call.kwargs)

    try:
        while True:
            try:
                config = compose(overrides)
                break
            except HydraException as error:
                named = re.match(r"Could not override '([^']+)'", str(error))
                if not named:
                    raise
                unknown += [word for word in overrides if word.partition("=")[0] == named[1]]
                overrides = [word for word in overrides if word.partition("=")[0] != named[1]]
        plain = [word for word in overrides if not re.match(r"\+*\w+(\.\w+)+=", word)]
        from gtpo_verl.tools.check import settings

        OmegaConf.set_readonly(config, False)
        verdict |= settings.judge(config, compose(plain), overrides, unknown)
    except Exception as error:
        verdict["error"] = " ".join(str(error).split()) or type(error).__name__
    folder = Path(os.environ[VARIABLE])
    (folder / "verdict.partial").write_text(json.dumps(verdict))
    (folder / "verdict.partial").replace(folder / "verdict")
    time.sleep(60)  # the check ends this process, and all that it belongs to
    os._exit(0)
