import json
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.planner_machines import CLUSTER, SIZES, cluster

from distlab.comm.link import Link
from distlab.machine.devices import Place
from distlab_planner import calibrate, measuring
from distlab_planner.calibrate import (
    CalibrateSettings,
    command,
    device_memory_bytes,
    links_of,
    speed_of,
    threads_of_ranks,
    with_earlier,
)
from distlab_planner.machine import AllReduce, Measured, PassSeconds, Waking, interpolate, read_machine, write_machine
from distlab_planner.measuring import Messages
from distlab_planner.model import Dtype, Sizes
from simplellm.errors import InputError

DTYPES: tuple[Dtype, ...] = "float32", "bfloat16"
PASSES = PassSeconds((1.0, 2.0), (2.0, 4.0), (1.0, 2.0), (1.0, 2.0))
MACHINE = cluster(
    inside_together=(Link(2e-5, 5e10),),
    slowdown=(1.0, 1.25),
    waking=(Waking(0.0, 1e-4), Waking(2e-3, 5e-4)),
    measured=(Measured(SIZES, 1, 1, (1, 2), PASSES, PASSES, PASSES, (3.0, 4.0)),),
    all_reduces=(AllReduce(2, "shared", (1e6, 4e6), (1e-3, 3e-3)),),
)


def test_a_machine_survives_its_file_also_that_of_an_earlier_revision(tmp_path: Path) -> None:
    write_machine(MACHINE, path := tmp_path / "machine.json")
    assert read_machine(path) == MACHINE
    path.write_text(json.dumps({**json.loads(path.read_text()), "spin_seconds": 5e-4}))
    assert read_machine(path) == MACHINE


def test_a_machine_without_measurements_is_a_short_file(tmp_path: Path) -> None:
    write_machine(CLUSTER, path := tmp_path / "machine.json")
    content = json.loads(path.read_text())
    for name in ("measured", "all_reduces", "slowdown", "waking", "process_bytes", "optimizer_seconds"):
        del content[name]
    path.write_text(json.dumps(content))
    assert read_machine(path) == CLUSTER


@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (["inside", "latency_seconds"], "fast", 'inside.latency_seconds is "fast"; give a number that is not negative'),
        (["inside", "latency_seconds"], -1, "inside.latency_seconds is -1; give a number that is not negative"),
        (["between", "bytes_per_second"], 0, "between.bytes_per_second is 0; give a number greater than 0"),
        (["inside", "bytes_per_second"], MISSING, "inside.bytes_per_second is missing"),
        (["between", "latency_seconds"], MISSING, "between.latency_seconds is missing"),
        (["slowdown"], [0.5, 1], "slowdown[0] is 0.5; give a number from 1 up"),
        (["all_reduces", 0, "ranks"], 1, "all_reduces[0].ranks is 1; give a whole number from 2 up"),
        (["hosts"], 1.5, "hosts is 1.5; give a whole number from 1 up"),
        (["device"], "tpu", 'device is "tpu"; give one of cpu, cuda'),
        (["name"], 3, "name is 3; give a text"),
        (["measured", 0, "sizes", "compiled"], 1, "measured[0].sizes.compiled is 1; give true or false"),
        (["hosts"], True, "hosts is true; give a whole number from 1 up"),
        (["speed"], 1, "speed is not a key; remove it, or the file, and calibrate again; there are name, device, "),
        (["measured", 0, "block", "F", 1], None, "measured[0].block.F[1] is null; give a number that is not negative"),
        (["measured", 0, "rows"], [2, 1], "measured: rows: give numbers in ascending order, at least one"),
        (["measured", 0, "rows"], [1], "measured: give each pass a number for each of its rows"),
        (["measured", 0, "again"], [1], "measured: again: give a number for each of its rows, or none"),
        (["measured"], 3, "measured is 3; give a list"),
        (["between", "latency_seconds"], math.inf, "between.latency_seconds is Infinity; give a number that is not"),
        (["between", "latency_seconds"], 10**400, "between.latency_seconds is 1000"),
        (
            ["between", "bytes_per_second"],
            1e-320,
            "between.bytes_per_second is 1e-320; give a number between 1e-30 and",
        ),
        (["measured", 0, "block", "F", 1], 1e300, "measured[0].block.F[1] is 1e+300; give a number between 1e-30"),
        (["hosts"], 10**40, "hosts is 1000"),
        (["waking", 1, "idle_seconds"], 0, "waking: idle_seconds: give numbers in ascending order, at least one"),
        (["waking", 0, "idle_seconds"], 1e-3, "waking[0].idle_seconds is 0.001; give 0: a message that was there"),
        (["waking", 1, "seconds"], -1, "waking[1].seconds is -1; give a number that is not negative"),
        (["inside"], [], "inside is []; give an object with the keys latency_seconds, bytes_per_second"),
        (["all_reduces", 0, "seconds"], [1], "all_reduces: give each of size_bytes a number in seconds"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(tmp_path: Path, keys: list[Any], value: Any, sentence: str) -> None:
    write_machine(MACHINE, path := tmp_path / "machine.json")
    content = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if value is MISSING:
        del inner[keys[-1]]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError) as error:
        read_machine(path)
    assert str(error.value).startswith(f"{path}: {sentence}")


