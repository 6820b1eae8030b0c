"""`python -m distlab.collective_costs`, the earlier name of `distlab collective-costs`."""

import sys

from distlab.subcommands import run_subcommand
from simplellm.exit_status import status_of

if __name__ == "__main__":
    raise SystemExit(status_of(lambda: run_subcommand("collective-costs", sys.argv[1:])))
