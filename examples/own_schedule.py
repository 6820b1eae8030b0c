"""A schedule of one's own: GPipe's, but each stage takes the last micro-batch back first.

    ./launch.sh show-schedule examples/own_schedule.py --stages 3 --micro-batches 4
    ./launch.sh pp-gpipe --schedule examples/own_schedule.py --steps 20

It is the order of the backward passes in the GPipe paper (Huang et al., arXiv 1811.06965). The function's name is the
schedule's name where this file is imported; given as a path, the file itself is the name.
"""

from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.schedules import schedule


@schedule()
def last_in_first_out(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """All forward passes, then the backward passes from the last micro-batch to the first."""
    forward = [Forward(stage, k) for k in range(micro_batches)]
    return [*forward, *(Backward(stage, k) for k in reversed(range(micro_batches)))]