def test_what_is_missing_or_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\); .*launch\.sh calibrate"):
        read_machine(path)
    path.write_text('{"name": "a"')
    with pytest.raises(InputError, match=r"cannot be read \(it is not JSON: .*\); .*launch\.sh calibrate"):
        read_machine(path)
    path.write_text('{"name": "a"}')
    with pytest.raises(InputError, match="device is missing"):
        read_machine(path)
    path.write_text("[]")
    with pytest.raises(InputError, match=r"is \[\]; give an object with the keys name, device"):
        read_machine(path)
    write_machine(cluster(all_reduces=(AllReduce(2, "gloo", (), ()),)), path)
    with pytest.raises(InputError, match="all_reduces: size_bytes: give numbers in ascending order, at least one"):
        read_machine(path)


def test_numbers_between_and_beyond_those_that_were_measured() -> None:
    assert interpolate(1.5, (1, 2, 4), (1.0, 3.0, 4.0)) == 2
    assert interpolate(6, (1, 2, 4), (1.0, 3.0, 4.0)) == 5
    assert interpolate(0.5, (1, 2, 4), (1.0, 3.0, 4.0)) == interpolate(0.25, (1, 2, 4), (1.0, 3.0, 4.0)) == 0
    assert interpolate(3, (2,), (4.0,)) == 6


def test_ranks_slow_each_other_as_measured_and_share_cores_beyond() -> None:
    machine = cluster(cores_per_host=2, slowdown=(1.0, 1.25))
    assert [machine.slowdown_of(busy) for busy in (1, 2, 4, 8)] == [1, 1.25, 2.5, 5]
    assert [cluster(cores_per_host=4).slowdown_of(busy) for busy in (1, 4, 8)] == [1, 1, 2]
    assert cluster(cores_per_host=4, slowdown=(1.0, 1.25)).slowdown_of(3) == 1.25, "each has a core of its own"
    assert cluster(slowdown=(1e30, 1.25)).slowdown_of(2) >= 1, "rounding gives 0, by which others would divide"
    further = cluster(cores_per_host=2, slowdown=(1.0, 1.25, 2.0, 3.0))
    assert [further.slowdown_of(busy) for busy in (3, 8)] == [2, 6], "those that were measured count beyond the cores"


def test_only_compiled_passes_have_the_speed_of_compiled_ones() -> None:
    machine = cluster(compiled_speedup=1.5)
    assert [machine.speed("float32", compiled) for compiled in (False, True)] == [1e14, 1.5e14]
    assert CLUSTER.speed("float32", compiled=True) == CLUSTER.speed("bfloat16") == 1e14
    machine = cluster(bfloat16_multiply_adds_per_second=2e14)
    assert [machine.speed(dtype) for dtype in DTYPES] == [1e14, 2e14]


