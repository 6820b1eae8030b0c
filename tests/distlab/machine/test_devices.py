"""Which backend and how many threads, without the hardware."""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chapters import MODEL, TRAINING, load
from support.processes import LAB, free_port, run, run_ranks, steps_taken
from support.terminals import fork_command
from torch.torch_version import TorchVersion

from distlab.axes.grid import Grid
from distlab.comm.context import Options, first_context
from distlab.machine import network
from distlab.machine.devices import (
    SHARE_GPUS,
    Place,
    cores,
    cores_to_share,
    local_ranks,
    pick_backend,
    pick_device,
    pick_device_type,
    tf32_override,
    threads_per_rank,
)
from distlab.machine.network import patient_threads
from distlab.run.joining import check_transport
from distlab.run.starting import set_up
from distlab.run.training import TrainingRun
from distlab.settings.common import RunSettings, parse
from distlab.settings.stages import PipelineSettings, ScheduledPipelineSettings
from simplellm.errors import InputError


def places(*gpus_by_rank: str, hosts: str = "") -> list[Place]:
    """Ranks that see GPUs, each called by a letter; all on the same host, or each on one that is called by a letter."""
    return [Place(host, tuple(gpus)) for gpus, host in zip(gpus_by_rank, hosts or "A" * len(gpus_by_rank), strict=True)]


@pytest.mark.parametrize(
    ("asked", "where", "backend"),
    [
        ("auto", places("", "", ""), "gloo"),
        ("auto", places("x", "x", "x"), "gloo"),
        ("auto", places("xy", "xy"), "nccl"),
        ("auto", places("x", "y"), "nccl"),  # CUDA_VISIBLE_DEVICES gives each rank one
        ("auto", places("vw", "xy", "vw", "xy", hosts="ABAB"), "nccl"),
        ("auto", places("vw", "x", "vw", hosts="ABA"), "nccl"),
        ("auto", places("vw", "xy", "vw", "vw", hosts="ABAA"), "gloo"),
        ("gloo", places("x"), "gloo"),
        ("nccl", places("x"), "nccl"),
    ],
)
def test_backend(asked: str, where: list[Place], backend: str) -> None:
    assert pick_backend(asked, where) == backend


def test_the_ranks_of_a_host_take_its_gpus_in_turn() -> None:
    where = places("vw", "xy", "vw", "xy", "vw", hosts="ABABA")
    taken = [pick_device(where, rank) for rank in range(5)]
    assert taken == [torch.device("cuda", number) for number in (0, 0, 1, 1, 0)]
    assert local_ranks(where, 2) == [0, 2, 4]
    assert pick_device(places("", ""), 1) == torch.device("cpu")


def test_nccl_with_two_ranks_on_one_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="--backend nccl: ranks 1 and 2 share a GPU of B, which NCCL refuses"):
        pick_backend("nccl", places("x", "y", "y", hosts="ABB"))
    monkeypatch.setenv(SHARE_GPUS, "1")
    assert pick_backend("nccl", places("x", "y", "y", hosts="ABB")) == "nccl", "the user has asked NCCL for it"
    assert pick_backend("auto", places("x", "y", "y", hosts="ABB")) == "gloo"
    with pytest.raises(InputError, match="--backend nccl: NCCL moves CUDA tensors only"):
        pick_backend("nccl", places("", ""))


def test_over_nccl_ranks_that_share_a_gpu_are_hosts_of_their_own_and_torchs_deadline_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleNamespace(group_rank=1, group_size=3, store=None)
    for gpus, host in (("xyz", None), ("xyy", "lab-rank-1")):
        monkeypatch.setattr(os, "environ", {SHARE_GPUS: "1"})
        context = first_context(made, Options(library="nccl", places=places(*gpus), timeout_seconds=5))
        assert (context.device, context.library) == (torch.device("cuda", 0), "nccl")
        assert (os.environ.get("NCCL_HOSTID"), os.environ.get("NCCL_IB_DISABLE")) == (host, host and "1")
        assert context.group_timeout > timedelta(seconds=5), "NCCL ends the process when it passes"


