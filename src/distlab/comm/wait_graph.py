"""The wait graph: one search for cycles, for schedules (`distlab.pipeline.plan`) and ranks (`rendezvous.diagnosis`).

Nodes are ranks or workers; an edge leads from a waiting node to one that it waits for. A cycle is a deadlock (Holt,
"Some deadlock properties of computer systems", 1972).
"""

from collections.abc import Mapping, Sequence


def find_cycle(edges: Mapping[int, Sequence[int]]) -> list[int]:
    """Return a cycle of nodes, each of which waits for the next and the last for the first; [] if there is none.

    The cycle starts with its smallest node. `edges` are, by node, the nodes that it waits for.
    """
    finished: set[int] = set()
    for node in sorted(edges):
        path, untried = [node], [iter(edges[node])]  # not recursive: a thousand ranks may wait in a chain
        while path:
            peer = next(untried[-1], None)
            if peer is None:
                finished.add(path.pop())
                untried.pop()
            elif peer in path:
                cycle = path[path.index(peer) :]
                start = cycle.index(min(cycle))
                return cycle[start:] + cycle[:start]
            elif peer not in finished:
                path.append(peer)
                untried.append(iter(edges.get(peer, ())))
    return []
