"""Draw a figure.

    python -m distlab.figures losses imgs/dp_loss.png "one process=runs/a" "GA=runs/b" --against tokens
    python -m distlab.figures timelines imgs/schedules.png "GPipe=runs/a" "DAPPLE=runs/b"
    python -m distlab.figures memory imgs/memory.png "GPipe=runs/a" "DAPPLE=runs/b"
    python -m distlab.figures holdings imgs/holdings.png "one process=runs/a" "tp 2=runs/b"
    python -m distlab.figures sharding imgs/sharding.png optimizer-2=runs/a weights-2=runs/b
    python -m distlab.figures expert_loads imgs/experts_load.png "without corrections=runs/a" "with corrections=runs/b"
    python -m distlab.figures partings imgs/partings.png "one process=runs/a" "ep 2=runs/b"
    python -m distlab.figures schedules imgs/schedules_memory.png --stages 4 --micro-batches 8
    python -m distlab.figures averaging imgs/averaging.png
    python -m distlab.figures stages imgs/stages.png --pp 3
    python -m distlab.figures block imgs/block.png
    python -m distlab.figures layout imgs/hybrid.png --dp 2 --pp 3
    python -m distlab.figures splits imgs/splits.png
    python -m distlab.figures replicas imgs/replicas.png
    python -m distlab.figures sequence_parts imgs/sequence_parts.png
    python -m distlab.figures topologies imgs/topologies.png --world-size 8
    python -m distlab.figures collectives imgs/collectives.png runs/compare_collectives/a
    python -m distlab.figures shared_memory imgs/shared_memory.png runs/compare_collectives/a

A run is NAME=FOLDER, or only its folder; the name is its label in the figure.
"""

from collections.abc import Sequence

import tyro

from distlab_figures import diagrams, runs
from simplellm.command_line import read
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


def command(args: Sequence[str] | None = None, prog: str | None = None) -> None:
    by_name, cli = {figure.__name__: figure for figure in FIGURES}, tyro.extras.subcommand_cli_from_dict
    read(lambda: cli(by_name, args=args, prog=prog, description=__doc__))


if __name__ == "__main__":
    raise SystemExit(status_of(command))
