"""The entry point `gtpo_check` of `verl.plugins`: with GTPO_CHECK set, a run of verl is checked and does not start.

verl imports this module in every process, and swallows what a plugin raises: here an error ends the process.
"""

import os

if os.environ.get("GTPO_CHECK"):
    try:
        from gtpo_verl.tools.check import intercept

        intercept.install()
    except KeyboardInterrupt:
        os._exit(130)
    except BaseException as error:
        print(f"not checked: {error}; it was not started", flush=True)
        os._exit(1)
