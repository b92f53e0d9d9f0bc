"""`python -m gtpo_verl` is the command `gtpo-verl`."""

import sys

from gtpo_verl.cli import main

if __name__ == "__main__":
    sys.exit(main())