def test_shared_memory_is_for_the_cpus_of_one_host() -> None:
    check_transport("shared", places("", "", ""))
    check_transport("auto", places("x", "", hosts="AB"))
    with pytest.raises(InputError, match="--transport shared: ranks 0 and 2 are on A and B, which have no memory"):
        check_transport("shared", places("", "", "", hosts="AAB"))
    with pytest.raises(InputError, match="--transport shared: this run computes on GPUs"):
        check_transport("shared", places("x", "x"))


def test_ranks_on_the_cpu_and_on_gpus_do_not_mix() -> None:
    with pytest.raises(InputError, match="--device auto: rank 0 would compute on cuda and rank 2 on cpu"):
        pick_backend("auto", places("x", "y", "", hosts="AAB"))
    with pytest.raises(InputError, match="--device auto: rank 0 would compute on cpu and rank 1 on cuda"):
        pick_backend("gloo", places("", "x", hosts="AB"))


def test_a_rank_on_the_cpu_hides_gpus_from_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    pick_device_type("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device_type("auto") == "cpu"
    with pytest.raises(InputError, match="--device cuda"):
        pick_device_type("cuda")


@pytest.mark.parametrize("is_launched", [True, False])
@pytest.mark.parametrize(("ranks", "shares", "queues"), [(2, "", "32"), (3, "", None), (3, "1", "32")])
def test_only_ranks_that_share_a_gpu_over_gloo_have_few_queues(
    ranks: int, shares: str, queues: str | None, is_launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "before")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    if is_launched:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    else:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(SHARE_GPUS, shares)
    assert pick_device_type("auto", 1 if is_launched else ranks) == "cuda"
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as the user wants it
    pick_device_type("auto", ranks)
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_a_run_on_the_cpu_never_opens_a_gpu(tmp_path: Path) -> None:
    """Not even through a library that it calls, on a machine that has one."""

    def open_gpu(*_: object) -> None:
        raise AssertionError("a GPU was opened")

    def have_gpu() -> None:
        torch.cuda.is_available = lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        torch.cuda._lazy_init = torch._C._cuda_init = open_gpu

    flags = [*MODEL, *TRAINING, *"--steps 2 --save-every 1 --trace --out".split(), str(tmp_path)]
    command = [sys.executable, str(LAB / "primer/intro.py"), *flags]
    ended = fork_command(command, have_gpu, CUDA_VISIBLE_DEVICES="0").finish()
    assert ended.status == 0, ended.err
    assert steps_taken(tmp_path) == 2


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_per_rank(ranks) for ranks in (1, 3, 8, 20)] == [8, 2, 1, 1]
    assert [cores_to_share(parties) for parties in (1, 3, 8, 20)] == [8, 2, 1, 1]
    given = list[int]()
    monkeypatch.setattr("distlab.run.starting.set_up_heap", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    for settings in (ScheduledPipelineSettings(), PipelineSettings()):
        set_up(Grid(0, {"pp": 3}), places("", "", ""), settings)
    assert given == [2, 8], "stages that compute one after another have all cores each"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert (threads_per_rank(3), cores_to_share(3)) == (5, None)


def test_threads_that_are_bound_to_cores_are_remarked_on_where_ranks_share_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ranks that were started by hand: launch.sh leaves the variable out."""
    monkeypatch.setattr("distlab.run.starting.set_up_heap", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for ranks, bound in ((1, "true"), (2, "true"), (2, "FALSE")):
        monkeypatch.setenv("OMP_PROC_BIND", bound)
        set_up(Grid(0, {"dp": ranks}), places(*[""] * ranks), RunSettings())
        said = capsys.readouterr().out
        is_told = "OMP_PROC_BIND=true: binds the threads of every rank to the same cores" in said
        assert is_told == ("binds the threads" in said) == ((ranks, bound) == (2, "true"))


def test_the_variable_that_asks_for_tf32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # which forbids it
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    assert tf32_override() == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"
    monkeypatch.delenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
    assert tf32_override() is None


usual_policy = pytest.mark.skipif(
    not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs Linux, and a process whose scheduling nobody has changed",
)


def in_a_thread(work: Callable[[], int]) -> int:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@usual_policy
def test_threads_are_patient_that_start_in_the_context() -> None:
    def policy() -> int:
        return os.sched_getscheduler(0)

    def fail() -> None:
        assert in_a_thread(policy) == os.SCHED_BATCH
        raise ValueError

    with pytest.raises(ValueError), patient_threads():  # noqa: PT011, it has no message
        fail()
    assert policy() == in_a_thread(policy) == os.SCHED_OTHER


@usual_policy
def test_a_policy_that_the_user_has_chosen_stays() -> None:
    def policy_inside() -> int:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with patient_threads():
            return os.sched_getscheduler(0)

    assert in_a_thread(policy_inside) == os.SCHED_IDLE


def test_a_computer_without_policies_or_that_forbids_them_leaves_all_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbid, raising=False)
    with patient_threads():
        pass
    monkeypatch.delattr(os, "sched_getscheduler", raising=False)
    with patient_threads():
        pass


def policies_in_a_run(rank: int, out: Path, port: int) -> tuple[list[int], int]:
    """Those of gloo's threads, and that of the thread that computes."""
    script = "hybrid/intro_hybrid.py"
    flags = [*MODEL, *TRAINING, "--dp", "2", "--pp", "1", "--tp", "2", "--out", str(out), "--master-port", str(port)]
    run: TrainingRun[Any] = TrainingRun(parse(load(script).DEFAULTS, "", [str(rank), *flags]), LAB / script)
    run.grid.make_groups("dp", "tp")
    loops: list[int] = []
    deadline = time.monotonic() + 10
    while len(loops) < 3 and time.monotonic() < deadline:  # a thread gives itself its name when it first runs
        time.sleep(0.05)
        names = {int(thread.name): (thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()}
        loops = [thread for thread, name in names.items() if name.strip() == "gloo_tcp_loop"]
    policies = [os.sched_getscheduler(loop) for loop in loops], os.sched_getscheduler(0)
    run.close()
    return policies


@usual_policy
@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="torch 2.11 gives gloo's threads no name")
def test_gloos_threads_are_patient_in_a_run_and_the_one_that_computes_is_not(tmp_path: Path) -> None:
    for of_gloo, own in run_ranks(4, policies_in_a_run, tmp_path, free_port()):
        assert own == os.SCHED_OTHER
        assert of_gloo == [os.SCHED_BATCH] * 3, "of the run's group, and of the one along each axis"


SPINNING = """
import distlab, statistics, time, torch
torch.set_num_threads(2)
numbers, times = torch.ones(1 << 20), []
for _ in range(5):
    numbers.add_(1)  # not a product: MKL may compute it in one thread
    busy = time.process_time()
    time.sleep(0.1)
    times.append(time.process_time() - busy)
print(statistics.median(times))
"""


@pytest.mark.skipif(cores() < 2 or sys.platform != "linux", reason="needs a second core, and GNU's OpenMP")
def test_threads_that_have_computed_leave_their_cores_to_other_ranks() -> None:
    """And soon: by default they would use them for 15 times as long, waiting in a loop."""
    spins: tuple[dict[str, Any], ...] = ({}, {"GOMP_SPINCOUNT": "300000"})
    usual, default = (float(run(sys.executable, "-c", SPINNING, **environment).out) for environment in spins)
    assert usual < default / 3


@pytest.mark.parametrize(
    ("own_address", "on_one_host", "interface"),
    [("192.0.2.7", True, "lo"), ("192.0.2.7", False, "eth7"), ("127.0.0.1", False, "lo"), (None, False, None)],
)
def test_ranks_listen_at_one_interface_and_on_one_host_at_loopback(
    own_address: str | None, on_one_host: bool, interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has set another one; `own_address` is that on the route to rank 0."""
    monkeypatch.setattr(network, "own_address", lambda _: own_address)
    monkeypatch.setattr(network, "interface_of", {"192.0.2.7": "eth7"}.get)
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "eth7"), (2, "lo")])
    chosen = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    for theirs in ({}, {"GLOO_SOCKET_IFNAME": "eth0"}):
        with monkeypatch.context() as patch:
            patch.setattr(os, "environ", {**theirs})
            network.keep_to_interface("the host of rank 0", on_one_host)
            assert os.environ == chosen | theirs
