"""DiLoCo and Streaming DiLoCo: the run of a one-process reference, the bytes of the formulas, checkpoints."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import (
    FEW_TOKENS,
    MODEL,
    TRAINING,
    Ranks,
    State,
    assert_equal,
    initial_weights,
    load,
    records,
    train_on,
)
from support.chapters import validation_losses as validation
from support.processes import run_ranks
from torch import Tensor, nn

from distlab.checkpoints.format import latest_valid
from distlab.parallel.options import Compression, encoded_bytes
from distlab.parallel.quantization import decode, encode
from distlab.run.model import build_optimizer
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab.settings.replicas import StreamingSettings
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.layers import RMSNorm
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

PLAIN, SCRIPT = "DP/diloco/intro_DP_DiLoCo.py", "DP/streaming/intro_DP_Streaming.py"
HYBRID = "hybrid/intro_5d.py"
Settings = StreamingSettings | HybridSettings


def settings(script: str, flags: str) -> Settings:
    read: Settings = parse(load(script).DEFAULTS, "", ["0", *MODEL, *TRAINING, *FEW_TOKENS, *flags.split()])
    return read


def train(ranks: int, script: str, out: Path, *flags: str, exact: bool = False) -> Ranks:
    return train_on(ranks, script, out, *FEW_TOKENS, *flags, exact=exact)


def fragments_of(args: Settings, net: nn.Module) -> list[Tensor]:
    """For each fragment, where its elements are in the flat weights of the whole model: a part of each rank's."""
    split = args.split(SPTokenizer(args.tokenizer).vocab_size) if isinstance(args, HybridSettings) else (args.n_layers,)
    last_layers = list(itertools.accumulate(split))

    def stage_of(name: str) -> int:
        if not name.startswith("model.layers."):
            return 0 if "embed" in name else len(split) - 1
        return next(stage for stage, end in enumerate(last_layers) if int(name.split(".")[2]) < end)

    where, begin = dict[str, Tensor](), 0
    for name, weight in net.named_parameters():
        where[name] = torch.arange(begin, begin := begin + weight.numel())
    fragments: list[list[Tensor]] = [[] for _ in range(args.fragments)]
    for held in args.held if isinstance(args, HybridSettings) else [[0]]:
        own = torch.cat([where[name] for stage in held for name in where if stage_of(name) == stage])
        for number, fragment in enumerate(fragments):
            fragment.append(own[len(own) * number // args.fragments : len(own) * (number + 1) // args.fragments])
    return [torch.cat(fragment) for fragment in fragments]


def reference(_: int, args: Settings, exact: bool = False) -> list[State]:
    """All replicas in one process, as the papers have it; torch's SGD takes the outer steps. Their own weights.

    With `exact`, in float64.
    """
    tokenizer, ranks, outer_steps = SPTokenizer(args.tokenizer), range(args.layout["dp"]), 0
    sizes = {"dmodel": args.dmodel, "num_heads": args.num_heads, "n_layers": args.n_layers, "ctx_size": args.seq_len}
    if exact:
        torch.set_default_dtype(torch.float64)
    nets = [LLama(CausalLLama, tokenizer.vocab_size, **sizes, seed=args.seed) for _ in ranks]
    for norm in (part for net in nets for part in net.modules() if exact and isinstance(part, RMSNorm)):
        norm.dtype = torch.float64
    data: dict[str, Any] = {"batch_size": args.batch_size, "seq_l": args.seq_len, "data": "sample", "seed": args.seed}
    batches = [iter(TinyStories(tokenizer, **data, rank=r, num_replicas=len(ranks))) for r in ranks]
    inner = [build_optimizer(args.optimizer, net.parameters(), args.lr) for net in nets]

    def flat(net: nn.Module) -> Tensor:
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    weights = flat(nets[0]).clone()
    fragments = fragments_of(args, nets[0])
    outer = [nn.Parameter(weights[fragment]) for fragment in fragments]
    options: dict[str, Any] = {
        "lr": args.outer_lr,
        "momentum": args.outer_momentum,
        "nesterov": args.outer_momentum > 0,
    }
    sgd = [torch.optim.SGD([fragment], **options) for fragment in outer]
    residuals = [torch.zeros_like(weights) for _ in ranks]
    sent: dict[int, tuple[int, Tensor]] = {}  # by the step in which it is merged: a fragment and its outer gradient
    for step in range(args.steps):
        for net, source, optimizer in zip(nets, batches, inner, strict=True):
            optimizer.zero_grad()
            x = next(source)
            causalLLMLoss(net(x), x, tokenizer.vocab_size).backward()
            optimizer.step()
        for p in range(args.fragments):
            if (step + 1) % args.sync_every == (p + 1) * args.sync_every // args.fragments % args.sync_every:
                part, gradients = fragments[p], []
                for net, residual in zip(nets, residuals, strict=True):
                    wanted = outer[p].detach() - flat(net)[part] + residual[part]
                    gradients.append(wanted)
                    if args.compress != "none":
                        gradients[-1] = decode(args.compress, encode(args.compress, wanted), len(wanted))
                        residual[part] = wanted - gradients[-1]
                sent[step + args.overlap_steps] = p, torch.stack(gradients).mean(0)
        if step in sent:
            p, outer[p].grad = sent[step]
            sgd[p].step()
            outer_steps += 1
            for net in nets:
                own, alpha = flat(net), args.merge_alpha if args.overlap_steps else 0
                own[fragments[p]] = torch.lerp(outer[p].detach(), own[fragments[p]], alpha)
                nn.utils.vector_to_parameters(own.clone(), net.parameters())
    assert outer_steps > args.fragments, "momentum matters from the second outer step of a fragment"
    return [{name: weight.detach() for name, weight in net.named_parameters()} for net in nets]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, "--sync-every 2 --steps 6 --batch-size 2 --micro-batches 2", marks=pytest.mark.quick),
        (3, "--sync-every 4 --steps 12 --outer-lr 0.5 --optimizer adamw --lr 1e-3 --compress bf16"),
        (3, "--sync-every 4 --fragments 2 --overlap-steps 1 --steps 11 --lr 0.2 --outer-momentum 0.8"),
        (2, "--sync-every 6 --fragments 3 --overlap-steps 1 --steps 13 --merge-alpha 0.25 --compress int4 --lr 0.1"),
    ],
)
def test_is_the_run_of_a_one_process_reference(ranks: int, flags: str, tmp_path: Path) -> None:
    is_run_of_reference(SCRIPT, ranks, flags, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        # A loss is known before a checkpoint.
        (2, "--sync-every 2 --steps 6 --batch-size 2 --micro-batches 2 --transport gloo --save-every 3"),
        (3, "--sync-every 4 --steps 13 --outer-lr 0.5 --optimizer adamw --lr 1e-3 --outer-momentum 0.8"),
    ],
)
def test_by_hand_it_is_the_run_of_that_reference(ranks: int, flags: str, tmp_path: Path) -> None:
    is_run_of_reference(PLAIN, ranks, flags, tmp_path)


