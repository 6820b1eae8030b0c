"""What torchrun, or launch.sh, tells the ranks that it starts: their environment."""

import os


def started_by_torchrun() -> bool:
    """Whether torchrun (or launch.sh) started this process; if so, its environment has rank, world size and address."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_store_in_launcher() -> bool:
    """Whether torchrun's agent, or the launcher of node 0, holds the ranks' store; otherwise rank 0 does."""
    return started_by_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