def test_the_speed_of_a_block_is_that_of_its_tokens() -> None:
    [measured] = MACHINE.measured
    tokens = 3 * SIZES.seq_len
    assert speed_of(replace(measured, rows=(3,))) == tokens * SIZES.multiply_adds("block") / 1.0


@pytest.mark.parametrize("rows", [(), (0, 1), (2, 2), (2, 1)])
def test_numbers_of_sequences_to_measure_ascend(rows: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="give one or more numbers of sequences, in ascending order"):
        CalibrateSettings(rows=rows).check()


def test_without_a_compiler_compiled_passes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match=r"--compile: torch needs the C\+\+ compiler no-such-compiler, which is not"):
        CalibrateSettings(compile=True).check()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    for path, told in ((tmp_path, "is a folder; give the path of a file"), (tmp_path / "no/m.json", "no such folder")):
        with pytest.raises(InputError, match=told):
            CalibrateSettings(machine_file=path).check()
    with pytest.raises(InputError, match=r"m\.json: cannot write there \(No such file or directory\)"):
        write_machine(CLUSTER, tmp_path / "no/m.json")  # the folder has gone while the machine was measured


def test_a_file_that_is_no_machine_s_is_not_overwritten(tmp_path: Path) -> None:
    (path := tmp_path / "thesis.json").write_text('{"title": "On rings"}')
    with pytest.raises(InputError, match="title is not a key"):
        command([str(path)], "calibrate")


def test_a_pass_takes_longer_the_longer_its_rank_has_waited_up_to_what_was_measured() -> None:
    assert [MACHINE.waking_seconds(idle) for idle in (0.0, 1e-3, 2e-3, 1.0)] == pytest.approx([1e-4, 3e-4, 5e-4, 5e-4])
    assert [replace(MACHINE, waking=(Waking(0.0, 1e-4),)).waking_seconds(idle) for idle in (0.0, 1.0)] == [1e-4, 1e-4]
    assert replace(MACHINE, waking=()).waking_seconds(1.0) == 0


def test_a_block_that_is_computed_again_takes_what_a_forward_pass_takes_unless_it_was_measured() -> None:
    [measured] = MACHINE.measured
    assert [measured.again_seconds(rows) for rows in (1, 1.5, 2)] == [3.0, 3.5, 4.0]
    assert replace(measured, again=()).again_seconds(2) == 2.0


def test_which_slices_were_not_measured() -> None:
    assert MACHINE.unmeasured_tp(SIZES, [1, 2, 4, 2]) == [2, 4]
    assert MACHINE.unmeasured_tp(replace(SIZES, dmodel=64), [1]) == [1]


def test_a_file_without_the_update_of_sgd_takes_that_of_adam() -> None:
    machine = cluster(optimizer_seconds=3e-9)
    assert [machine.update_seconds(name) for name in ("adam", "adamw", "sgd")] == [3e-9] * 3
    assert replace(machine, sgd_seconds=1e-9).update_seconds("sgd") == 1e-9
    assert replace(machine, sgd_seconds=1e-9).update_seconds("adamw") == 3e-9


def test_the_memory_of_a_machine_is_at_most_the_limit_of_its_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr("distlab.machine.cores.GROUPS", tmp_path)
    monkeypatch.setattr("distlab.machine.cores.OWN", tmp_path / "own")
    cpu = torch.device("cpu")
    of_the_host = device_memory_bytes(cpu)
    assert of_the_host > 3_000_000
    (tmp_path / "memory.max").write_text("3000000\n")
    assert device_memory_bytes(cpu) == 3_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device_memory_bytes(cpu) == of_the_host


def test_numbers_of_threads_that_ranks_may_have() -> None:
    assert threads_of_ranks(2, 1, 4) == [1, 2]
    assert threads_of_ranks(2, 2, 4) == threads_of_ranks(2, 3, 4) == [1]
    assert threads_of_ranks(8, 1, 4) == [1, 2, 4, 8]
    assert threads_of_ranks(8, 2, 4) == [1, 2, 4]
    assert threads_of_ranks(12, 1, 5) == [1, 2, 3, 4, 6, 12]


