"""Forked ranks of a student's code end whatever it does, with all that it has started."""

import math
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.processes import alive, wait_for
from support.written_records import SHAPE, record

from distlab.comm.waits import Wait
from distlab.rendezvous.diagnosis import Notice
from distlab.settings.common import RunSettings
from distlab.settings.training import TrainSettings
from distlab_compare.records import Recordings
from distlab_exercises.catalogue import Trial
from distlab_exercises.collectives import name_difference, whose
from distlab_exercises.comparison import Comparison
from distlab_exercises.forked import forked, leaving_no_process
from distlab_exercises.loading import settings_for
from distlab_exercises.ranks import LAST_LINES, Facts, Patience, Report, Submission, free_port, raise_trouble
from distlab_exercises.verdict import Wrong
from simplellm.errors import InputError

PATIENCE = Patience(still=0.5, longest=1)


def trouble(reports: list[Report]) -> Wrong:
    with pytest.raises(Wrong) as found:
        raise_trouble(reports)
    return found.value


def test_a_part_that_is_missing_is_told_before_what_fails_without_it() -> None:
    states = "died", "failed", "wrong", "missing"  # each is told before those to its left
    reports = [Report(rank, state, [state], mistake="summed") for rank, state in enumerate(states)]
    for count, mistake in enumerate(("died", "exception", "summed", "not-written"), 1):
        assert trouble(reports[:count]).mistake == mistake
    others = [Report(1, "lost", line="line 7: recv"), Report(2, "stuck", line="line 9: send"), Report(3, "ended")]
    told = ("rank 0 died", "rank 1 was in line 7: recv", "rank 2 was in line 9: send")
    assert trouble([reports[0], *others]).sentences == told


def test_only_ranks_at_one_line_are_said_to_be_in_the_same_collective() -> None:
    waits = [Notice(rank, Wait("the sum", "collective", (1 - rank,), 0), {"0,1": 1}).to_json() for rank in range(2)]
    reports = [Report(rank, "stuck", ["waits"], line=f"line {rank}", notice=wait) for rank, wait in enumerate(waits)]
    assert trouble(reports).sentences[0] == "the ranks wait for each other, and none can go on"


def misbehave(rank: int, submission: Submission) -> Facts:
    """Rank 0 never ends, rank 1 dies, rank 2 prints and ends; rank 0 has started processes that leave its group."""
    if rank == 0:
        subprocess.Popen(["sh", "-c", "sleep 1000 & echo $! > pid; wait"], start_new_session=True)  # pid: in its folder
        while True:
            time.perf_counter()
    if rank == 1:
        os._exit(3)
    print("# a line of the lab's\n" + "an earlier line\n" * LAST_LINES + "0 8.3\n2 sees this\n" + 1000 * "x")
    return {"rank": rank}


def test_ranks_end_with_what_they_have_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab_exercises.ranks.SECONDS_FOR_CONSEQUENCES", 0.2)  # after a death, others say where
    started = time.monotonic()
    submission = Submission(Path(__file__), tmp_path, Patience(still=60, longest=1))
    reports = submission.run_ranks(3, misbehave)
    assert time.monotonic() - started < 20
    assert [report.state for report in reports][1:] == ["died", "ended"]
    assert reports[2].facts == {"rank": 2}
    *earlier, last, cut = submission.printed()
    assert earlier == ["rank 2: an earlier line"] * (LAST_LINES - 2)
    assert (last, cut) == ("rank 2: 2 sees this", f"rank 2: {200 * 'x'}"), "no more than that of a line"
    first, second = trouble(reports).sentences
    assert trouble(reports).mistake == "died"
    assert first == "rank 1 ended without a word: it was killed, or called os._exit"
    assert second.startswith("rank 0 was in line ")
    child = int((tmp_path / "pid").read_text())
    assert wait_for(lambda: not alive(child), 5)


def test_a_fork_replaces_the_pool_of_threads_before_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise autograd's threads replace it, and if two do so at the same time, torch may abort the process."""
    replaced: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", replaced.append)
    with forked(1, lambda _, pipe: pipe.send(replaced)) as pipes:
        (pipe,) = pipes
        assert pipe.recv() == [torch.get_num_threads()]
    assert not replaced, "in the fork alone"


