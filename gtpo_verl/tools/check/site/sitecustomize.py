"""Python imports this at its start, in every process of a command that `gtpo-verl check` looks at."""

import os
import sys
from importlib import import_module

sys.path.remove(os.path.dirname(__file__))
this = sys.modules.pop("sitecustomize")
try:
    import_module("sitecustomize")  # of this Python, or of the user
except ImportError:
    sys.modules["sitecustomize"] = this
try:
    from gtpo_verl.tools.check import guard
except ImportError:
    with open(os.path.join(os.environ["GTPO_VERL_CHECK"], "without"), "a") as file:
        print(sys.executable, file=file)
    os._exit(1)  # unguarded, it would train
else:
    guard.install()