def test_as_many_ranks_as_the_hosts_have_room_for_are_not_too_many() -> None:
    assert CLUSTER.with_room_for(32, "c.json") == CLUSTER
    with pytest.raises(InputError, match=r"c.json has 4 hosts with 8 ranks each, but the layout has 33 ranks"):
        CLUSTER.with_room_for(33, "c.json")
    with pytest.raises(InputError, match=r"c.json has 1 host with 8 ranks, but the layout has 9 ranks"):
        cluster(hosts=1).with_room_for(9, "c.json")
    assert cluster(device="cpu", hosts=1).with_room_for(33, "c.json").ranks_per_host == 33
    with pytest.raises(InputError, match=r"c.json has 4 hosts"):
        cluster(device="cpu").with_room_for(33, "c.json")


def test_the_senders_own_time_is_no_part_of_a_links_latency() -> None:
    """It is that of the first pair, unless a whole message takes less."""
    messages = [Messages(Link(5e-5, 1e9), 2e-5), Messages(Link(7e-5, 2e9), 4e-5)]
    seconds, links = links_of(messages)
    assert seconds == 2e-5
    assert [link.latency_seconds for link in links] == pytest.approx([3e-5, 5e-5])
    assert [link.bytes_per_second for link in links] == [1e9, 2e9]
    assert links_of([*messages, Messages(Link(1e-5, 1e9), 3e-5)])[0] == 1e-5


def test_measuring_again_with_fewer_ranks_keeps_what_more_of_them_took(tmp_path: Path) -> None:
    of_four = AllReduce(4, "shared", (1e6,), (2e-3,))
    slices, threads = replace(MACHINE.measured[0], tp=2), replace(MACHINE.measured[0], threads=2)
    earlier = replace(
        MACHINE,
        slowdown=(1.0, 1.5, 2.0, 3.0),
        inside_together=(Link(1e-5, 5e10), Link(1e-5, 3e10)),
        all_reduces=(*MACHINE.all_reduces, of_four),
        measured=(*MACHINE.measured, slices, threads),
        bfloat16_multiply_adds_per_second=2e14,
        compiled_speedup=1.5,
        compiler_bytes=1e9,
    )
    path = tmp_path / "machine.json"
    assert with_earlier(MACHINE, path) == MACHINE
    write_machine(earlier, path)
    of_two_pairs = Link(3e-5, 4e10)
    now = replace(MACHINE, all_reduces=(AllReduce(2, "shared", (1e6,), (9e-3,)),), inside_together=(of_two_pairs,))
    again = with_earlier(now, path)
    assert again.slowdown == (1.0, 1.25, 2.0, 3.0)
    assert again.inside_together == (of_two_pairs, Link(1e-5, 3e10))
    assert again.all_reduces == (*now.all_reduces, of_four)
    assert again.measured == (*MACHINE.measured, slices, threads)
    assert (again.bfloat16_multiply_adds_per_second, again.compiled_speedup, again.compiler_bytes) == (2e14, 1.5, 1e9)
    assert with_earlier(replace(now, compiled_speedup=1.25), path).compiled_speedup == 1.25


@pytest.mark.parametrize("other", [{"device": "cpu"}, {"cores_per_host": 2}], ids=["device", "cores"])
def test_measuring_another_machine_keeps_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    write_machine(replace(MACHINE, slowdown=(1.0, 1.5, 2.0), **other), tmp_path / "machine.json")
    wider = (replace(MACHINE.measured[0], sizes=replace(SIZES, dmodel=64)),)
    now = replace(MACHINE, measured=wider)
    assert with_earlier(now, tmp_path / "machine.json") == now


