"""A machine as a JSON file: measured by `./launch.sh calibrate`, or written by hand for one you do not have.

Times are in seconds, sizes in bytes. Times that are not measured follow from a few numbers, such as the speed of a
rank's multiplications and the cost of a message. A file needs only these numbers.
"""

import bisect
import itertools
import json
import re
import sys
import typing
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

from distlab.comm.link import Link
from distlab.run.commands import launcher
from distlab.run.terminal import counted
from distlab_planner.model import PARTS, Dtype, ModelPart, Sizes
from simplellm.errors import InputError, require

Device = Literal["cpu", "cuda"]
MeasuredTransport = Literal["gloo", "shared"]
PassKind = Literal["F", "B", "I", "W"]  # letters of `distlab.pipeline.actions`
# By an action's letter, the pass whose time it takes.
KIND_OF: dict[str, PassKind] = {"F": "F", "B": "B", "I": "I", "W": "W", "f": "F", "R": "F", "b": "B", "i": "I"}
# The keys of a machine's file whose numbers are greater than 0; others may be 0, but of whole numbers only `MAY_BE_0`.
ABOVE_0 = ("bytes_per_second", "multiply_adds_per_second", "memory_bytes_per_host")
SMALLEST, LARGEST = 1e-30, 1e30  # of numbers other than 0, whose products must be finite
MAY_BE_0 = ("experts", "shared_experts")  # in a model without a mixture


@dataclass(frozen=True)
class PassSeconds:
    """Measured seconds of a part's passes over micro-batches of `Measured.rows` sequences."""

    F: tuple[float, ...]
    B: tuple[float, ...]  # the whole backward pass
    I: tuple[float, ...]  # noqa: E741  # its two halves
    W: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """The times of the parts of a model of some sizes on one rank, while no other rank computes."""

    sizes: Sizes
    tp: int  # ranks that share each layer; collectives are not in these times
    threads: int
    rows: tuple[int, ...]  # sequences of a micro-batch
    embedding: PassSeconds
    block: PassSeconds
    head: PassSeconds
    again: tuple[float, ...] = ()  # additional for each block that a backward pass computes again

    def again_seconds(self, rows: float) -> float:
        """Return the seconds to compute a block again; where not measured, the seconds of a forward pass."""
        return interpolate(rows, self.rows, self.again or self.block.F)

    def seconds(self, part: ModelPart, kind: PassKind, rows: float) -> float:
        """Return the seconds of a pass, linear between the measured numbers of sequences, and beyond the last."""
        passes: PassSeconds = getattr(self, part)
        return interpolate(rows, self.rows, getattr(passes, kind))


@dataclass(frozen=True)
class AllReduce:
    """Measured seconds of an all-reduce among ranks of one host, by the size of the tensor."""

    ranks: int
    transport: MeasuredTransport
    size_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Waking:
    """The additional seconds of a pass after its rank has waited this long for a message."""

    idle_seconds: float
    seconds: float


