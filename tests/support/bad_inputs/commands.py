"""Figures drawn from what is no run, names that the launcher does not know, MPI, and ranks that do not fit together."""

import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from support.bad_inputs.files import noise, write
from support.bad_inputs.inputs import PYTHON, SCRIPTS, TINY, BadInput
from support.processes import LAB, free_port

_held: list[socket.socket] = []  # ports in use


def figures(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    drawn = str(folder / "figure.png")
    contents: dict[str, list[bytes | str]] = {
        "losses metrics.jsonl": ["", "{}", "[1]\n", '{"loss": "low"}', '{"loss": [1]}', noise(chance, 300), "null\n"],
        "timelines trace.json": ["", "{}", "[]", '{"otherData": {}}', noise(chance, 300), "null"],
        "memory trace.json": ['{"otherData": {"ranks": 2}, "traceEvents": []}', "5", noise(chance, 100)],
        "holdings memory.json": ["", "{}", "[]", "[1]", '[{"parameters": "big"}]', noise(chance, 300)],
        "collectives collectives.jsonl": ["", "{}", '{"operation": "sum"}\n', "[]\n", noise(chance, 300)],
    }
    others = [
        [*"losses {} ghost=nowhere --smooth 3".split()],
        [*"losses {} .".split(), "--smooth", chance.choice(["0", "-1", "x"])],
        [*"layout {} --dp".split(), chance.choice(["0", "-2", "x"])],
        [*"layout {} --pp".split(), chance.choice(["0", "-2", "1.5"])],
        [*"topologies {} --world-size".split(), chance.choice(["1", "0", "33", "x"])],
        [*"splits {} --ranks".split(), chance.choice(["1", "99", "two"])],
        ["losses"],
        ["nonsense", "{}"],
        ["layout", "/dev/null/figure.png"],
        ["layout", str(folder / "figure.nonsense")],
    ]
    cases: list[tuple[str, bytes | str | None, list[str]]] = [
        (command.split()[1], content, [command.split()[0], "{}", "{run}"])
        for command, group in contents.items()
        for content in group
    ]
    cases += [("", None, args) for args in others]
    chance.shuffle(cases)
    folder.mkdir(parents=True)
    for number, (name, content, args) in enumerate(itertools.islice(itertools.cycle(cases), count - 4)):
        run = folder / str(number)

        def prepare(run: Path = run, name: str = name, content: bytes | str | None = content) -> None:
            if content is not None:
                write(run / name, content)

        args = [drawn if arg == "{}" else str(run) if arg == "{run}" else arg for arg in args]
        yield BadInput("figures", [[PYTHON, "-m", "distlab.figures", *args]], (), prepare)
    for text in ("nonsense", "dapple --stages 0", "gpipe --micro-batches x", "dapple --png /dev/null/x.png"):
        yield BadInput("figures", [[PYTHON, "-m", "distlab.show_schedule", *text.split()]])


def launcher(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    letters = "abcdefghijklmnopqrstuvwxyz-_./éж"
    broken = folder / "broken.py"

    def prepare() -> None:
        write(broken, "DEFAULTS = 5\n")

    cases = [
        ["".join(chance.choices(letters, k=chance.randrange(1, 12))) + "~"],
        ["".join(chance.choices(letters, k=chance.randrange(1, 12))) + "~", "--steps", "3"],
        [""],
        ["-x"],
        ["README.md"],
        ["playground", "--port", str(chance.choice([-1, 65536, 10**9]))],
        ["answers", str(folder / "nowhere")],
        ["primer/ghost.py"],
        [str(LAB)],
        [str(broken)],
        ["hybrid", "--master-addr", "no.such.host.invalid"],
        ["hybrid", "3"],
    ]
    chance.shuffle(cases)
    for case in itertools.islice(itertools.cycle(cases), count):
        yield BadInput("launcher", [[str(LAB / "launch.sh"), *case]], (), prepare)


def mpi(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    cases = [
        ["--test_case", chance.choice(["nonsense", "", "Allreduce"])],
        ["--seed", chance.choice(["-1", "x", "1.5"])],
        ["--no-such-flag"],
        ["surplus"],
        ["--test_case"],
    ]
    for number, case in enumerate(itertools.islice(itertools.cycle(cases), count)):
        command = [PYTHON, str(LAB / "mpi/mpi-test.py"), *case]
        if number % 2:
            command = [str(LAB / "launch.sh"), "mpi", "--world-size", "2", *case]
        yield BadInput("mpi", [command])


def rendezvous(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    """Ranks that do not fit together, each in a terminal of its own."""

    def rank(script: str, number: int, port: int, *flags: str) -> list[str]:
        both = [*TINY, "--timeout", "6", "--master-port", str(port), *flags]
        return [PYTHON, str(LAB / script), str(number), *both]

    ga, ddp = SCRIPTS["dp-ga"], SCRIPTS["ddp"]
    differing = chance.choice([("--seed", "1"), ("--lr", "0.5"), ("--micro-batches", "1"), ("--steps", "9")])

    def cases() -> Iterator[tuple[list[list[str]], str | tuple[str, ...]]]:
        two = ("--world-size", "2")
        p = free_port()
        other = [*differing] if differing[0] != "--micro-batches" else ["--batch-size", "2"]
        yield [rank(ga, 1, p, *two), rank(ga, 0, p, *two, *other)], other[0]
        p = free_port()
        yield [rank(ga, 1, p, *two), rank(ddp, 0, p, *two)], "the script"
        p = free_port()
        yield [rank(ga, 1, p, "--world-size", "3"), rank(ga, 0, p, *two)], "--world-size"
        p = free_port()
        three = [rank(ga, number, p, "--world-size", "3") for number in (0, 1, 1)]
        yield three, ("rank 1 is taken", "rank 2 to join", "rank 0 to confirm")  # whichever of the two came first
        yield [rank(ga, 1, free_port(), *two, "--timeout", "2")], "rank 0 did not listen"
        yield [rank(ga, 0, free_port(), *two, "--timeout", "2")], "rank 1"
        holder = socket.socket()
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        _held.append(holder)
        p = holder.getsockname()[1]
        yield [rank(ga, 0, p, *two)], f"--master-port {p}"
        yield (
            [[str(LAB / "launch.sh"), "hybrid", *TINY, "--micro-batches", "1", "--master-port", str(p)]],
            f"--master-port {p}",
        )
        yield [rank(ga, 1, p, *two, "--timeout", "3")], (f"--master-port {p}", "rank 0 does not answer")
        yield [rank(ga, 0, 80, *two, "--master-addr", "198.51.100.7")], "--master-addr"
        yield [rank(ga, 1, 80, *two, "--master-addr", "a..b")], "--master-addr"

    for commands, name in itertools.islice(itertools.cycle(cases()), count):
        yield BadInput("rendezvous", commands, (name,) if isinstance(name, str) else name)
