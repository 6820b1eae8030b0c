"""Some of the faults and pairs of `faults.py`; docs/comparing.md has the result of all of them."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from faults import KINDS, ONE, PP, RECIPES, STEPS, beside_one_process, compared, faults, pairs, trained, trained_pair
from safetensors.torch import load_file
from support.processes import LAB, run

from distlab.run.recording import MOST_BYTES, Recording, file_of
from distlab_compare.command import Request
from distlab_compare.saved import by_step
from simplellm.errors import InputError

SEED = 0
NAMES = [kind.__name__ for kind in KINDS]
LEFT_OUT = "scaled_all not_updated wrong_rate not_divided micro_batch_skipped".split()  # see tests/distlab_compare
TRIED = [name for name in NAMES if name not in LEFT_OUT]


@pytest.fixture(autouse=True)
def examples_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LAB / "examples"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("name", TRIED)
def test_a_fault_is_named_by_step_parameter_and_factor(name: str, folder: Path) -> None:
    *_, fault = faults(NAMES.index(name) + 1, SEED)
    (place := folder / name).mkdir()
    status, said = beside_one_process(fault, place, again=False)
    assert status == 1
    for told in fault.told:
        assert re.search(told, said), said


@pytest.mark.parametrize("index", range(2))
def test_two_layouts_of_a_model_are_equal(index: int, tmp_path: Path) -> None:
    pair = list(pairs(index + 1, SEED))[index]
    status, said = compared(Request(*trained_pair(pair, tmp_path)))
    assert (status, f"gradients and weights of steps 0 to {STEPS - 1}" in said) == (0, True), said


def test_the_command_runs_whatever_threads_torch_would_take() -> None:
    """`compare` computes between runs, whose ranks are forks: with several threads, the next run of one rank hung."""
    command = ["tests/faults.py", "--count", "2", "--seed", "1", "--kind", "faults"]
    ended = run(sys.executable, *command, OMP_NUM_THREADS="4")
    assert (ended.status, "# 2 of 2 faults named" in ended.out) == (0, True), ended.err


RECIPE = "--optimizer sgd --lr 0.5 --batch-size 12"
SGD = f"--world-size 1 {RECIPE}"


def test_one_process_runs_again_from_checkpoints_alone(tmp_path: Path) -> None:
    """With a fault in the gradients that Adam hides: only its moments show the factor."""
    flags = "--world-size 2 --batch-size 6 --optimizer adam --save-every 2"
    script = tmp_path / "faulty.py"
    shutil.copy(LAB / "examples/gpt.py", tmp_path)
    script.write_text((LAB / "examples/gpt_dp.py").read_text().replace("ReduceOp.AVG)", "ReduceOp.SUM)"))
    run = trained(2, str(script), [*flags.split(), "--lr", "1e-2"], tmp_path / "run", records=False)
    status, said = compared(Request(run, with_one_process=True))
    named = re.search(r"after 2 steps: the mean gradients of \S+ and \d+ other.* are 2 times what they should be", said)
    assert (status, named is not None) == (1, True), said
    again = compared(Request(run, tmp_path / "run"))
    assert (again[0], "equal: weights in the checkpoints of steps 2 to 4" in again[1]) == (0, True)


def test_checkpoints_of_two_layouts_are_equal(tmp_path: Path) -> None:
    """With Adam, which moves weights whose gradients are only rounding, such as the biases of keys, anywhere."""
    pair = [
        (way, f"{way.flags} {way.batch} --optimizer adam --lr 1e-2 --save-every 2 --micro-batches 1".split())
        for way in (PP[1], ONE)
    ]
    runs = [
        trained(way.ranks, way.script, flags, tmp_path / str(side), records=False)
        for side, (way, flags) in enumerate(pair)
    ]
    status, said = compared(Request(runs[0], runs[1]))
    assert (status, "equal: weights in the checkpoints of steps 2 to 4" in said) == (0, True), said
    checkpoint = by_step(runs[0])[2]
    for rank, name in enumerate(("tokens.weight", "head.weight")):  # of the first stage, and of the last
        assert checkpoint.writers(name, torch.ones_like(checkpoint[name], dtype=torch.bool)) == [rank]


def test_runs_that_cannot_be_compared_are_told_apart(folder: Path) -> None:
    one = trained(1, ONE.script, SGD.split(), folder / "one")

    def refused(*flags: str, records: bool = True) -> str:
        other = trained(1, ONE.script, [*SGD.split(), *flags], folder / "-".join(["other", *flags]), records)
        with pytest.raises(InputError) as caught:
            compared(Request(one, other))
        return str(caught.value)

    assert "are different trainings: --seed 0 and 1; different data" in refused("--seed", "1")
    assert "a global batch of 12 and 6" in refused("--batch-size", "6")
    assert "--dmodel 32 and 64" in refused("--dmodel", "64")
    assert "has neither gradients nor checkpoints to compare; run it with --record-gradients 3" in refused(
        records=False
    )
    llama = trained(1, "primer/intro.py", RECIPE.split(), folder / "llama")
    with pytest.raises(InputError, match=r"have different models: only .*/one has tokens\.weight"):
        compared(Request(one, llama))
    for request, sentence in (
        (Request(one), "compare needs a second run: give RUN_B or --with-one-process"),
        (Request(one, one, tolerance=1), "--tolerance 1: give a number between 0 and 1"),
        (Request(one, one, tolerance=0), "--tolerance 0: give a number between 0 and 1"),
        (Request(one, one, script=one), "is for --with-one-process; leave it out"),
        (Request(folder, one), f"{folder}: is not the folder of a run"),
        (Request(folder / "none", one), f"{folder / 'none'}: there is no such folder"),
        (Request(one, with_one_process=True, script=folder / "none.py"), "none.py: there is no such file"),
    ):
        with pytest.raises(InputError) as caught:
            compared(request)
        assert sentence in str(caught.value)


def test_too_many_steps_to_record(folder: Path) -> None:
    one = trained(1, ONE.script, SGD.split(), folder / "one")
    with pytest.raises(
        AssertionError, match=r"--record-gradients 1000000: rank 0 would write .* GB; give at most \d+"
    ) as refused:
        trained(1, ONE.script, [*SGD.split(), "--record-gradients", "1000000"], folder / "too-many")
    [most] = re.findall(r"give at most (\d+)", str(refused.value))
    assert int(most) == pytest.approx(MOST_BYTES / file_of(one, 0, 0).stat().st_size, rel=0.05)


def test_the_shares_of_micro_batches_count_among_the_bytes_to_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = torch.nn.Linear(10, 10, bias=False)
    held, optimizer = dict(net.named_parameters()), torch.optim.SGD(net.parameters())
    monkeypatch.setattr("distlab.run.recording.MOST_BYTES", 10 * net.weight.nbytes - 1)
    for shares, most in ((0, 4), (1, 4), (3, 1)):  # weights, gradients, and of several micro-batches the shares
        Recording(tmp_path, 0, range(5, 5 + most), held, held, optimizer, shares)
        with pytest.raises(InputError, match=f"give at most {most}$"):
            Recording(tmp_path, 0, range(5, 6 + most), held, held, optimizer, shares)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_records_of_a_step_are_of_its_gradients_and_shares(steps: int, tmp_path: Path) -> None:
    """Of two steps, from step 5 on, of a run that takes more or fewer; a parameter that is not used has zeros."""
    held = {name: torch.nn.Parameter(torch.ones(1)) for name in ("used", "unused")}
    optimizer = torch.optim.SGD(held.values(), lr=1.0)
    recording = Recording(tmp_path, 0, range(5, 7), held, held, optimizer, shares=2)
    for step in range(5, 5 + steps):
        recording.begin(step)
        optimizer.zero_grad()
        for factor in (1, 3):
            (factor * held["used"]).backward()
        optimizer.step()
    recording.end()
    files = [file_of(tmp_path, step, 0) for step in range(5, 9)]
    found = [{name: tensor.item() for name, tensor in load_file(file).items()} for file in files if file.exists()]
    gradients = {"gradient.used": 4, "gradient.unused": 0, "share.0.used": 1, "share.1.used": 3}
    first, second, after = ({"weights.used": 1 - 4 * number, "weights.unused": 1} for number in range(3))
    assert found == [gradients | first, gradients | second, after][: 1 if steps == 1 else 3]


def test_the_last_recorded_step_is_recorded_again_where_the_next_one_finds_that_it_has_to_be_undone(
    tmp_path: Path,
) -> None:
    """As with `--run-on` and `--clip-norm`, where gradients are clipped only then."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    recording = Recording(tmp_path, 0, range(5, 6), {"weight": weight}, {"weight": weight}, optimizer)
    for step, gradient in ((5, 4.0), (6, 4.0), (5, 2.0), (6, 2.0), (7, 2.0)):
        recording.begin(step)
        weight.data.fill_({5: 1.0, 6: 1.0 - gradient, 7: -3.0}[step])
        weight.grad = torch.full((1,), gradient)
        optimizer.step()
    kept = [load_file(file_of(tmp_path, step, 0)) for step in (5, 6)]
    found = [{name: tensor.item() for name, tensor in tensors.items()} for tensors in kept]
    assert found == [{"gradient.weight": 2, "weights.weight": 1}, {"weights.weight": -1}]


def test_a_parameter_that_only_one_of_two_runs_trains_is_named(folder: Path) -> None:
    flags = f"{ONE.flags} {ONE.batch} {RECIPES[1]}".split()
    script = folder / "frozen.py"
    before = "    optimizer = run.optimizer(net)\n"
    text = (LAB / ONE.script).read_text()
    assert before in text
    script.write_text(text.replace(before, f"    net.norm.weight.requires_grad_(False)\n{before}"))
    run, right = (trained(1, name, flags, folder / Path(name).stem) for name in (str(script), ONE.script))
    status, said = compared(Request(run, right))
    assert (status, "after step 0: the weights norm.weight on rank 0 are those before the update" in said) == (1, True)
