"""More attempts at the exercises, right and wrong ones. Run them when you change the checker:

python -m pytest tests/distlab_exercises/more_attempts.py
"""

from pathlib import Path

import pytest
from support.exercises_attempts import AVERAGE, EACH, PATIENCE, Attempt, judge

from distlab_exercises.catalogue import EXERCISES
from distlab_exercises.checker import check, prepare
from distlab_exercises.skeleton import write_out


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


EAGER = (
    "self._buckets = GradientBuckets(model.parameters(), on_full=self._average, bucket_bytes=bucket_bytes)",
    """self._buckets = GradientBuckets(model.parameters(), on_full=self._average, bucket_bytes=500)""",
)
GUARD = 'if __name__ == "__main__":\n'
ATTEMPTS = [
    Attempt("dp-ga", "not-averaged", "is that of this rank's own sequences: it was not averaged", "pass"),
    Attempt(
        "dp-ga",
        "not-averaged",
        "model.embed_tokens.weight on all ranks is that of",
        AVERAGE.replace(EACH, "for parameter in list(net.parameters())[1:]:"),
    ),
    Attempt(
        "dp-ga",
        "died",
        "rank 0 was in line 59: traffic.all_reduce(",
        "if run.rank == 0:\n    " + AVERAGE.replace("\n", "\n    "),
    ),
    Attempt(
        "dp-ga",
        "changed-early",
        "before optimizer.step(), which alone should change them",
        AVERAGE.replace("(parameter.grad,", "(parameter.data,").replace("parameter.grad /=", "parameter.data *= 2 /"),
    ),
    Attempt("dp-ga", "exception", "calls main(...) as it is loaded", AVERAGE, ((f"{GUARD}    main(", "main("),)),
    Attempt("dp-ga", "not-cleared", "step 1: ", AVERAGE, (("        optimizer.zero_grad()\n", ""),)),
    Attempt("mydp", "", "the run of one process", changes=((EAGER[0], EAGER[1]),)),
    Attempt(
        "pp-1f1b",
        "loss-not-divided",
        "2 times too large",
        changes=(("tokenizer.vocab_size) / args.micro_batches", "tokenizer.vocab_size)"),),
    ),
    Attempt(
        "tp-loss",
        "loss",
        "instead of",
        changes=(("logits.float(), *own_rows", "2 * logits.float(), *own_rows"),),
    ),
    Attempt(
        "mlp",
        "zero",
        "the gradients are zero",
        changes=(
            (
                "        optimizer.zero_grad()\n        loss.backward()\n",
                "        loss.backward()\n        optimizer.zero_grad(set_to_none=False)\n",
            ),
        ),
        only="train",
    ),
    Attempt(
        "mlp",
        "bias",
        "it has biases",
        changes=(
            ("nn.Linear(a, b, bias=False)", "nn.Linear(a, b)"),
            ("in self.parameters()", "in (p for p in self.parameters() if p.dim() > 1)"),
        ),
        only="MLP",
    ),
    Attempt(
        "checkpoint",
        "missing",
        "no rank writes optimizer.embed.weight.step",
        changes=(('            tensors[f"{prefix}{name}.{key}"] = as_held(value, parameter)', "            pass"),),
        only="state_of",
    ),
    Attempt(
        "dp-ga",
        "exception",
        "rank 0 failed: ZeroDivisionError: division by zero (line",
        f"run.rank / run.rank\n{AVERAGE}",
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
    Attempt(
        "dp-wa",
        "deadlock",
        "waits for the weights after step 0 from ranks 1 and 2",
        changes=(("            traffic.all_reduce(weights,", "            run.rank or traffic.all_reduce(weights,"),),
    ),
    Attempt("mydp", "exception", "rank 0 failed", changes=(("return self.model(data)", "return self.modell(data)"),)),
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
