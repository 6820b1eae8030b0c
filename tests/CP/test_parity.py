"""Context parallelism gives the training run of one process: losses, gradients, parameters, under plain SGD."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
from support.chapters import FEW_TOKENS, OneProcess, assert_same_run, records, train_on, validation_losses
from support.processes import LAB
from support.terminals import terminals

from distlab.exchange import read_saved
from distlab.reports.trace import Trace, read_chrome

PLAIN, RING = "CP/intro_CP.py", "CP/intro_CP_ring.py"
# No number of ranks divides 25.
MODEL = [*"--lr 0.2 --dmodel 48 --num-heads 12 --num-kv-heads 6 --n-layers 2 --seq-len 25".split(), *FEW_TOKENS]
ROUNDING = 2e-6  # relative: sums over ranks are added up in another order


EVEN, DOCUMENTS = "--seq-len 24", "--seq-len 99 --lr 0.6 --document-mask"  # in some rows a story ends


def names_of_messages(trace: Trace) -> dict[str, set[str]]:
    """By message between two ranks, the names that its sender and its receiver give it."""
    names = defaultdict[str, set[str]](set)
    for event in (event for rank in trace.ranks for event in rank.events if event.flow):
        names[event.flow].add(re.split(" (?:to|from) rank", event.name)[0])
    return names


@pytest.mark.parametrize(
    ("script", "ranks", "model", "flags"),
    [
        (PLAIN, 1, "--clip-norm 0.3 --lr 1.5", ""),
        (PLAIN, 3, EVEN, "--transport gloo"),
        (PLAIN, 2, EVEN, "--micro-batches 2"),
        (RING, 2, "", "--micro-batches 2 --trace"),
        (RING, 3, DOCUMENTS, "--transport gloo"),
        (RING, 4, "", "--cp-order contiguous --transport shared --trace"),
        (RING, 2, DOCUMENTS, "--recompute all --micro-batches 2"),
        (RING, 2, DOCUMENTS, "--cp-kind heads"),
    ],
)
def test_is_the_run_of_one_process(
    script: str, ranks: int, model: str, flags: str, one_process: OneProcess, tmp_path: Path
) -> None:
    all_flags = [*MODEL, *model.split(), "--world-size", str(ranks), "--batch-size", "2", *flags.split()]
    expected = one_process(2, *MODEL, *model.split())
    assert_same_run(train_on(ranks, script, tmp_path, *all_flags), expected, rtol=ROUNDING)
    for rank in range(ranks):
        if script == PLAIN and ranks > 1:
            sent = records(tmp_path)[-1]["sent_bytes"]
            assert {*sent} == {"keys and values", "gradients of keys and values", "gradients", "loss"}
        if "--trace" in flags:
            trace = read_chrome(tmp_path / "trace.json")
            steps = rank + 1 if "contiguous" in flags else ranks  # queries see no keys of later ranks
            assert [*trace.seconds_in_ring(rank)] == [*range(steps)]
            assert all(len(names) == 1 for names in names_of_messages(trace).values())


def test_a_mask_changes_the_losses(one_process: OneProcess) -> None:
    """Or the tests with documents would show nothing."""
    masked, usual = DOCUMENTS.split(), DOCUMENTS.split()[:-1]
    assert one_process(2, *MODEL, *usual)[2] != pytest.approx(one_process(2, *MODEL, *masked)[2], rel=1e-5)


def test_one_rank_is_one_process_bit_for_bit(one_process: OneProcess, tmp_path: Path) -> None:
    _, _, losses = train_on(1, RING, tmp_path, *MODEL, "--world-size", "1", "--batch-size", "2")
    assert losses == one_process(2, *MODEL)[2]


def test_mixed_precision(one_process: OneProcess, tmp_path: Path) -> None:
    """Merged in float32, the parts round like the whole."""
    model = [*MODEL, *"--lr 0.3 --n-layers 4".split()]
    in_float32, expected = one_process(4, *model)[2], one_process(4, *model, "--dtype", "bfloat16")[2]
    flags = "--world-size 3 --batch-size 4 --dtype bfloat16".split()
    *_, own_losses = train_on(3, RING, tmp_path, *model, *flags)
    assert own_losses == pytest.approx(expected, rel=1e-3)
    assert own_losses != in_float32, "computed in bfloat16"


def test_clipping_validation_and_another_number_of_ranks(one_process: OneProcess, tmp_path: Path) -> None:
    """A run of two ranks goes on with three, and then as one process: the losses are those of an unbroken run."""
    recipe = [
        *MODEL,
        *DOCUMENTS.split(),
        *"--clip-norm 0.3 --eval-every 2 --eval-sequences 3 --batch-size 2 --steps 4".split(),
    ]
    alone = train_on(1, RING, tmp_path / "alone", *recipe, *"--world-size 1 --steps 4".split())[2]
    first = train_on(2, RING, tmp_path / "run", *recipe, *"--world-size 2 --steps 2 --save-every 2".split())[2]
    more = ["--resume", str(tmp_path / "run"), "--steps"]
    second = train_on(3, RING, tmp_path / "second", *recipe, "--world-size", "3", *more, "3", "--save-every", "1")[2]
    more[1] = str(tmp_path / "second")
    third = train_on(1, "primer/intro.py", tmp_path / "third", *recipe, *more, "4", "--save-every", "1")[2]
    assert [*first, *second, *third] == pytest.approx(alone, rel=1e-6)

    whole, before, after = (validation_losses(tmp_path / run) for run in ("alone", "run", "third"))
    assert before + after == pytest.approx(whole, rel=1e-6)
    assert read_saved(tmp_path / "third").document_mask


KILLED_IN_THE_RING = """
    import os, signal
    from distlab.parallel import ring_attention
    merge = ring_attention.merge
    def end(*args):
        if run.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        merge(*args)
    ring_attention.merge = end
"""


def test_a_rank_that_is_killed_in_the_middle_of_a_ring_is_named(tmp_path: Path) -> None:
    """It has passed on a block, and computes with the one that has come."""
    text, start = (LAB / RING).read_text(), "    args, tokenizer = run.settings"
    assert text.count(start) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(start, f"{KILLED_IN_THE_RING}{start}"))
    flags = [*MODEL, *"--world-size 3 --batch-size 1 --steps 3 --data sample --device cpu".split()]
    with terminals(broken, 3, tmp_path, *flags) as ranks:
        for end in [ranks[rank].finish(30) for rank in (0, 2)]:
            assert end.status == 1
            assert "the keys and values of rank" in end.err
            assert end.err.splitlines()[-1].startswith("# rank 1 has exited"), end.err
