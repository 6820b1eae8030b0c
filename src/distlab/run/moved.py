"""Flags that have moved from a chapter's plain script to its second one; with them, the first script runs the second.

So commands and runs from before the move go on as they did.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.checkpoints.format import latest_valid
from distlab.run.commands import LAB
from simplellm.errors import InputError


class Second(NamedTuple):
    """A chapter's second script, and the flags that it has and the plain script has not."""

    name: str  # for launch.sh
    script: str
    flags: Mapping[str, object]  # by setting, its value in the plain script; None: a resumed run need not keep it


SECOND = {
    "DP/gradient_aggr/intro_DP_GA.py": Second(
        "dp-buckets",
        "DP/buckets/intro_DP_buckets.py",
        {"all_reduce": None, "compress": "none", "powersgd_rank": None, "topk_share": None},
    ),
    "DP/diloco/intro_DP_DiLoCo.py": Second(
        "streaming-diloco",
        "DP/streaming/intro_DP_Streaming.py",
        {"fragments": 1, "overlap_steps": 0, "merge_alpha": None, "compress": "none"},
    ),
    "DP/zero/intro_DP_ZeRO.py": Second("dp-fsdp", "DP/fsdp/intro_DP_FSDP.py", {"shard": None}),
    "collectives/intro_collectives.py": Second(
        "compare-collectives", "collectives/compare_collectives.py", {"sizes": None, "rounds": None}
    ),
}


def second_script(script: Path, args: Sequence[str]) -> Second | None:
    """The script that has to run instead of `script`: it has one of the flags, or wrote what is to be resumed."""
    second = next((second for plain, second in SECOND.items() if LAB / plain == script.resolve()), None)
    if second is None:
        return None
    given = {arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")}
    if given & second.flags.keys():
        return second
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--resume", type=Path)
    try:
        resumed = parser.parse_known_args(args)[0].resume
        saved = {} if resumed is None else latest_valid(resumed, at_a_glance=True).record.get("settings", {})
    except (argparse.ArgumentError, InputError):
        return None  # the script itself says what is wrong
    kept = {name: value for name, value in second.flags.items() if value is not None}
    return second if any(saved.get(name, value) != value for name, value in kept.items()) else None