def is_run_of_reference(script: str, ranks: int, flags: str, tmp_path: Path) -> None:
    flags += f" --world-size {ranks}"
    args = settings(SCRIPT, flags)
    exact = args.compress == "none"
    [expected] = run_ranks(1, reference, args, exact)
    own, _, losses = train(ranks, script, tmp_path, *flags.split(), "--report-every", "5", exact=exact)

    start = initial_weights(*FEW_TOKENS)
    for weights, reference_weights in zip(own, expected, strict=True):
        assert all((weights[name] - start[name]).abs().max() > 1e-5 for name in start), "all weights were trained"
        assert_equal(weights, reference_weights)
    reported = [loss is not None for loss in losses]
    due = 5, args.save_every or args.steps, args.steps
    assert reported == [any(step % every == 0 for every in due) for step in range(1, args.steps + 1)]

    elements = sum(weight.numel() for weight in start.values())
    bounds = [elements * part // args.fragments for part in range(args.fragments + 1)]
    sent_bytes = {record["step"]: record["sent_bytes"].get("outer gradients", 0) for record in records(tmp_path)}
    interval = args.sync_every // args.fragments
    for step, sent in sent_bytes.items():
        rounds, rest = divmod(step + 1, interval)
        part = (rounds - 1) % args.fragments
        size = 0 if rest else bounds[part + 1] - bounds[part]
        all_reduced = 2 * (ranks - 1) * 8 * size // ranks  # in float64
        assert sent == (all_reduced if args.compress == "none" else (ranks - 1) * encoded_bytes(args.compress, size))
    assert sum(sent_bytes.values()) > 0
    outer_and_momentum, moments = 8 * elements, 8 * elements * (args.optimizer != "sgd")
    for held in json.loads((tmp_path / "memory.json").read_text()):
        assert held["optimizer state"] >= outer_and_momentum + moments


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        (
            "--dp 3 --pp 2",
            "--sync-every 4 --fragments 2 --overlap-steps 1 --steps 11 --lr 0.2 --outer-lr 0.5 --outer-momentum 0.8 "
            "--merge-alpha 0.25",
        ),
        (
            "--dp 2 --pp 2 --schedule zb-v",
            "--n-layers 4 --sync-every 4 --fragments 2 --overlap-steps 1 --steps 9 --lr 0.2",
        ),
    ],
)
def test_replicas_may_be_pipelines(layout: str, flags: str, tmp_path: Path) -> None:
    given = f"{layout} {flags} --outer diloco --report-every 5"
    args = settings(HYBRID, given)
    [expected] = run_ranks(1, reference, args)
    ranks = args.layout["dp"] * args.layout["pp"]
    own, _, losses = train(ranks, HYBRID, tmp_path, *given.split())
    start = initial_weights(*FEW_TOKENS, "--n-layers", str(args.n_layers))
    for rank, weights in enumerate(own):
        assert all((weights[name] - start[name]).abs().max() > 1e-5 for name in weights), "all weights were trained"
        replica = expected[rank // args.layout["pp"]]
        assert_equal(weights, {name: replica[name] for name in weights})
    for pipeline in (own[: args.layout["pp"]], own[args.layout["pp"] : 2 * args.layout["pp"]]):
        assert {name for weights in pipeline for name in weights} == expected[0].keys()
    reported = [loss is not None for loss in losses]
    assert reported == [(step + 1) % 5 == 0 or step + 1 == args.steps for step in range(args.steps)]


def test_replicas_may_share_their_layers_or_their_sequences(tmp_path: Path) -> None:
    flags = (
        "--optimizer adamw --lr 1e-2 --steps 6 --sync-every 2 --batch-size 3 --eval-every 1 --eval-sequences 4".split()
    )
    _, _, expected = train(2, SCRIPT, tmp_path / "diloco", *flags, "--world-size", "2")
    for share in ("--tp 2", "--cp 2"):
        hybrid = [*flags, *f"--dp 2 --pp 1 {share} --outer diloco".split()]
        _, _, losses = train(4, HYBRID, tmp_path / share, *hybrid)
        assert losses == pytest.approx(expected, rel=1e-4)
        assert validation(tmp_path / share) == pytest.approx(validation(tmp_path / "diloco"), rel=1e-4)
    _, second, third, fourth, fifth, _ = validation(tmp_path / "diloco")
    assert second == third != fourth == fifth, "of the outer weights, which change in every second step"


def goes_on_bit_for_bit(ranks: int, script: str, layout: str, own: str, out: Path, compress: str = "int8") -> Path:
    """Run ten steps, and from the checkpoint after six of them again; return this checkpoint.

    By then, the second fragment's first exchange is over, and another one is under way.
    """
    flags = f"{layout} --optimizer adamw --lr 1e-2 --steps 10".split()
    own += " --sync-every 4 --fragments 2 --overlap-steps 1 --save-every 6 --compress " + compress
    expected, _, losses = train(ranks, script, out / "run", *flags, *own.split())
    checkpoint = out / "run" / "checkpoints" / "step-00000006"
    weights, _, rest = train(ranks, script, out / "again", *flags, "--resume", str(checkpoint))
    assert rest == losses[6:]
    for mine, others in zip(weights, expected, strict=True):
        assert all(torch.equal(mine[name], others[name]) for name in others)
    return checkpoint


def test_pipelines_go_on_bit_for_bit_while_a_fragment_is_under_way(tmp_path: Path) -> None:
    layout, own = "--dp 2 --pp 2", "--outer diloco --neighbors replicas"
    checkpoint = goes_on_bit_for_bit(4, HYBRID, layout, own, tmp_path)
    resumed = ["0", "--resume", str(checkpoint), "--steps", "20"]
    for flags, sentence in (
        ("--dp 2 --pp 1", r"moments of its own gradients.*--dp 2 --pp 2"),
        (f"{layout} --schedule gpipe", "trained with --schedule dapple, not gpipe"),
        (f"{layout} --neighbors stages", "trained with --neighbors replicas, not stages"),
        (f"{layout} --layers-per-stage 2,0", "trained with --layers-per-stage None, not 2,0"),
    ):
        with pytest.raises(InputError, match=sentence):
            parse(load(HYBRID).DEFAULTS, "", [*resumed, *flags.split()])
    older = latest_valid(checkpoint)  # from before there was a choice
    settings = parse(load(HYBRID).DEFAULTS, "", [*resumed, *layout.split()])
    del older.record["settings"]["neighbors"]
    with pytest.raises(InputError, match="trained with --neighbors stages, not replicas"):
        settings.check_checkpoint(older)


def test_slices_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The moments are of each rank's own gradients, and of its slices only."""
    goes_on_bit_for_bit(4, HYBRID, "--dp 2 --pp 1 --tp 2", "--outer diloco", tmp_path, compress="bf16")


def test_pipelines_with_other_stages_and_slices_begin_at_the_outer_weights(tmp_path: Path) -> None:
    """A rank holds as many weights as before, but of other layers: its own weights are of no use."""
    flags = "--n-layers 4 --steps 6".split()
    own = "--outer diloco --dp 2 --pp 2 --schedule interleaved --layers-per-stage 1,1,1,1 --sync-every 3".split()
    own += "--micro-batches 2 --batch-size 4".split()
    _, _, losses = train(4, HYBRID, tmp_path / "run", *flags, *own, "--save-every", "5")
    resume = [*flags, "--resume", str(tmp_path / "run" / "checkpoints" / "step-00000005")]
    _, _, expected = train(1, "primer/intro.py", tmp_path / "one", *resume)
    in_turn, in_a_v = "--schedule interleaved --layers-per-stage 2,1,1,0", "--schedule zb-v --layers-per-stage 1,1,1,1"
    for layout in (f"--pp 2 {in_turn}", f"--pp 2 {in_a_v}", "--pp 1 --tp 2"):
        other = f"--outer diloco --dp 1 {layout} --micro-batches 2 --batch-size 8".split()
        _, _, [loss] = train(2, HYBRID, tmp_path / layout, *resume, *other)
        assert [loss] == pytest.approx(expected, rel=1e-6)
        assert loss != pytest.approx(losses[5], rel=1e-4), "the own weights differ from the outer ones"


def test_it_goes_on_bit_for_bit_while_a_fragment_is_under_way(tmp_path: Path) -> None:
    """Momentum, outer and own weights, what rounding left out, and the fragment are in the checkpoint."""
    validation = "--eval-every 5 --eval-sequences 2"
    checkpoint = goes_on_bit_for_bit(2, SCRIPT, "--world-size 2", validation, tmp_path)
    with pytest.raises(InputError, match=r"moments of its own gradients.*--world-size 2"):
        parse(load("primer/intro.py").DEFAULTS, "", ["--resume", str(checkpoint), "--steps", "20"])
    others = f"0 --resume {checkpoint} --world-size 2 --fragments 4 --overlap-steps 0".split()
    with pytest.raises(InputError, match="trained with --fragments 2, not 4"):
        parse(load(SCRIPT).DEFAULTS, "", others)


def test_a_resumed_run_refuses_it_too_and_has_compressions_of_its_own(tmp_path: Path) -> None:
    flags = [*MODEL, *TRAINING, "--steps", "2", "--save-every", "2"]
    train(2, "DP/buckets/intro_DP_buckets.py", tmp_path, *flags, "--world-size", "2", "--compress", "topk")
    resume = ["0", "--resume", str(tmp_path), "--steps", "4"]
    with pytest.raises(InputError, match=r"--sync-every 10: .* add --outer diloco"):
        parse(load(HYBRID).DEFAULTS, "", [*resume, "--dp", "2", "--pp", "1", "--sync-every", "10"])
    settings = parse(load(SCRIPT).DEFAULTS, "", [*resume, "--world-size", "2", "--sync-every", "2"])
    assert settings.compress == "none"


def test_pipelines_that_average_gradients_go_on_with_the_checkpoint_s_settings_of_outer_steps(tmp_path: Path) -> None:
    """And do without them: nobody has to give the flags of a part that is left out."""
    flags = "--world-size 2 --optimizer sgd --steps 2 --save-every 2 --sync-every 2 --fragments 2".split()
    train(2, SCRIPT, tmp_path, *flags)
    resume = ["0", "--resume", str(tmp_path), "--steps", "4", "--dp", "2", "--pp", "1"]
    goes_on = parse(load(HYBRID).DEFAULTS, "", resume)
    assert (goes_on.outer, goes_on.fragments) == ("none", 2)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("elements", [1, 255, 256, 1001])
def test_a_message_has_its_size_and_rounds_to_half_a_step(kind: Compression, elements: int) -> None:
    values = torch.randn(elements, generator=torch.Generator().manual_seed(elements)) * 3
    message = encode(kind, values)
    assert message.nbytes == encoded_bytes(kind, elements)
    rounded = decode(kind, message, elements)
    largest = torch.stack([values[i // 256 * 256 : i // 256 * 256 + 256].abs().max() for i in range(elements)])
    step = {"bf16": values.abs() / 2**7, "int8": largest / 127, "int4": largest / 7}[kind]
    assert bool(((rounded - values).abs() <= step * 0.501).all())
    assert torch.equal(decode(kind, encode(kind, torch.zeros(elements)), elements), torch.zeros(elements))
    values[0] = torch.nan
    assert not decode(kind, encode(kind, values), elements).isfinite().all(), "what is not finite does not disappear"


@pytest.mark.parametrize(("before", "after"), [(SCRIPT, PLAIN), (PLAIN, SCRIPT)])
def test_both_scripts_resume_each_others_runs(before: str, after: str, tmp_path: Path) -> None:
    flags = "--world-size 2 --optimizer adamw --lr 1e-2 --steps 8 --sync-every 3".split()
    saving = "--save-every 4 --eval-every 4 --eval-sequences 2".split()
    expected, _, losses = train(2, before, tmp_path / "run", *flags, *saving)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    weights, _, rest = train(2, after, tmp_path / "again", *flags, "--resume", str(checkpoint))
    assert rest == pytest.approx(losses[4:], rel=1e-6)
    for mine, others in zip(weights, expected, strict=True):
        assert_equal(mine, others)


def test_other_replicas_go_on_with_the_outer_momentum(tmp_path: Path) -> None:
    """With an exchange after every step of SGD, the outer step depends on the global batch alone."""
    flags = "--sync-every 1 --lr 0.3 --steps 6".split()
    before = "--world-size 2 --batch-size 2 --save-every 3".split()
    _, _, losses = train(2, SCRIPT, tmp_path / "run", *flags, *before)
    resume = [*"--world-size 4 --batch-size 1 --resume".split(), str(tmp_path / "run/checkpoints/step-00000003")]
    _, _, rest = train(4, SCRIPT, tmp_path / "again", *flags, *resume)
    assert rest == pytest.approx(losses[3:], rel=1e-5)
    assert rest[2] < rest[0] - 0.1


def test_it_continues_a_run_of_one_process(tmp_path: Path) -> None:
    """From its weights and moments; the outer momentum starts at zero."""
    flags = "--optimizer adamw --lr 1e-2 --save-every 2".split()
    train(1, "primer/intro.py", tmp_path / "before", *flags, "--batch-size", "2", "--steps", "2")
    resume = ["--resume", str(tmp_path / "before"), "--world-size", "2", "--sync-every", "2", "--steps", "6"]
    own, _, losses = train(2, SCRIPT, tmp_path / "after", *flags, *resume)
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert_equal(own[1], own[0])
