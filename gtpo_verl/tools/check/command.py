"""What a command starts, behind the launchers that are in front of it."""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PYTHON = re.compile(r"python[\d.]*")
_STARTERS = re.compile(rf"{_PYTHON.pattern}|bash|sh|env|ray|torchrun|.+\.(sh|py)")
_LAUNCHERS = ("env", "exec", "nice", "nohup", "setsid", "srun", "stdbuf", "time", "timeout", "uv")
_UNGUARDED = re.compile(r"-[a-zA-Z]*[EIS]")
"""Options of Python that make it deaf to PYTHONPATH, by which the guard gets into it."""


@dataclass
class Command:
    """A command to start here.

    Args:
        words: the program and its arguments.
        environment: variables that its launchers set for it.
        passed_over: its launchers, as they were written.
    """

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)

    @property
    def is_script(self) -> bool:
        """Whether lines of the user's own run before a program of verl is started."""
        return not _PYTHON.fullmatch(Path(self.words[0]).name)

    def __str__(self) -> str:
        return shlex.join(self.words)


def read(words: Sequence[str]) -> Command:
    """The command behind its launchers; overrides alone are those of verl's `main_ppo`.

    Raises:
        ValueError: nothing is behind them, or Python is told to ignore its environment.
    """
    command = Command(list(words))
    if re.match(r"[+~]*[\w/@]+\.[\w.]*=|~|[+\w]+=", words[0]) and not re.match(r"[A-Z_][A-Z\d_]*=", words[0]):
        command.words = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    while _pass_over(command):
        pass
    if not command.words:
        raise ValueError(f"no command behind {shlex.join(words)}")
    program, *arguments = command.words
    if _PYTHON.fullmatch(program) and not shutil.which(program):
        command.words[0] = sys.executable
    options = [word for word in arguments[: arguments.index("-m") if "-m" in arguments else 1] if word[:1] == "-"]
    if not command.is_script and (deaf := next(filter(_UNGUARDED.fullmatch, options), "")):
        raise ValueError(f"Python's option {deaf} hides this check from the program: leave it out")
    return command


def _pass_over(command: Command) -> bool:
    """Take one launcher, or one variable, off the front."""
    if not command.words:
        return False
    first, *rest = command.words
    name = Path(first).name
    if variable := re.match(r"([A-Za-z_]\w*)=(.*)", first, re.DOTALL):
        command.environment[variable[1]] = variable[2]
        command.words = rest
    elif rest[:2] == ["job", "submit"] and name == "ray":
        if "--" not in rest:
            raise ValueError("ray job submit: write -- before the command that it submits")
        end = rest.index("--")
        command.environment |= _env_vars(rest[:end])
        command.passed_over.append(shlex.join(command.words[: end + 2]))
        command.words = rest[end + 1 :]
    elif name == "torchrun":
        start = next((i for i, word in enumerate(rest) if word == "-m" or word.endswith(".py")), len(rest))
        command.passed_over.append(shlex.join([first, *rest[:start]]))
        command.words = ["python3", *rest[start:]] if rest[start:] else []
    elif name in _LAUNCHERS:
        is_start = _STARTERS.fullmatch
        start = next(
            (i for i, word in enumerate(rest) if is_start(Path(word).name) or (name == "env" and "=" in word)),
            len(rest),
        )
        command.passed_over.append(shlex.join([first, *rest[:start]]))
        command.words = rest[start:]
    else:
        return False
    return True


def _env_vars(options: Sequence[str]) -> dict[str, str]:
    """`env_vars` of a Ray job's runtime environment, from its file or as JSON."""
    from omegaconf import OmegaConf

    found: dict[str, str] = {}
    words = [part for word in options for part in word.split("=", 1)]
    for option, value in zip(words, words[1:], strict=False):
        if option == "--runtime-env-json":
            found |= json.loads(value).get("env_vars", {})
        elif option == "--runtime-env":
            found |= OmegaConf.to_container(OmegaConf.load(value)).get("env_vars", {})  # type: ignore[union-attr]
    return {name: str(value) for name, value in found.items()}
