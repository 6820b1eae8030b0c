"""Who waits for whom: one search for cycles, for schedules before they run and for ranks that stand still.

Nodes are ranks or workers, an edge goes from one to another without which its wait does not end. A cycle is a deadlock
(Holt, "Some deadlock properties of computer systems", 1972).
"""

from collections.abc import Mapping, Sequence


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Nodes each of which waits for the next, and the last for the first; from the smallest on; [] if there is none.

    Args:
        edges: by node, those it waits for.
    """
    finished: set[int] = set()

    def follow(path: list[int]) -> list[int]:
        for peer in edges.get(path[-1], ()):
            if peer in path:
                return path[path.index(peer) :]
            if peer not in finished and (cycle := follow([*path, peer])):
                return cycle
        finished.add(path[-1])
        return []

    for node in sorted(edges):
        if node not in finished and (cycle := follow([node])):
            start = cycle.index(min(cycle))
            return cycle[start:] + cycle[:start]
    return []
