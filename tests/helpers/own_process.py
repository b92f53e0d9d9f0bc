"""Python in a process of its own: for what an import does, which cannot be undone, and for runs that may fail."""

import os
import subprocess
import sys
from contextlib import contextmanager

NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}
"""Variables under which verl loads no plugin."""

RAY_TOO_SLOW = "The current node timed out during startup"
"""What Ray says on a busy machine, which may take longer than Ray's own 30 seconds."""


def run_python(code, *arguments, status=0, inherited=os.environ, **variables):
    """What the code printed, once it has ended with a status; further environment variables by name."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    for _ in range(3):
        done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, timeout=900)
        if RAY_TOO_SLOW not in done.stderr:
            break
    assert done.returncode == status, done.stdout + done.stderr
    return done


@contextmanager
def running_python(code, *arguments, **variables):
    """A process that runs the code until the context ends, and the first line that it printed."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    for _ in range(3):
        with subprocess.Popen(command, env=os.environ | variables, text=True, **pipes) as process:
            try:
                if line := process.stdout.readline().strip():
                    yield process, line
                    return
                error = process.communicate()[1]
            finally:
                process.kill()
        if RAY_TOO_SLOW not in error:
            break
    raise AssertionError(error)
