"""`python -m distlab.plan`, the earlier name of `distlab plan`."""

import sys

from distlab.subcommands import run_subcommand
from simplellm.exit_status import status_of

if __name__ == "__main__":
    raise SystemExit(status_of(lambda: run_subcommand("plan", sys.argv[1:])))
