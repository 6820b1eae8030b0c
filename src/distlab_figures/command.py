"""Draw a figure.

    ./launch.sh figures losses imgs/dp_loss.png "one process=runs/a" "GA=runs/b" --against tokens
    ./launch.sh figures timelines imgs/schedules.png "GPipe=runs/a" "DAPPLE=runs/b"
    ./launch.sh figures memory imgs/memory.png "GPipe=runs/a" "DAPPLE=runs/b"
    ./launch.sh figures holdings imgs/holdings.png "one process=runs/a" "tp 2=runs/b"
    ./launch.sh figures sharding imgs/sharding.png optimizer-2=runs/a weights-2=runs/b
    ./launch.sh figures expert_loads imgs/experts_load.png "without corrections=runs/a" "with corrections=runs/b"
    ./launch.sh figures partings imgs/partings.png "one process=runs/a" "ep 2=runs/b"
    ./launch.sh figures schedules imgs/schedules_memory.png --stages 4 --micro-batches 8
    ./launch.sh figures averaging imgs/averaging.png
    ./launch.sh figures stages imgs/stages.png --pp 3
    ./launch.sh figures block imgs/block.png
    ./launch.sh figures layout imgs/hybrid.png --dp 2 --pp 3
    ./launch.sh figures splits imgs/splits.png
    ./launch.sh figures replicas imgs/replicas.png
    ./launch.sh figures sequence_parts imgs/sequence_parts.png
    ./launch.sh figures topologies imgs/topologies.png --world-size 8
    ./launch.sh figures collectives imgs/collectives.png runs/compare_collectives/a
    ./launch.sh figures shared_memory imgs/shared_memory.png runs/compare_collectives/a

A run is NAME=FOLDER, or only its folder; the name is its label in the figure.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from distlab_figures import diagrams, runs
from simplellm.command_line import read
from simplellm.errors import say
from simplellm.exit_status import status_of

FIGURES = (
    runs.losses,
    runs.timelines,
    runs.memory,
    runs.holdings,
    runs.sharding,
    runs.expert_loads,
    runs.partings,
    runs.ring_steps,
    diagrams.schedules,
    diagrams.averaging,
    diagrams.stages,
    diagrams.block,
    diagrams.layout,
    diagrams.splits,
    diagrams.replicas,
    diagrams.sequence_parts,
    diagrams.topologies,
    runs.collectives,
    runs.shared_memory,
)


def reporting(figure: Callable[..., None]) -> Callable[..., None]:
    """Return a function that draws a figure, and prints the path of its file."""

    @functools.wraps(figure)
    def draw(png: Path, *args: Any, **options: Any) -> None:
        figure(png, *args, **options)
        say(str(png))

    return draw


def command(args: Sequence[str] | None = None, prog: str | None = None) -> None:
    by_name, cli = {figure.__name__: reporting(figure) for figure in FIGURES}, tyro.extras.subcommand_cli_from_dict
    read(lambda: cli(by_name, args=args, prog=prog, description=__doc__))


if __name__ == "__main__":
    raise SystemExit(status_of(command))
