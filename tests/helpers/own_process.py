"""Python in a process of its own: for what an import does, which cannot be undone, and for runs that may fail."""

import os
import subprocess
import sys

NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}
"""Variables under which verl loads no plugin."""


def run_python(code, *arguments, status=0, inherited=os.environ, **variables):
    """What the code printed, once it has ended with a status; further environment variables by name."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    for _ in range(3):
        done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, timeout=900)
        if "The current node timed out during startup" not in done.stderr:  # as Ray says on a busy machine
            break
    assert done.returncode == status, done.stdout + done.stderr
    return done