@dataclass(frozen=True)
class Machine:
    """Equal hosts, and the times of ranks on them."""

    name: str
    device: Device  # where ranks compute
    hosts: int
    ranks_per_host: int  # to start on each host
    cores_per_host: int  # ranks or threads that compute at once; GPUs, where a rank has one
    memory_bytes_per_host: float
    inside: Link  # between two ranks of a host
    between: Link  # between two hosts; the ranks of a host share its bandwidth
    multiply_adds_per_second: float  # of one rank, as measured in a forward pass
    source: str = ""  # of these numbers, for a machine that was not measured
    bfloat16_multiply_adds_per_second: float = 0.0  # the same in mixed precision; 0: not measured, assumed equal
    compiled_speedup: float = 0.0  # of compiled passes; 0: not measured, assumed 1
    pass_seconds: float = 0.0  # additional, of each pass of a stage that was not measured
    step_seconds: float = 0.0  # additional, of each step
    optimizer_seconds: float = 0.0  # to update one weight with Adam
    sgd_seconds: float = 0.0  # the same with SGD; 0: not measured, assumed equal
    message_seconds: float = 0.0  # for which a message keeps its sender, and its receiver, from computing
    process_bytes: float = 0.0  # of a rank that holds nothing
    compiler_bytes: float = 0.0  # additional, of a rank that compiles its passes
    # The time of each of 1, 2, … ranks that compute at once, as a multiple of the time of one alone. Beyond these
    # numbers, and beyond the cores, ranks share the cores.
    slowdown: tuple[float, ...] = ()
    # Additional seconds of a pass after a message: a core that was idle is slow at first, and its caches hold other
    # data. By the wait of the rank, from 0 for a message that had already arrived.
    waking: tuple[Waking, ...] = ()
    # `inside` while 2, 3, … pairs of ranks of a host send each other messages at once.
    inside_together: tuple[Link, ...] = ()
    measured: tuple[Measured, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()

    def inside_of(self, pairs: int) -> Link:
        """Return the link between two ranks of a host while `pairs` pairs send at once, as far as this was measured."""
        known = self.inside, *self.inside_together
        return known[min(pairs, len(known)) - 1]

    def slowdown_of(self, busy: float) -> float:
        """Return the time of each of `busy` busy ranks of a host, as a multiple of the time of one alone."""
        known = self.slowdown or (1.0,)
        if busy <= len(known):
            return max(1.0, interpolate(busy, range(1, len(known) + 1), known))  # not less by rounding
        return known[-1] * max(1.0, busy / max(len(known), self.cores_per_host))

    def waking_seconds(self, idle_seconds: float) -> float:
        """Return the additional seconds of a pass after its rank has waited this long for a message.

        Beyond the longest measured wait, they stay constant.
        """
        if len(self.waking) < 2:
            return self.waking[0].seconds if self.waking else 0.0
        at = [one.idle_seconds for one in self.waking]
        return interpolate(min(idle_seconds, at[-1]), at, [one.seconds for one in self.waking])

    @property
    def ranks(self) -> int:
        """The number of ranks that it has room for."""
        return self.hosts * self.ranks_per_host

    def has_sizes(self, sizes: Sizes) -> bool:
        """Return whether passes of a model of these sizes were measured."""
        return any(entry.sizes == sizes for entry in self.measured)

    def update_seconds(self, optimizer: str) -> float:
        """Return the seconds to update one weight."""
        return (self.sgd_seconds if optimizer == "sgd" else 0.0) or self.optimizer_seconds

    def speed(self, dtype: Dtype, compiled: bool = False) -> float:
        """Return the multiply-adds per second of a rank that computes in a dtype."""
        in_bfloat16 = self.bfloat16_multiply_adds_per_second if dtype == "bfloat16" else 0.0
        return (in_bfloat16 or self.multiply_adds_per_second) * (self.compiled_speedup * compiled or 1.0)

    def measured_for(self, sizes: Sizes, tp: int) -> list[Measured]:
        """Return the measured passes of one of `tp` slices of a model of these sizes."""
        return [entry for entry in self.measured if (entry.sizes, entry.tp) == (sizes, tp)]

    def unmeasured_tp(self, sizes: Sizes, tps: Iterable[int]) -> list[int]:
        """Return the numbers of slices for which no passes of a model of these sizes were measured."""
        return [tp for tp in dict.fromkeys(tps) if not self.measured_for(sizes, tp)]

    def with_room_for(self, ranks: int, name: str) -> "Machine":
        """Return the machine as `ranks` ranks use it; `InputError`, which begins with `name`, if it is too small."""
        if self.hosts == 1 and self.device == "cpu":  # any number of ranks may share its cores
            return replace(self, ranks_per_host=max(ranks, self.ranks_per_host))
        each = " each" * (self.hosts > 1)
        there = f"{name} has {counted(self.hosts, 'hosts')} with {counted(self.ranks_per_host, 'ranks')}{each}"
        require(ranks <= self.ranks, f"{there}, but the layout has {ranks:,} ranks")
        return self


def interpolate(x: float, at: Sequence[float], values: Sequence[float]) -> float:
    """Interpolate at `x` between points in ascending order, and beyond along the first or the last segment.

    A single point is on a line through the origin. The result is not negative.
    """
    if len(at) == 1:
        return values[0] * x / at[0]
    segment = bisect.bisect_left(at, x, lo=1, hi=len(at) - 1) - 1
    (left, right), (low, high) = at[segment : segment + 2], values[segment : segment + 2]
    return max(0.0, low + (high - low) * (x - left) / (right - left))


def read_machine(path: Path) -> Machine:
    """Read the machine of a file; `InputError` for a key that is missing, unknown or of the wrong kind."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise InputError(
            f"{path}: cannot be read ({reason}); {launcher()} calibrate {path} writes one for this computer"
        ) from None
    if isinstance(content, dict):
        content.pop("spin_seconds", None)  # measured by an earlier revision
    machine: Machine = _read(Machine, content, f"{path}: ")
    for entry in machine.measured:
        many = [len(getattr(getattr(entry, part), kind)) for part in PARTS for kind in "FBIW"]
        require({len(entry.rows)} == set(many), f"{path}: measured: give each pass a number for each of its rows")
        _require_ascending(entry.rows, f"{path}: measured: rows")
        has_again = len(entry.again) in (0, len(entry.rows))
        require(has_again, f"{path}: measured: again: give a number for each of its rows, or none")
    if machine.waking:
        waits = [one.idle_seconds for one in machine.waking]
        require(waits[0] == 0, f"{path}: waking[0].idle_seconds is {waits[0]:g}; give 0: a message that was there")
        _require_ascending(waits, f"{path}: waking: idle_seconds")
    for place, multiple in enumerate(machine.slowdown):
        require(multiple >= 1, f"{path}: slowdown[{place}] is {multiple:g}; give a number from 1 up")
    for place, one in enumerate(machine.all_reduces):
        require(one.ranks >= 2, f"{path}: all_reduces[{place}].ranks is {one.ranks}; give a whole number from 2 up")
        is_paired = len(one.size_bytes) == len(one.seconds)
        require(is_paired, f"{path}: all_reduces: give each of size_bytes a number in seconds")
        _require_ascending(one.size_bytes, f"{path}: all_reduces: size_bytes")
    return machine


def _require_ascending(numbers: Sequence[float], what: str) -> None:
    is_ascending = bool(numbers) and all(a < b for a, b in itertools.pairwise(numbers))
    require(is_ascending, f"{what}: give numbers in ascending order, at least one")


def write_machine(machine: Machine, path: Path) -> None:
    """Write a machine's file, with the short lists on one line each."""
    try:
        path.write_text(_shown(asdict(machine)) + "\n")
    except OSError as error:
        raise InputError(f"{path}: cannot write there ({error.strerror})") from error


def _shown(value: Any, indent: str = "") -> str:
    inner = indent + "  "
    if isinstance(value, dict) and (not indent or any(isinstance(v, dict | list | tuple) for v in value.values())):
        lines = [f"{inner}{json.dumps(key)}: {_shown(held, inner)}" for key, held in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(held, dict) for held in value):
        return "[\n" + ",\n".join(inner + _shown(held, inner) for held in value) + f"\n{indent}]"
    return json.dumps(_rounded(value))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(held) for held in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _read(kind: Any, value: Any, where: str) -> Any:
    """Read a value of JSON as a dataclass, a tuple of values, a name or a non-negative number."""
    given = f"{where.rstrip(': ')} is {json.dumps(value):.60}"
    if is_dataclass(kind):
        return _read_object(kind, value, given, where if where.endswith(": ") else f"{where}.")
    if typing.get_origin(kind) is tuple:
        require(isinstance(value, list), f"{given}; give a list")
        each = typing.get_args(kind)[0]
        return tuple(_read(each, held, f"{where}[{place}]") for place, held in enumerate(value))
    if kind in (int, float):
        key = re.split(r"[. ]", where)[-1]
        return _read_number(kind, value, given, key)
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        require(value in choices, f"{given}; give one of {', '.join(choices)}")
    else:
        wanted = {bool: "true or false", str: "a text"}[kind]
        require(isinstance(value, kind), f"{given}; give {wanted}")
    return value


def _read_object(kind: Any, value: Any, given: str, where: str) -> Any:
    """Read an object of JSON as a dataclass; `given` is the value in words, and `where` what comes before a key."""
    kinds = typing.get_type_hints(kind)
    require(isinstance(value, dict), f"{given}; give an object with the keys {', '.join(kinds)}")
    unknown = next((key for key in value if key not in kinds), None)
    others = f"remove it, or the file, and calibrate again; there are {', '.join(kinds)}"
    require(unknown is None, f"{where}{unknown} is not a key; {others}")
    # A link without one of its numbers would be infinitely fast; elsewhere a default means "not measured".
    needed = [field.name for field in fields(kind) if field.default is MISSING or kind is Link]
    missing = next((name for name in needed if name not in value), None)
    require(missing is None, f"{where}{missing} is missing")
    return kind(**{key: _read(kinds[key], held, f"{where}{key}") for key, held in value.items()})


def _read_number(kind: type[float], value: Any, given: str, key: str) -> float:
    """Read the number of a key, finite and not negative; `given` is the value in words."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        least = 0 if key in MAY_BE_0 else 1
        is_right = is_number and value == int(value) and value >= least
        wanted = f"a whole number from {least} up"
    else:
        is_right = is_number and (value > 0 if key in ABOVE_0 else value >= 0)
        wanted = "a number greater than 0" if key in ABOVE_0 else "a number that is not negative"
    require(is_right, f"{given}; give {wanted}")
    has_usual_size = value == 0 or SMALLEST <= value <= LARGEST
    require(has_usual_size, f"{given}; give a number between {SMALLEST:g} and {LARGEST:g}")
    return kind(value)
