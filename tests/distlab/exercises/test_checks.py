"""Every exercise: its skeleton fails because a part is missing, the solution passes, mistakes are called by name."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from exercises_attempts import AVERAGE, PATIENCE, Attempt, judge

from distlab.exercises.catalogue import EXERCISES, Exercise
from distlab.exercises.checker import check, prepare
from distlab.exercises.skeleton import write_out


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


def smallest(exercise: Exercise) -> Exercise:
    """An exercise with its smallest trial of training; without, if other tests train with the library's function.

    And with one of several cases.
    """
    by_ranks = sorted(exercise.trials, key=lambda trial: math.prod(trial.layout.values()))
    trials = () if exercise.functions == "schedule" else tuple(by_ranks[:1])
    return replace(exercise, trials=trials, cases=exercise.cases[:1])


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails_for_what_is_missing_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    exercise, path = smallest(EXERCISES[name]), tmp_path / EXERCISES[name].file_name
    path.write_text(write_out(exercise, path))
    *_, last = check(exercise, path, PATIENCE)
    assert last.mistake == exercise.unsolved
    assert exercise.unsolved == "deadlock" or last.sentences[0].startswith("not written yet: ")
    path.write_text(write_out(exercise, path, solved=True))
    right = list(check(exercise, path, PATIENCE))
    assert [verdict.sentences for verdict in right if not verdict.passed] == []
    assert len(right) == len(exercise.trials) + len(exercise.tried)


ATTEMPTS = [
    Attempt(
        "mpi",
        "wrong-result",
        "mp_size 2, dp_size 2: rank 0 returned other numbers than its own slice of the sum over the ranks",
        changes=(("    mp_comm.Reduce_scatter(terms, mine, op=MPI.SUM)\n", "    mine[...] = terms[0]\n"),),
    ),
    Attempt(
        "dp-ga",
        "last-micro-batch",
        "the last micro-batch alone",
        AVERAGE,
        (("            loss.backward()\n", "            optimizer.zero_grad()\n            loss.backward()\n"),),
    ),
    Attempt(
        "dp-ga",
        "deadlock",
        "rank 0 waits, in line 5",
        f"if run.rank == 0:\n    __import__('torch').distributed.barrier()\n{AVERAGE}",
    ),
    Attempt(
        "dp-wa",
        "not-averaged",
        "the average went elsewhere",
        changes=(("all_reduce(weights,", "all_reduce(weights.clone(),"),),
    ),
    Attempt(
        "mydp",
        "not-broadcast",
        "all ranks must start from rank 0's",
        changes=(("        broadcast_weights(model)\n", ""),),
    ),
    Attempt(
        "pp-zb",
        "keeps-too-much",
        "keeps the activations of",
        "return [kind(stage, k) for kinds in ((Forward,), (BackwardInput, BackwardWeight)) for k in "
        "range(micro_batches) for kind in kinds]",
    ),
    Attempt(
        "tp",
        "f-missing",
        "(f)",
        changes=(
            (
                "return _linear_map(x, _unchanged, partial(tp_group.all_reduce, what=BACKWARD))",
                "return _linear_map(x, _unchanged, _unchanged)",
            ),
        ),
    ),
    Attempt(
        "broadcast",
        "wrong-tensor",
        "has rank",
        changes=(
            (
                "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data, "
                "rank_at(relative_rank - distance))",
                "elif distance <= relative_rank < 2 * distance:\n                endpoint.recv(data.clone(), "
                "rank_at(relative_rank - distance))",
            ),
        ),
    ),
    Attempt(
        "reduce",
        "changed",
        "no longer has its own tensor",
        changes=(
            ("torch.empty_like(data) if partial is data and relative_rank > 0 else partial", "partial"),
            (
                "in_place(tensor, is_changed=relative_rank == 0) as data:\n        partial = data",
                "in_place(tensor) as data:\n        partial = data",
            ),
        ),
    ),
    Attempt(
        "gather",
        "wrong-row",
        "where rank",
        changes=(
            (
                "            whole[dst:], whole[:dst] = parts[: size - dst], parts[size - dst :]",
                "            whole[:] = parts",
            ),
        ),
    ),
    Attempt(
        "ring", "wrong-sum", "rank", changes=(("tensor[(rank - turn - 2) % size]", "tensor[(rank - turn - 1) % size]"),)
    ),
    Attempt(
        "pp-gpipe",
        "not-gpipe",
        "stage 0 runs B0 before F1",
        "return [kind(stage, k) for k in range(micro_batches) for kind in (Forward, Backward)]",
    ),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "runs B0 before F0",
        "return [kind(stage, k) for kind in (Backward, Forward) for k in range(micro_batches)]",
    ),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "never computes",
        "return [kind(stage, k) for kind in (Forward, Backward) for k in range(micro_batches - stage)]",
    ),
    Attempt("pp-gpipe", "no-list", "must return a list of actions", "return None"),
    Attempt(
        "pp-gpipe",
        "wrong-order",
        "is run by workers 0 and 1",
        "return [kind(0, k) for kind in (Forward, Backward) for k in range(micro_batches)]",
    ),
    Attempt(
        "pp-dapple",
        "keeps-too-much",
        "keeps the activations of 3 micro-batches at a time, and needs to keep 1",
        "return gpipe(stage, stages, micro_batches)",
    ),
    Attempt(
        "pp-dapple", "wrong-order", "runs B0 before F0", changes=(("min(stages - stage,", "min(stages - stage - 1,"),)
    ),
    Attempt(
        "pp-dapple", "keeps-too-much", "needs to keep 1 at most", changes=(("min(stages - stage,", "min(stages,"),)
    ),
    Attempt("pp-dapple", "slow", "is idle for too long", changes=(("min(stages - stage, micro_batches)", "1"),)),
    Attempt("pp-dapple", "wrong-order", "never computes", changes=((" + backwards[micro_batches - ahead :]", ""),)),
    Attempt("all-reduce", "deadlock", "rank 0 waits to send to rank 1", changes=(("if rank < partner:", "if True:"),)),
    Attempt(
        "all-reduce",
        "wrong-sum",
        "has rank 0's tensor, and should have the sum of all",
        changes=(("reduce_tree(tensor, 0, op, endpoint)", "pass"),),
    ),
    Attempt(
        "all-reduce",
        "slow",
        "times as long",
        changes=(("    broadcast_tree(tensor, 0, endpoint)", "    broadcast_naive(tensor, 0, endpoint)"),),
    ),
    Attempt(
        "deadlock",
        "left-out",
        "a cure must not leave out",
        changes=(("for lower in range(run.world_size - 1):", "for lower in range(0):"),),
    ),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: f"{attempt.exercise}-{attempt.mistake or 'right'}")
def test_an_attempt_is_judged_by_what_it_does(attempt: Attempt, tmp_path: Path) -> None:
    """More attempts are in more_attempts.py, which takes too long for each run of the tests."""
    judge(attempt, tmp_path)
