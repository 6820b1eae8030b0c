"""The bytes of weights and gradients that a rank has whole for a time only, if replicas shard them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from distlab.parallel.options import SHARDED_BUCKET_BYTES
from distlab.pipeline.actions import Action, stages_of
from distlab_planner.costs import Costs
from distlab_planner.layouts import SAME_WEIGHTS
from distlab_planner.model import NUMBER_BYTES, PARTS, Parameter

Flat = list[tuple[int, Parameter]]  # parameters side by side, each with its number, in the order of a backward pass


def gathered_bytes(costs: Costs, program: Sequence[Action]) -> int:
    """Return the bytes of blocks or buckets that are temporarily whole, and of the buffers where they are reduced."""
    layout, stages = costs.layout, stages_of(program)
    if layout.shard == "gradients":
        return sum(_whole_gradients(costs, stage, [a for a in program if a.stage == stage]) for stage in stages)
    return _whole_blocks(costs, stages) if layout.shard == "weights" else 0


def _whole_blocks(costs: Costs, stages: Iterable[int]) -> int:
    """Return the bytes in a backward pass: of a block, its gradient, and the weights of the block before it."""
    parts = [part for stage in stages for part in _parameters(costs, stage)]
    gradients = [sum(one.numbers for one in part) * NUMBER_BYTES for part in parts]
    number_bytes = {True: costs.model.sizes.inner_bytes, False: NUMBER_BYTES}
    weights = [sum(one.numbers * number_bytes[one.is_rounded] for one in part) for part in parts]
    whole = (own + gradient + before for own, gradient, before in zip(weights, gradients, [0, *weights], strict=False))
    return max(whole) + _buffers(costs, [flat for part in parts for flat in _side_by_side(costs, enumerate(part))])


def _whole_gradients(costs: Costs, stage: int, actions: Sequence[Action]) -> int:
    """Return the bytes of a stage's gradients at the peak of a step that fills and reduces buckets in turn.

    See `distlab.parallel.data.GradientBuckets`. If the gradients of matrices are delayed, the others wait for them.
    """
    parameters = [*enumerate([*chain.from_iterable(_parameters(costs, stage))][::-1])]
    flats = [flat for bucket in _buckets(costs, parameters) for flat in _side_by_side(costs, bucket)]
    sizes_bytes = [_bytes(flat) for flat in flats]
    flat_of = {number: index for index, flat in enumerate(flats) for number, _ in flat}
    letters = "".join(action.letter.upper() for action in actions)
    rounds = costs.layout.micro_batches
    if "W" not in letters:  # without delays, all later passes are like the second
        letters, rounds = "BB", min(2, rounds)
    passes = [
        [number for number, one in parameters if letter == "B" or one.is_delayed == (letter == "W")]
        for letter in letters
        if letter in "BIW"
    ]
    lacking, whole, reducing = [{number for number, _ in flat} for flat in flats], set[int](), set[int]()
    peak_bytes = whole_bytes = reduced = 0
    has_buffer = _has_buffer(costs)
    while reduced < rounds * len(flats):
        for number in passes.pop(0) if passes else [number for number, _ in flats[reduced % len(flats)]]:
            filled = flat_of[number]
            reducing.discard(filled)
            if filled not in whole:
                whole.add(filled)
                whole_bytes += sizes_bytes[filled]
                peak_bytes = max(peak_bytes, whole_bytes)
            lacking[filled].discard(number)
            while not lacking[now := reduced % len(flats)]:
                lacking[now] = {number for number, _ in flats[now]}
                freed = {now} if has_buffer else reducing
                whole -= freed
                whole_bytes -= sum(sizes_bytes[index] for index in freed)
                reducing, reduced = {now}, reduced + 1
    return peak_bytes + _buffers(costs, flats)


def _parameters(costs: Costs, stage: int) -> list[list[Parameter]]:
    """Return the parameters of the embedding, of each block, and of the head that a rank holds of a stage."""
    layout, sizes = costs.layout, costs.model.sizes
    each = {part: sizes.parameters(part, layout.size("tp"), layout.size("ep")) for part in PARTS}
    return [each[part] for part in PARTS for _ in range(layout.parts(stage)[part])]


def _buckets(costs: Costs, parameters: Iterable[tuple[int, Parameter]]) -> list[Flat]:
    """Return the parameters in buckets, in the order in which a backward pass fills them."""
    buckets, latest = list[Flat](), dict[bool, Flat]()
    for number, one in parameters:
        of_others = _is_of_others(costs, one)
        if of_others not in latest or _bytes(latest[of_others]) >= SHARDED_BUCKET_BYTES:
            latest[of_others] = []
            buckets.append(latest[of_others])
        latest[of_others].append((number, one))
    return sorted(buckets, key=lambda bucket: bucket[-1][0])


def _side_by_side(costs: Costs, parameters: Iterable[tuple[int, Parameter]]) -> list[Flat]:
    """Return those that are reduced together: by whether passes round them, and whether others hold them."""
    flats = dict[tuple[bool, bool], Flat]()
    for number, one in parameters:
        flats.setdefault((one.is_rounded, _is_of_others(costs, one)), []).append((number, one))
    return [flats[kind] for kind in sorted(flats)]


def _is_of_others(costs: Costs, one: Parameter) -> bool:
    """Return whether other ranks hold a parameter than hold the weights outside of experts."""
    return one.of_expert and costs.layout.size("ep") > 1


def _has_buffer(costs: Costs) -> bool:
    """Return whether gradients are reduced in memory that the replicas share."""
    has_copies = costs.layout.size(*SAME_WEIGHTS) > 1
    return costs.machine.device == "cpu" and has_copies and costs.on_hosts.is_inside(SAME_WEIGHTS)


def _buffers(costs: Costs, flats: Iterable[Flat]) -> int:
    """Return the bytes of the shared memory where gradients are reduced: a buffer for the holders of each kind."""
    longest = Counter[bool]()
    for flat in flats:
        of_others = _is_of_others(costs, flat[0][1])
        longest[of_others] = max(longest[of_others], _bytes(flat))
    return longest.total() if _has_buffer(costs) else 0


def _bytes(flat: Flat) -> int:
    return sum(one.numbers for _, one in flat) * NUMBER_BYTES
