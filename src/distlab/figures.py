"""`python -m distlab.figures`, the earlier name of `distlab figures`."""

import sys

from distlab.subcommands import run_subcommand
from simplellm.exit_status import status_of

if __name__ == "__main__":
    raise SystemExit(status_of(lambda: run_subcommand("figures", sys.argv[1:])))