def test_the_name_of_a_file_does_not_change_what_it_needs(tmp_path: Path) -> None:
    write_machine(replace(CLUSTER, multiply_adds_per_second=0.0), path := tmp_path / "bfloat16.json")
    with pytest.raises(InputError, match=r"multiply_adds_per_second is 0\.0; give a number greater than 0"):
        read_machine(path)


def test_each_measurement_has_its_place_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two hosts with four ranks each: a pair of ranks on a host, one on two hosts, and two on a host at once."""
    sliced = dict[Sizes, frozenset[int]]()
    latencies = {((0, 1),): 1.0, ((0, 4),): 2.0, ((0, 1), (2, 3)): 3.0}

    def passes_of(sizes: Sizes) -> PassSeconds:
        seconds = (4e-3 if sizes.dtype == "float32" else 2e-3) / (4 if sizes.compiled else 1)
        return replace(PASSES, F=(seconds, 2 * seconds))

    def measure(sizes: Sizes, kinds: Sequence[measuring.Slicing], *_: object) -> list[Measured]:
        sliced[sizes] = frozenset(kind.tp for kind in kinds)
        return [Measured(sizes, 1, 1, (1, 2), PASSES, passes_of(sizes), PASSES)]

    instead: dict[str, Callable[..., Any]] = {
        "measure_messages": lambda _, pairs, __: Messages(Link(latencies[tuple(pairs)], 1e9), 0.25),
        "measure_slowdown": lambda *_: (1.0, 1.25),
        "measure_all_reduces": lambda *_: (),
        "measure_passes": measure,
        "measure_optimizer": lambda optimizer, _: 2.0 if isinstance(optimizer, torch.optim.Adam) else 1.0,
        "measure_waking": lambda _: (),
        "build": lambda *_: torch.nn.Linear(1, 1),
    }
    for name, function in instead.items():
        monkeypatch.setattr(measuring, name, function)
    tiny_bytes = {(): 4e6, ("--compile",): 7e6}
    monkeypatch.setattr(
        calibrate, "with_tiny_run", lambda machine, _, *more: replace(machine, process_bytes=tiny_bytes[more])
    )
    joined = SimpleNamespace(local_ranks=4, places=[*4 * [Place("A")], *4 * [Place("B")]])
    own: dict[str, Any] = {"machine_file": tmp_path / "machine.json", "dtype": "bfloat16", "compile": True}
    settings = replace(calibrate.DEFAULTS, world_size=8, **own)
    run: Any = SimpleNamespace(settings=settings, device=torch.device("cpu"), rank=0, world_size=8, joined=joined)
    calibrate.calibrate(run)
    found = read_machine(settings.machine_file)
    links = found.inside, found.between, *found.inside_together
    assert [link.latency_seconds for link in links] == [0.75, 1.75, 2.75], "without the time of the call that sends"
    assert (found.hosts, found.ranks_per_host, found.message_seconds) == (2, 4, 0.25)
    assert (found.optimizer_seconds, found.sgd_seconds, found.slowdown) == (2.0, 1.0, (1.0, 1.25))
    assert (found.process_bytes, found.compiler_bytes) == (4e6, 3e6)
    times = found.bfloat16_multiply_adds_per_second / found.multiply_adds_per_second, found.compiled_speedup
    assert times == pytest.approx((2, 4), rel=1e-4)
    speed = 2 * 4 * found.multiply_adds_per_second / 1e9
    assert f"{found.name}, {speed:.1f} billion multiply-adds/s" in capsys.readouterr().out
    assert {*sliced.values()} == {frozenset({1})}, "slices are not compiled"
    run.settings = replace(settings, world_size=4, compile=False)
    run.world_size, run.joined.places = 4, 4 * [Place("A")]
    calibrate.calibrate(run)
    found = read_machine(settings.machine_file)
    links = found.inside, found.between, *found.inside_together
    assert (found.hosts, [link.latency_seconds for link in links]) == (1, [0.75, 0.75, 2.75])
    assert sliced[run.settings.sizes] == {1, 2, 3}, "of six heads, as far as there are ranks"
