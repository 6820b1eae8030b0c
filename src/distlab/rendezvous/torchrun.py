"""The environment that torchrun, or launch.sh, gives to the ranks that it starts."""

import os


def started_by_torchrun() -> bool:
    """Return whether torchrun (or launch.sh) started this process, with rank, world size and address as variables."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_store_in_launcher() -> bool:
    """Return whether torchrun's agent, or the launcher of node 0, holds the ranks' store; otherwise rank 0 does."""
    return started_by_torchrun() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
