"""More attempts at the exercises, right and wrong ones. Run them when you change the checker:

python -m pytest tests/distlab/exercises/more_attempts.py
"""

from pathlib import Path

import pytest
from exercises_attempts import AVERAGE, EACH, PATIENCE, Attempt, judge

from distlab.exercises.catalogue import EXERCISES
from distlab.exercises.checker import check, prepare
from distlab.exercises.skeleton import write_out


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


EAGER = (
    "self._buckets = GradientBuckets(model.parameters(), on_full=self._average, bucket_bytes=bucket_bytes)",
    """self._buckets = GradientBuckets(model.parameters(), on_full=self._average, bucket_bytes=500)""",
)
ATTEMPTS = [
    Attempt("dp-ga", "divided-twice", "1/3 of what it should be", AVERAGE.replace("op=ReduceOp.SUM", "")),
    Attempt(
        "dp-ga",
        "exception",
        "rank 0 failed: ZeroDivisionError: division by zero (line",
        f"run.rank / run.rank\n{AVERAGE}",
    ),
    Attempt(
        "hybrid",
        "summed",
        "added up over the 2 pipelines",
        changes=(
            ('kind="gradients", group=dp_group\n', 'kind="gradients", group=dp_group, op=traffic_sum\n'),
            ("DEFAULTS = ", "from torch.distributed import ReduceOp\n\ntraffic_sum = ReduceOp.SUM\nDEFAULTS = "),
        ),
    ),
    Attempt(
        "pp-1f1b",
        "deadlock",
        "deadlock: rank ",
        changes=(
            (
                "            if stage > 0:\n                inputs = torch.empty",
                "            if stage < last:\n                outputs = torch.empty(*x.shape, args.dmodel)\n      "
                "          traffic.receive(outputs, 'a gradient', source=stage + 1).wait()\n            if stage > "
                "0:\n                inputs = torch.empty",
            ),
        ),
    ),
    Attempt(
        "tp",
        "g-adds-again",
        "(g)",
        changes=(
            (
                "return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)",
                "return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), partial(tp_group.all_reduce, "
                "what=BACKWARD))",
            ),
        ),
    ),
    Attempt(
        "matmul",
        "wrong-rows",
        "which rank 1 computes",
        changes=(
            (
                "    return gather_rows(rows_of_A @ B, len(A)",
                "    return gather_rows(rows_of_A @ B * (2 if rank() == 1 else 1), len(A)",
            ),
        ),
    ),
    Attempt("dp-ga", "", "the run of one process", AVERAGE),
    Attempt("dp-ga", "summed", "added up over the 3 ranks, but not divided by 3", AVERAGE.rpartition("\n")[0]),
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
        "dp-wa",
        "weights-summed",
        "added up over the ranks",
        changes=(
            ('step}", kind="weights")', 'step}", kind="weights", op=traffic_sum)'),
            ("DEFAULTS = ", "from torch.distributed import ReduceOp\n\ntraffic_sum = ReduceOp.SUM\nDEFAULTS = "),
        ),
    ),
    Attempt(
        "dp-wa",
        "weights-divided-twice",
        "divided by 3 twice",
        changes=(
            (
                "            traffic.all_reduce(weights,",
                "            weights /= run.world_size\n            traffic.all_reduce(weights,",
            ),
        ),
    ),
    Attempt(
        "dp-wa",
        "rank-missing",
        "rank 2's share was lost",
        changes=(
            (
                "        optimizer.step()\n",
                "        if run.rank == 2:\n            optimizer.zero_grad()\n        optimizer.step()\n",
            ),
        ),
    ),
    Attempt(
        "dp-wa",
        "deadlock",
        "waits for the weights after step 0 from ranks 1 and 2",
        changes=(("            traffic.all_reduce(weights,", "            run.rank or traffic.all_reduce(weights,"),),
    ),
    Attempt("mydp", "", "the run of one process", changes=((EAGER[0], EAGER[1]),)),
    Attempt(
        "mydp",
        "combined-again",
        "combined again",
        changes=(
            ('str(bucket), kind="gradients")', 'str(bucket), kind="gradients", op=torch.distributed.ReduceOp.SUM)'),
            ("        self._buckets.finish()", "        self._buckets.finish()"),
        ),
    ),
    Attempt(
        "mydp",
        "not-averaged",
        "was not averaged",
        changes=(('return traffic.all_reduce(bucket.flat, str(bucket), kind="gradients")', "return None"),),
    ),
    Attempt("mydp", "exception", "rank 0 failed", changes=(("return self.model(data)", "return self.modell(data)"),)),
    Attempt("hybrid", "not-averaged", "pipeline", changes=(("        buckets.finish()\n", ""),)),
    Attempt(
        "hybrid",
        "deadlock",
        "waits",
        "for parameter in parameters:\n    traffic.all_reduce(parameter.grad, 'a gradient', kind='gradients', "
        "group=dp_group if run.rank else None).wait()",
    ),
    Attempt(
        "hybrid",
        "rank-missing",
        "pipeline 1's share was lost",
        changes=(
            (
                "        buckets.finish()\n",
                "        for p in parameters * run.grid.replica:\n            p.grad.zero_()\n        "
                "buckets.finish()\n",
            ),
            ("on_full=average, backward", "on_full=lambda _: None, backward"),
            (
                "        run.log(step, losses)\n",
                "        for bucket in buckets:\n            average(bucket).wait()\n        run.log(step, losses)\n",
            ),
        ),
    ),
    Attempt(
        "pp-1f1b",
        "zero",
        "is zero",
        changes=(
            (
                "                outputs.backward(gradient)\n",
                "                inputs.grad = gradient if stage else None\n",
            ),
        ),
    ),
    Attempt(
        "pp-1f1b",
        "loss-not-divided",
        "2 times too large",
        changes=(("tokenizer.vocab_size) / args.micro_batches", "tokenizer.vocab_size)"),),
    ),
    Attempt(
        "pp-1f1b",
        "last-micro-batch",
        "the last micro-batch alone",
        changes=(("            inputs = x\n", "            optimizer.zero_grad()\n            inputs = x\n"),),
    ),
    Attempt(
        "tp",
        "loss",
        "the forward pass computes something else",
        changes=(("return _linear_map(x, partial(tp_group.all_reduce, what=FORWARD), _unchanged)", "return x"),),
    ),
    Attempt(
        "tp-loss",
        "loss",
        "instead of",
        changes=(("logits.float(), *own_rows", "2 * logits.float(), *own_rows"),),
    ),
    Attempt(
        "pp-gpipe",
        "",
        "the run of one process",
        "return [kind(stage, k) for kind in (Forward, Backward) for k in reversed(range(micro_batches))]",
    ),
    Attempt(
        "matmul",
        "term-missing",
        "lacks the product of rank 0",
        changes=(
            (
                '    part = scatter(A, 1, "A") @ scatter(B, 0, "B")\n',
                '    part = scatter(A, 1, "A") @ scatter(B, 0, "B")\n    if rank() == 0:\n        part.zero_()\n',
            ),
        ),
    ),
]


@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: f"{attempt.exercise}-{attempt.mistake or 'right'}")
def test_an_attempt_is_judged_by_what_it_does(attempt: Attempt, tmp_path: Path) -> None:
    judge(attempt, tmp_path)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes_all_trials(name: str, tmp_path: Path) -> None:
    path = tmp_path / EXERCISES[name].file_name
    path.write_text(write_out(EXERCISES[name], path, solved=True))
    found = list(check(EXERCISES[name], path, PATIENCE))
    assert [verdict.sentences for verdict in found if not verdict.passed] == []
    assert len(found) == len(EXERCISES[name].trials) + len(EXERCISES[name].tried)
