"""Every exercise: its skeleton fails because a part is missing, the solution passes, mistakes are called by name."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.exercises.catalogue import EXERCISES
from distlab.exercises.checker import check, prepare
from distlab.exercises.ranks import Patience
from distlab.exercises.skeleton import write_out
from distlab.exercises.verdict import Verdict

PATIENCE = Patience(still=2, longest=20)


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


@dataclass
class Attempt:
    """A student's file, as a change of the skeleton or of the solution, and what the checker has to say about it."""

    exercise: str
    mistake: str  # its name; "" if it is right
    says: str  # a part of what is said about it
    body: str = ""  # what the student has written at the place of the last part that is missing
    changes: tuple[tuple[str, str], ...] = ()  # texts that are replaced; in the solution, if there is no `body`

    def text(self, path: Path) -> str:
        text = write_out(EXERCISES[self.exercise], path, solved=not self.body)
        if self.body:
            places = list(re.finditer(r"^( *)raise NotImplementedError.*\n", text, re.MULTILINE))
            lines = "".join(f"{places[-1][1]}{line}\n" for line in self.body.split("\n"))
            text = text[: places[-1].start()] + lines + text[places[-1].end() :]
        for old, new in self.changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        return text


def verdicts(attempt: Attempt, folder: Path) -> list[Verdict]:
    path = folder / EXERCISES[attempt.exercise].file_name
    path.write_text(attempt.text(path))
    return list(check(EXERCISES[attempt.exercise], path, PATIENCE))


@pytest.mark.parametrize("name", EXERCISES)
def test_the_skeleton_fails_for_what_is_missing_and_the_solution_passes(name: str, tmp_path: Path) -> None:
    exercise, path = EXERCISES[name], tmp_path / EXERCISES[name].file_name
    path.write_text(write_out(exercise, path))
    *_, last = check(exercise, path, PATIENCE)
    assert last.mistake == "not-written"
    assert last.sentences[0].startswith("not written yet: ")
    right = verdicts(Attempt(name, "", ""), tmp_path)
    assert [verdict.sentences for verdict in right if not verdict.passed] == []
    assert len(right) == len(exercise.trials) + len(exercise.takes) * bool(exercise.functions)


AVERAGE = """for parameter in net.parameters():
    traffic.all_reduce(parameter.grad, "a gradient", kind="gradients", op=ReduceOp.SUM).wait()
    parameter.grad /= run.world_size"""
EACH = "for parameter in net.parameters():"
ATTEMPTS = [
    Attempt("dp-ga", "", "the run of one process", AVERAGE),
    Attempt("dp-ga", "summed", "added up over the 3 ranks, but not divided by 3", AVERAGE.rpartition("\n")[0]),
    Attempt("dp-ga", "divided-twice", "1/3 of what it should be", AVERAGE.replace("op=ReduceOp.SUM", "")),
    Attempt("dp-ga", "not-averaged", "is that of this rank's own sequences: it was not averaged", "pass"),
    Attempt(
        "dp-ga",
        "not-averaged",
        "model.embed_tokens.weight on all ranks is that of",
        AVERAGE.replace(EACH, "for parameter in list(net.parameters())[1:]:"),
    ),
    Attempt(
        "dp-ga",
        "rank-missing",
        "rank 1's share was lost",
        f"if run.rank == 1:\n    net.zero_grad(set_to_none=False)\n{AVERAGE}",
    ),
    Attempt("dp-ga", "not-cleared", "step 1: ", AVERAGE, (("        optimizer.zero_grad()\n", ""),)),
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
        "dp-ga",
        "exception",
        "rank 0 failed: ZeroDivisionError: division by zero (line",
        f"run.rank / run.rank\n{AVERAGE}",
    ),
    Attempt(
        "pp-gpipe",
        "",
        "the run of one process",
        "return [kind(stage, k) for kind in (Forward, Backward) for k in reversed(range(micro_batches))]",
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
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: f"{attempt.exercise}-{attempt.mistake or 'right'}")
def test_an_attempt_is_judged_by_what_it_does(attempt: Attempt, tmp_path: Path) -> None:
    found = verdicts(attempt, tmp_path)
    wrong = [verdict for verdict in found if not verdict.passed]
    assert [verdict.mistake for verdict in wrong] == [attempt.mistake] * bool(attempt.mistake), [
        v.sentences for v in wrong
    ]
    assert any(attempt.says in sentence for verdict in wrong or found for sentence in verdict.sentences), wrong or found