def test_what_is_left_behind_ends_with_the_outer_of_two_contexts() -> None:
    with subprocess.Popen(["sleep", "1000"]) as earlier:
        try:
            with leaving_no_process():
                with leaving_no_process():
                    pass
                child = int(subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null & echo $!"]))
            assert not alive(child)
            assert earlier.poll() is None, "it was there before"
        finally:
            earlier.kill()


def test_a_port_at_which_another_program_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as other:
        taken = other.getsockname()[1]
        drawn = iter((taken, free := free_port()))
        monkeypatch.setattr("random.SystemRandom.randrange", lambda *_: next(drawn))
        assert free_port() == free != taken


def test_settings_of_a_file_that_cannot_work_are_refused() -> None:
    with pytest.raises(InputError, match="--timeout 0: "):
        settings_for(0, RunSettings(), RunSettings, {"timeout": 0})
    with pytest.raises(InputError, match="the file needs DEFAULTS, of the class TrainSettings, as in its chapter"):
        settings_for(0, RunSettings(), TrainSettings, {})


def exit_early(rank: int, submission: Submission) -> Facts:
    sys.exit()


def test_a_file_that_calls_sys_exit_is_told_so(tmp_path: Path) -> None:
    found = trouble(Submission(Path(__file__), tmp_path, PATIENCE).run_ranks(1, exit_early))
    assert found.sentences[0].startswith("failed: the file called sys.exit() before its work was done (line ")


def never_end(rank: int, submission: Submission) -> Facts:
    while True:
        pass


def test_an_endless_loop_is_ended_and_its_line_named(tmp_path: Path) -> None:
    """It is always at the same place, and yet does not stand still."""
    patience = Patience(still=2, longest=100, work=2.2)  # a busy machine takes long to have computed that much
    found = trouble(Submission(Path(__file__), tmp_path, patience).run_ranks(1, never_end))
    assert found.mistake == "deadlock"
    assert re.match(r"rank 0 had not finished after \d\d? s, in line ", found.sentences[1]), "long before 100 s"


def wait_without_a_name(rank: int, submission: Submission) -> Facts:
    """Both ranks receive first, without the lab's names for waits, after they have computed."""
    while time.thread_time() < 0.3:
        pass
    store = dist.TCPStore("localhost", submission.port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    dist.recv(torch.zeros(1), 1 - rank)
    return {}


def test_ranks_that_wait_for_each_other_say_where(tmp_path: Path) -> None:
    patience = Patience(still=2, longest=20)  # meeting, too, is a wait
    reports = Submission(Path(__file__), tmp_path, patience).run_ranks(2, wait_without_a_name)
    waits = tuple(f"rank {rank} waits, in {reports[rank].line}" for rank in range(2))
    assert trouble(reports).sentences[1:] == waits
    assert reports[0].line.endswith("dist.recv(torch.zeros(1), 1 - rank)")


def fail_alone(rank: int, submission: Submission, error: BaseException) -> Facts:
    if rank:
        time.sleep(1000)
    raise error


@pytest.mark.parametrize("error", [NotImplementedError("write it"), ValueError("no"), Wrong("summed", "too large")])
def test_nobody_waits_for_the_others_after_a_rank_has_failed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab_exercises.ranks.SECONDS_FOR_CONSEQUENCES", 0.1)
    started = time.monotonic()
    reports = Submission(Path(__file__), tmp_path, Patience(still=30, longest=30)).run_ranks(2, fail_alone, error)
    assert time.monotonic() - started < 20
    assert str(error) in trouble(reports).sentences[0]


def abort(rank: int, submission: Submission) -> Facts:
    os.abort()  # as gloo does


def test_a_rank_that_a_library_ends_is_told_with_its_line_and_the_likely_cause(tmp_path: Path) -> None:
    [sentence] = trouble(Submission(Path(__file__), tmp_path, PATIENCE).run_ranks(1, abort)).sentences
    cause = r"as happens where ranks do not all call the same collectives, with tensors of the same size"
    assert re.fullmatch(rf"crashed, {cause} \(line \d+: os\.abort\(\)  # as gloo does\)", sentence)


def wait_for_one_that_has_finished(rank: int, submission: Submission) -> Facts:
    time.sleep(1000 * rank)
    return {}


def test_a_rank_that_has_finished_is_told_where_others_wait(tmp_path: Path) -> None:
    patience = Patience(still=0.7, longest=20)
    found = trouble(Submission(Path(__file__), tmp_path, patience).run_ranks(2, wait_for_one_that_has_finished))
    assert found.sentences[:2] == ("the ranks do not come to an end", "rank 0 has finished")
    assert found.sentences[2].startswith("rank 1 waits, in line ")


def stand_still_in_turn(rank: int, submission: Submission) -> Facts:
    """Each rank stands still while the other computes; rank 1, which moves on, ends after rank 0."""
    turns = [submission.folder / "first", submission.folder / "second"]
    if rank == 1:
        while not turns[0].exists():
            pass
    time.sleep(1 + 0.9 * rank)  # the second time so long that it would be the end, if rank 0 still stood still
    turns[rank].touch()
    while not turns[1].exists():
        pass
    time.sleep(rank / 2)
    return {"seed": torch.initial_seed()}


def test_a_rank_that_moves_on_does_not_stand_still(tmp_path: Path) -> None:
    reports = Submission(Path(__file__), tmp_path, Patience(still=0.7, longest=20)).run_ranks(2, stand_still_in_turn)
    assert [report.state for report in reports] == ["ended", "ended"]
    assert reports[0].facts != reports[1].facts, "each draws random numbers of its own"


@pytest.mark.parametrize(
    ("layout", "own", "told"),
    [
        ({"dp": 2}, [[1, 2], [3, 4]], "the sequences of rank 0 in step 0"),
        ({"dp": 2}, [[7, 8], [9, 0]], "sequences from number 1 of rank 1 in step 0 on"),
        ({"dp": 2}, [[0, 0], [0, 0]], "sequences of none of the steps up to 0"),
        ({"dp": 2, "pp": 2}, [[5, 6], [7, 8]], "the sequences of pipeline 1 in step 0"),
        ({"dp": 2, "tp": 2}, [[5, 6], [7, 8]], "the sequences of replica 1 in step 0"),
    ],
)
def test_whose_sequences_a_rank_has_is_told(
    layout: dict[str, int], own: list[list[int]], told: str, tmp_path: Path
) -> None:
    facts = {"losses": [1.0], "tokens": [[[[1, 2], [3, 4]], [[5, 6], [7, 8]]]]}
    tokens = [[[1, 2], [3, 4]], *[own] * (math.prod(layout.values()) - 1)]
    reports = [Report(rank, "ended", facts={"tokens": [of_rank]}) for rank, of_rank in enumerate(tokens)]
    run, one = (Recordings(tmp_path, {"layout": axes, "world_size": 1}) for axes in (layout, {}))
    with pytest.raises(Wrong) as found:
        Comparison(Trial(layout, 2), run, one, facts, 0.5, reports).expect_right_data()
    assert found.value.sentences == (f"step 0: {run.describe(1)} has {told}, not its own",)


def test_the_rank_that_does_too_much_is_named_though_others_do_not(tmp_path: Path) -> None:
    record(tmp_path, 0, {"weights.head": torch.ones(SHAPE)})
    one, run = (Recordings(tmp_path, {"layout": layout, "world_size": 1}) for layout in ({}, {"dp": 2}))
    facts = {"losses": [1.0], "tokens": [], "sequence_bytes": 0, "seq_len": 5}
    others = {"loss": 4000, "control": 4000}
    sent = [[{}, {"all_gather": size, "layer gradients": 4000, **others}, {}] for size in (120, 280)]
    reports = [Report(rank, "ended", facts={"updated": 4 * rank + 4, "sent": sent[rank]}) for rank in range(2)]
    with pytest.raises(Wrong, match="the optimizer on rank 1 updates 8 weights of 8; its share is 4"):
        Comparison(Trial({"dp": 2}, 2), run, one, facts, 0.5, reports).expect_shared_out()
    with pytest.raises(Wrong, match=r"rank 1 .*sends 7 numbers of each token; 3 are enough"):
        Comparison(Trial({"tp": 2}, 2), run, one, facts, 0.5, reports).expect_no_logits_sent(3)
    for report, counts in zip(reports, ((0, 0, 8), (0, 8, 8)), strict=True):
        report.facts["sent"] = [{"weights": n, **dict.fromkeys(others, step)} for step, n in enumerate(counts)]
    for overlaps in (False, True):  # on one of the ranks
        for report in reports:
            report.facts |= {"overlaps": overlaps and report.rank == 0}
        sent_late = [replace(report, facts=report.facts | {"sent": [{}, {"gradients": 1}, {}]}) for report in reports]
        assert len(Comparison(Trial({"dp": 2}, 2), run, one, facts, 0.5, sent_late).remarks({})) == 1 - overlaps
        assert not Comparison(Trial({"pp": 2}, 2), run, one, facts, 0.5, sent_late).remarks({}), "nothing to average"
    trial = Trial({"dp": 2}, 2, settings={"sync_every": 2})
    with pytest.raises(Wrong, match="after step 0 of 2: rank 1 sends weights"):
        Comparison(trial, run, one, facts, 0.5, reports).expect_average_when_due(2)


ACTIVATIONS, WEIGHTS, BLOCKS = 80, 32, 5  # bytes of a replica between two blocks, bytes of a rank's weights


@pytest.mark.parametrize(
    ("layout", "sent"),  # what each rank sends in a step
    [
        ({"dp": 4}, [{"all_reduce": 2 * 3 * WEIGHTS // 4}] * 4),
        ({"pp": 3}, [{"send": ACTIVATIONS}, {"send": 2 * ACTIVATIONS}, {"send": ACTIVATIONS}]),
        ({"tp": 4}, [{"all_reduce": 2 * 3 * ACTIVATIONS // 4 * 4 * BLOCKS}] * 4),
        ({"dp": 2, "pp": 2}, [{"send": ACTIVATIONS, "all_reduce": WEIGHTS}] * 4),
        ({"pp": 2, "tp": 2}, [{"send": ACTIVATIONS // 2, "all_reduce": ACTIVATIONS * 2 * BLOCKS}] * 4),
    ],
    ids=["replicas", "stages", "slices", "stages of replicas", "slices of stages"],
)
def test_the_bytes_that_a_layout_needs_are_those_of_rings_and_of_neighbors(
    layout: dict[str, int], sent: list[dict[str, int]], tmp_path: Path
) -> None:
    for rank in range(len(sent)):
        record(tmp_path, rank, {"weights.mlp": torch.ones(SHAPE)})
    run = Recordings(tmp_path, {"layout": layout, "world_size": len(sent)})
    reports = [Report(rank, "ended", facts={"sent": [{}, own, {}]}) for rank, own in enumerate(sent)]
    facts = {"losses": [1.0], "blocks": BLOCKS, "sequence_bytes": ACTIVATIONS // 2}
    found = Comparison(Trial(layout, batch_size=2), run, run, facts, 0.5, reports).sent()
    assert len(found) == len(layout)
    assert all(total == needed > 0 for total, needed in found.values()), found


@pytest.mark.parametrize(("factor", "name"), [(1, "not-gathered"), (3, "other")])
def test_weights_that_did_not_arrive_are_told_from_others(factor: float, name: str, tmp_path: Path) -> None:
    """Rank 1 lacks the last rows, which rank 0 has updated; or it also has other numbers in the first."""
    before, after = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    for step, weights in enumerate((before, after)):
        record(tmp_path / "one", 0, {"weights.mlp": weights, "gradient.mlp": before - after}, step=step)
        record(tmp_path / "run", 0, {"weights.mlp": weights}, step=step)
    late = torch.cat([factor * after[:2], before[2:]])
    for step, weights in enumerate((before, late)):
        record(tmp_path / "run", 1, {"weights.mlp": weights}, step=step)
    one, run = (Recordings(tmp_path / at, {"layout": {"dp": n}}) for n, at in enumerate(("one", "run"), 1))
    found = Comparison(Trial({"dp": 2}, 2), run, one, {"losses": [1.0]}, 1.0, []).divergence("weights", 0)
    assert found
    assert [(each.rank, each.mistake.name) for each in found.differences] == [(1, name)]


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ((0, 0, 0), "has only zeros"),
        ((0, 1, 0), "has rank 1's tensor"),
        ((1, 0, 1), "has the sum of rank 0's, rank 2's, without rank 1's"),
        ((1, 2, 1), "has the sum of rank 0's, rank 1's 2 times, rank 2's"),
        ((2, 0, 0), "has the sum of rank 0's 2 times, without rank 1 and 2's"),
    ],
)
def test_a_wrong_sum_is_described_by_its_terms(times: tuple[int, ...], told: str) -> None:
    inputs = [*torch.randn(3, 8)]
    assert whose(torch.stack([n * x for n, x in zip(times, inputs, strict=True)]).sum(0), inputs) == told


def test_a_wrong_row_of_an_all_to_all_is_described_by_the_segments_for_that_rank() -> None:
    inputs = [*torch.randn(2, 2, 8)]  # by rank, a segment for each rank
    for kind, mixed in (("alltoall", "segment"), ("allgather", "tensor")):
        of_rank_1 = [x[1] for x in inputs] if kind == "alltoall" else inputs
        right = torch.stack(of_rank_1)
        with pytest.raises(Wrong) as found:
            name_difference(kind, 1, right.flip(0), right, inputs, None, None)
        assert found.value.sentences == (f"rank 1: row 0, where rank 0's {mixed} should be, has rank 1's tensor",)
