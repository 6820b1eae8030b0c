"""The sentiment classifier: each split layer against its one-process twin, the groups, the reviews, the whole run."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import LAB, free_port, process_group, run, run_ranks
from torch import Tensor, nn

from distlab.optimizers import build_optimizer
from distlab.runtime import Run
from distlab.settings import parse
from simplellm.errors import InputError
from simplellm.tokenizers import SPTokenizer

HIDDEN, HEADS, VOCABULARY = 24, 12, 17  # 24 and 12 divide by 1, 2, 3 and 4
ROUNDS = 3
SAMPLE = "--samples 64 --layers 2 --dim 16 --heads 4 --epochs 2 --bsz 16 --device cpu".split()


def load(name: str) -> Any:
    """A module of TP/sentiment. Only forked ranks call this: its modules' names are short, and others have them too."""
    sys.path.insert(0, str(LAB / "TP" / "sentiment"))
    return importlib.import_module(name)


def in_a_fork(work: Callable[..., Any], *args: Any) -> Any:
    return run_ranks(1, lambda _: work(*args))[0]


def on_ranks(world_size: int, tp: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `work(*args)` on each rank, seeded differently, after `pcomm.init(tp)`."""
    port = free_port()

    def rank_work(rank: int) -> Any:
        with process_group(rank, world_size, port):
            load("pcomm").init(tp)
            return work(*args)

    return run_ranks(world_size, rank_work)


# --------------------------------------------------------------------------------------------- layers and their twins

X = (2, 5, HIDDEN)
LAYERS: dict[str, tuple[Callable[..., nn.Module], dict[str, int]]] = {  # in one process, and how the weights are split
    "ColWiseLinear": (lambda model: nn.Linear(HIDDEN, 36, bias=False), {"weight": 0}),
    "Embedding": (lambda model: nn.Embedding(VOCABULARY, HIDDEN), {"weight": 1}),
    "MultiHeadSelfAttention": (
        lambda model: model.MultiHeadSelfAttention(HIDDEN, HEADS, 0.3),
        {"q.weight": 0, "k.weight": 0, "v.weight": 0, "output.weight": 1},
    ),
    "ColRowLinearPair": (
        lambda model: model.LinearPair(HIDDEN, 48, 7, nn.GELU()),
        {"first_linear.weight": 0, "second_linear.weight": 1},
    ),
    "FeedForwardBlock": (
        lambda model: model.FeedForwardBlock(HIDDEN, 48, 7),
        {"first_linear.weight": 0, "second_linear.weight": 1},
    ),
    "Block": (lambda model: model.Block(HIDDEN, HEADS, 0.3), {}),
    "Classifier": (lambda model: model.Classifier(HIDDEN, 2), {}),
    "Transformer": (lambda model: model.Transformer(VOCABULARY, HIDDEN, 2, HEADS, dropout_prob=0.3), {}),
}
SPLIT_LAYERS: dict[str, Callable[[Any], nn.Module]] = {
    "ColWiseLinear": lambda tp: tp.ColWiseLinear(HIDDEN, 36),
    "Embedding": lambda tp: tp.Embedding(VOCABULARY, HIDDEN),
    "MultiHeadSelfAttention": lambda tp: tp.MultiHeadSelfAttention(HIDDEN, HEADS, 0.3),
    "ColRowLinearPair": lambda tp: tp.ColRowLinearPair(HIDDEN, 48, 7, [nn.GELU()]),
    "FeedForwardBlock": lambda tp: tp.FeedForwardBlock(HIDDEN, 48, 7),
    "Block": lambda tp: tp.Block(HIDDEN, HEADS, 0.3),
    "Classifier": lambda tp: tp.Classifier(HIDDEN, 2),
    "Transformer": lambda tp: tp.Transformer(VOCABULARY, HIDDEN, 2, HEADS, dropout_prob=0.3),
}
SLICED_BY_ROWS = re.compile(r"(\.|^)(q|k|v|first_linear)\.weight")
SLICED_BY_COLUMNS = re.compile(r"(\.|^)(output|second_linear)\.weight|embedding\.weight")


def split_dim(layer: str, name: str) -> int | None:
    """Along which dimension one of the twin's weights is split; None for a norm's gain, which every rank has."""
    if name in LAYERS[layer][1]:
        return LAYERS[layer][1][name]
    return 0 if SLICED_BY_ROWS.search(name) else 1 if SLICED_BY_COLUMNS.search(name) else None


def inputs(layer: str) -> list[Tensor]:
    tokens = torch.randint(VOCABULARY, (2, 5))
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    if layer == "Embedding":
        return [tokens]
    if layer == "Transformer":
        return [tokens, padding]
    x = torch.randn(X, requires_grad=True)
    mask = torch.zeros(2, 1, 1, 5).masked_fill(padding[:, None, None], float("-inf"))
    return [x, mask] if layer in ("MultiHeadSelfAttention", "Block") else [x]


def compare_with_twin(layer: str) -> None:
    """Three rounds of forward, backward and SGD step of both; everything must agree."""
    pcomm, tp_model, model = load("pcomm"), load("tp_model"), load("model")
    degree, place = pcomm.tp_degree, pcomm.tp_rank

    def part(name: str, whole: Tensor) -> Tensor:
        dim = split_dim(layer, name)
        return whole if dim is None else whole.chunk(degree, dim)[place]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    split = SPLIT_LAYERS[layer](tp_model)
    assert torch.equal(torch.get_rng_state(), before), "building a layer moves the generator"
    twin = LAYERS[layer][0](model)
    own = {re.sub(r"\b(mod|linear)\.", "", name): p for name, p in split.named_parameters()}
    assert own.keys() == dict(twin.named_parameters()).keys()
    start = {name: p.detach().clone() for name, p in twin.named_parameters()}
    for name, p in twin.named_parameters():
        assert torch.equal(own[name], part(name, p)), f"{name} is no slice of the one process's"
        assert own[name].numel() * (degree if split_dim(layer, name) is not None else 1) == p.numel()

    optimizers = [build_optimizer("sgd", m.parameters(), 0.1) for m in (split, twin)]
    for round_number in range(ROUNDS):
        torch.manual_seed(100 + round_number)
        args = inputs(layer)
        copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        outputs = []
        for m, xs, optimizer in zip((split, twin), (args, copies), optimizers, strict=True):
            torch.manual_seed(200 + round_number)  # dropout
            optimizer.zero_grad()
            y = m(*xs)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(round_number))
            (y * weights).sum().backward()
            outputs.append(y.detach().clone())
        close = {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(*outputs, **close)
        assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True)), "an input was changed"
        if args[0].requires_grad:
            torch.testing.assert_close(args[0].grad, copies[0].grad, **close)
        for name, p in twin.named_parameters():
            assert p.grad is not None
            torch.testing.assert_close(own[name].grad, part(name, p.grad), **close)
        for optimizer in optimizers:
            optimizer.step()
        for name, p in twin.named_parameters():
            torch.testing.assert_close(own[name], part(name, p.detach()), **close, check_stride=False)
    for name, p in twin.named_parameters():
        assert not torch.equal(p, start[name]), f"{name} was not trained"


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_split_layers_do_what_their_twins_do(tp: int) -> None:
    def all_layers() -> None:
        for layer in LAYERS:
            try:
                compare_with_twin(layer)
            except AssertionError as error:
                raise AssertionError(f"{layer}: {error}") from error

    on_ranks(tp, tp, all_layers)


def test_functions_leave_their_inputs_alone_and_are_each_others_transpose() -> None:
    def work() -> None:
        pcomm = load("pcomm")
        own = torch.arange(6.0).view(2, 3) + 10 * pcomm.tp_rank
        others = torch.arange(6.0).view(2, 3) + 10 * (1 - pcomm.tp_rank)
        side_by_side = torch.cat([own, others] if pcomm.tp_rank == 0 else [others, own], dim=-1)
        expected = {"Duplication": own, "AllReduce": own + others, "AllGather": side_by_side}
        for name, y_expected in expected.items():
            x = own.clone().requires_grad_()
            y = getattr(pcomm, name).apply(x)
            grad = torch.arange(float(y.numel())).view_as(y) * (1 + pcomm.tp_rank)
            grad_before = grad.clone()
            (x_grad,) = torch.autograd.grad(y, x, grad)
            assert torch.equal(y, y_expected), name
            assert torch.equal(x, own), f"{name} changed its input"
            assert torch.equal(grad, grad_before), f"{name} changed the gradient that it was given"
            transposed = {"Duplication": 3 * grad_before / (1 + pcomm.tp_rank), "AllReduce": grad_before}
            wanted = transposed.get(name, grad_before[:, 3 * pcomm.tp_rank :][:, :3])
            assert torch.equal(x_grad, wanted), name

    on_ranks(2, 2, work)


# ------------------------------------------------------------------------------------------------ groups and refusals


@pytest.mark.parametrize(("world_size", "tp"), [(4, 2), (6, 3), (2, 1)])
def test_groups(world_size: int, tp: int) -> None:
    def work() -> tuple[Any, ...]:
        pcomm = load("pcomm")
        members = torch.distributed.get_process_group_ranks
        numbers = pcomm.tp_rank, pcomm.tp_degree, pcomm.dp_rank, pcomm.dp_degree
        return members(pcomm.tp_grp), members(pcomm.dp_grp), numbers

    for rank, (tp_ranks, dp_ranks, numbers) in enumerate(on_ranks(world_size, tp, work)):
        assert tp_ranks == [r for r in range(world_size) if r // tp == rank // tp]
        assert dp_ranks == [r for r in range(world_size) if r % tp == rank % tp]
        assert numbers == (rank % tp, tp, rank // tp, world_size // tp)


def test_a_world_that_does_not_divide_is_refused_on_every_rank() -> None:
    def work() -> str:
        with pytest.raises(InputError) as refusal:
            load("pcomm").init(2)
        return str(refusal.value)

    for sentence in on_ranks(3, 1, work):
        assert re.search(r"--tp 2: the 3 ranks do not divide", sentence)


def test_layers_that_do_not_divide_are_refused() -> None:
    def work() -> None:
        tp_model = load("tp_model")
        for build, numbers in [
            (lambda: tp_model.MultiHeadSelfAttention(24, 2, 0.0), "heads of 2 .* 4 ranks"),
            (lambda: tp_model.ColWiseLinear(8, 2), "output width of 2 .* 4 ranks"),
            (lambda: tp_model.Embedding(8, 6), "width of 6 .* 4 ranks"),
            (lambda: tp_model.ColRowLinearPair(8, 6, 8, []), "inner width .* of 6 .* 4 ranks"),
        ]:
            with pytest.raises(InputError, match=numbers):
                build()
        with pytest.raises(ValueError, match=r"24 .* 5 attention heads"):
            load("model").MultiHeadSelfAttention(24, 5, 0.0)

    on_ranks(4, 4, work)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--world-size 4 --tp 3", "--world-size 4 with --tp 3"),
        ("--world-size 4 --tp 4 --heads 2", "--heads 2 with --tp 4"),
        ("--dim 66", "--dim 66 with --heads 4"),
        ("--world-size 4 --tp 1 --bsz 3", "--bsz 3"),
        ("--tp 0", "--tp 0"),
        ("--dropout 1", "--dropout 1"),
        ("--data nowhere", "--data nowhere"),
    ],
)
def test_wrong_flags_are_refused_with_a_sentence(flags: str, sentence: str) -> None:
    def work() -> str:
        with pytest.raises(InputError) as refusal:
            parse(load("tp_tensor_parallel").DEFAULTS, "", flags.split())
        return str(refusal.value)

    assert sentence in in_a_fork(work)


# --------------------------------------------------------------------------------------------------------- the reviews


def test_reviews_are_pure_balanced_and_not_repeated_in_validation() -> None:
    def work() -> None:
        review = load("reviews").review
        train = [review(index) for index in range(600)]
        assert train == [review(index) for index in range(600)]
        validation = [review(index, split="validation") for index in range(200)]
        assert sum(label for _, label in train) == 300
        assert not {text for text, _ in train} & {text for text, _ in validation}
        assert len({text for text, _ in train}) == 600
        assert review(3, seed=1) != review(3, seed=0)
        assert any(re.search("was (not|never)", text) for text, _ in train)

    in_a_fork(work)


def test_batches_pad_and_mask() -> None:
    def work() -> None:
        tokenizer = SPTokenizer()
        reviews = load("dataset").Reviews("sample", "train", 20, tokenizer, seq_len=60)
        batch = reviews.batch(torch.tensor([3, 11, 8]))
        lengths = (~batch.is_padding).sum(1).tolist()
        assert max(lengths) == batch.tokens.shape[1] <= 60
        assert min(lengths) < max(lengths)
        assert (batch.tokens[:, 0] == tokenizer.bos_id).all()
        text, label = load("reviews").review(11)
        assert tokenizer.decode(batch.tokens[1][: lengths[1]]) == tokenizer.decode(tokenizer.encode(text)[:59])
        assert (batch.tokens[batch.is_padding] == tokenizer.pad_id).all()
        assert batch.labels[1] == label

        model = load("model").Transformer(tokenizer.vocab_size, 16, 2, 4)
        shortest = lengths.index(min(lengths))
        alone = batch.tokens[shortest, : min(lengths)][None]
        logits = model(alone, torch.zeros_like(alone, dtype=torch.bool))
        assert torch.allclose(model(batch.tokens, batch.is_padding)[shortest], logits[0], atol=1e-5)

    in_a_fork(work)


@pytest.mark.parametrize(("samples", "batch_size", "replicas"), [(20, 6, 4), (7, 5, 3), (2, 2, 3)])
def test_replicas_share_the_rows(samples: int, batch_size: int, replicas: int) -> None:
    def work() -> None:
        reviews = load("dataset").Reviews("sample", "train", samples, SPTokenizer())
        numbers = {tuple(ids.tolist()): number for number, ids in enumerate(reviews.ids)}

        def rows(batch: Any) -> list[int]:
            texts = zip(batch.tokens, batch.is_padding, strict=True)
            return [numbers[tuple(tokens[~padding].tolist())] for tokens, padding in texts]

        batches = list(reviews.training_batches(batch_size, epoch=0))
        assert len(batches) == samples // batch_size
        for batch in batches:
            parts = [rows(batch.rows_of(replica, replicas)) for replica in range(replicas)]
            assert [row for part in parts for row in part] == rows(batch)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        orders = [[rows(b) for b in reviews.training_batches(batch_size, epoch)] for epoch in (0, 0, 1)]
        assert orders[0] == orders[1]
        assert orders[0] != orders[2] or samples == 2
        seen = [
            number
            for replica in range(replicas)
            for batch in reviews.evaluation_batches(batch_size, replica, replicas)
            for number in rows(batch)
        ]
        assert seen == list(range(samples)), "each once"

    in_a_fork(work)


def test_reads_a_data_set_like_the_hubs(tmp_path: Path) -> None:
    folder = tmp_path / "imdb"
    folder.mkdir()
    for split, count in (("train", 30), ("test", 12)):
        rows = [json.dumps({"text": f"{split} {i}", "label": int(i >= count / 2)}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))

    def work() -> None:
        import datasets

        datasets.config.HF_DATASETS_CACHE = tmp_path / "cache"
        read_hub = load("dataset").read_hub
        rows = read_hub(str(folder), "train", 20, seed=0)
        assert len(rows) == 20
        assert rows == read_hub(str(folder), "train", 20, seed=0)
        assert rows != read_hub(str(folder), "train", 20, seed=1)
        assert 0 < sum(label for _, label in rows[:8]) < 8, "mixed, not sorted by label"
        assert all(label == (int(text.split()[1]) >= 15) for text, label in rows)
        assert len(read_hub(str(folder), "validation", 100, seed=0)) == 12
        with pytest.raises(InputError, match="cannot be read"):
            read_hub(str(tmp_path / "nowhere"), "train", 1, seed=0)

    in_a_fork(work)


# ------------------------------------------------------------------------------------------------------- the whole run


def train(out: Path, world_size: int, tp: int, *flags: str) -> tuple[list[float], list[dict[str, Tensor]]]:
    """The script's own `train` on several ranks: the losses, and each rank's gradients of the last step."""
    port = str(free_port())

    def rank_work(rank: int) -> dict[str, Tensor]:
        script = load("tp_tensor_parallel")
        built: list[nn.Module] = []
        build = script.Transformer

        def build_and_keep(*args: Any, **options: Any) -> nn.Module:
            built.append(build(*args, **options))
            return built[-1]

        script.Transformer = build_and_keep
        layout = ["--world-size", str(world_size), "--tp", str(tp), "--master-port", port, "--out", str(out)]
        settings = parse(script.DEFAULTS, "", [str(rank), *SAMPLE, *layout, *flags])
        current: Run[Any] = Run(settings, Path(script.__file__))
        script.train(current)
        current.close()
        return {name: p.grad.clone() for name, p in built[0].named_parameters() if p.grad is not None}

    gradients = run_ranks(world_size, rank_work)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records], gradients


@pytest.mark.parametrize(("world_size", "tp"), [(2, 1), (2, 2), (4, 2), (4, 1)])
def test_is_the_run_of_one_process_at_the_same_global_batch(world_size: int, tp: int, tmp_path: Path) -> None:
    sgd = "--optimizer sgd --lr 0.1 --bsz 14".split()  # 14 rows do not divide by 4 replicas
    expected_losses, [expected] = train(tmp_path / "one", 1, 1, *sgd)
    losses, gradients = train(tmp_path / "many", world_size, tp, *sgd)
    assert len(losses) == 2 * (64 // 14)
    assert max(expected_losses) - min(expected_losses) > 1e-3
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for rank, own in enumerate(gradients):
        for name, whole in expected.items():
            name_of_twin = name.replace("mod.", "")
            dim = split_dim("Transformer", name_of_twin)
            part = whole if dim is None else whole.chunk(tp, dim)[rank % tp]
            assert whole.abs().max() > 0, name
            torch.testing.assert_close(own[name], part, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_launch_prints_losses_and_accuracy(tmp_path: Path) -> None:
    flags = [*SAMPLE, "--world-size", "4", "--tp", "2", "--dropout", "0.1", "--dtype", "bfloat16"]
    ended = run(sys.executable, "-m", "distlab.launch", "sentiment", *flags, "--out", tmp_path)
    assert ended.status == 0, ended.err
    steps = [line.split() for line in ended.out.splitlines() if not line.startswith("#")]
    assert [int(step) for step, _ in steps] == list(range(8))
    accuracies = re.findall(r"# epoch (\d): validation accuracy (\d\.\d+) \((\d+) of 16 reviews\)", ended.out)
    assert [epoch for epoch, _, _ in accuracies] == ["1", "2"]
    assert all(float(share) == pytest.approx(int(right) / 16, abs=1e-4) for _, share, right in accuracies)
    sent = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["sent_bytes"]
    assert {"tp activations", "tp gradients", "gradients"} <= sent.keys()
