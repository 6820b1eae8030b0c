"""One process: a training step of the lab's model against the same step of transformers' LlamaForCausalLM.

    python bench/single.py --steps 20 --threads 1
    python bench/single.py --recompute               the lab's model with --recompute none, blocks and so on instead
    python bench/single.py --compile                 both compiled, and the lab's as it is
    python bench/single.py --profile                 where the time of a step goes, in both models

Both models start from the same weights and take the same batches and the same Adam, in turns within one run, so that
whatever else the machine does falls on both; the ratio of each pair of steps is taken before the median. Times are
wall-clock times of a whole step: zero_grad, forward, loss, backward, optimizer.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Adam
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.machine.heap import set_up_heap
from distlab.machine.saved_activations import SavedActivations
from simplellm.compiler import Compiler
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.options import Recompute

VOCAB_SIZE, DMODEL, NUM_HEADS, N_LAYERS, SEQ_LEN, BATCH_SIZE = 4096, 288, 6, 6, 256, 4

Step = Callable[[Tensor], float]


def training_step(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    """A function that trains `model` on one batch (batch, seq) and returns the loss."""
    optimizer = Adam(model.parameters(), lr=8e-4)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ours(dtype: torch.dtype, recompute: Recompute = "none", compiled: bool = False) -> Step:
    model = build(dtype, recompute)
    compiler = Compiler()

    def loss_of(ids: Tensor) -> Tensor:
        with compiler.applied() if compiled else contextlib.nullcontext():
            return causalLLMLoss(model(ids), ids, VOCAB_SIZE)

    return training_step(model, loss_of)


def theirs(parameters: torch.dtype, autocast: bool, compiled: bool = False) -> Step:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ModuleNotFoundError:
        raise SystemExit("transformers is missing: pip install -r requirements-dev.txt") from None
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": DMODEL,
        "intermediate_size": 4 * DMODEL,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "max_position_embeddings": SEQ_LEN,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(build(torch.float32).state_dict())
    model.to(parameters)

    def plain_loss_of(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    compiled_or_plain = torch.compile(plain_loss_of) if compiled else plain_loss_of

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compiled_or_plain(ids)

    return training_step(model, loss_of)


def compiled_steps(dtype: torch.dtype) -> dict[str, Step]:
    return {
        "ours, compiled": ours(dtype, compiled=True),
        "ours": ours(dtype),
        "transformers, compiled": theirs(torch.float32, autocast=dtype != torch.float32, compiled=True),
    }


def build(dtype: torch.dtype, recompute: Recompute = "none") -> CausalLLama:
    sizes = {"dmodel": DMODEL, "num_heads": NUM_HEADS, "n_layers": N_LAYERS, "ctx_size": SEQ_LEN}
    return LLama(CausalLLama, VOCAB_SIZE, **sizes, device="cpu", dtype=dtype, recompute=recompute)


def tokens(turn: int, batch_size: int = BATCH_SIZE) -> Tensor:
    """Token ids (batch, seq)."""
    return torch.randint(VOCAB_SIZE, (batch_size, SEQ_LEN), generator=torch.Generator().manual_seed(turn))


def compare(steps: dict[str, Step], warm_up: int, measured: int) -> dict[str, list[float]]:
    """Seconds of each measured step, by name, of steps that compute the same loss."""
    losses = {name: step(tokens(0)) for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 0.01:
        raise RuntimeError(f"these do not compute the same loss: {losses}")
    return seconds_in_turn(steps, tokens, measured, warm_up)


def print_table(title: str, seconds: dict[str, list[float]]) -> None:
    """A Markdown table: medians of `seconds`, and how many times as fast the first is as each of the others."""
    print(f"\n**{title}**\n")
    print("| model | step, ms | tokens/s | speed of ours to this one: median (quartiles) |")
    print("|---|---:|---:|---:|")
    reference = next(iter(seconds.values()))
    for name, theirs_ in seconds.items():
        median = statistics.median(theirs_)
        row = f"| {name} | {median * 1e3:.0f} | {BATCH_SIZE * SEQ_LEN / median:.0f} |"
        if theirs_ is reference:
            print(row, "|")
            continue
        low, middle, high = quartiles_of_ratios(theirs_, reference)
        print(row, f"{middle:.2f} ({low:.2f} to {high:.2f}) |")


def compare_recomputation(warm_up: int, measured: int) -> None:
    """A Markdown table, in float32: what is kept, and how long a step takes, with and without recomputation."""
    modes = get_args(Recompute)
    kept = {}
    for mode in modes:
        model = build(torch.float32, mode)
        saved = SavedActivations(model.parameters())
        with saved.counting():
            causalLLMLoss(model(tokens(0)), tokens(0), VOCAB_SIZE).backward()
        kept[mode] = saved.peak_bytes
    seconds = compare({mode: ours(torch.float32, mode) for mode in modes}, warm_up, measured)
    print()
    print("| --recompute | activations kept, MB | to none | step, ms | time to none: median (quartiles) |")
    print("|---|---:|---:|---:|---:|")
    for mode in modes:
        low, middle, high = quartiles_of_ratios(seconds[mode], seconds["none"])
        row = f"| {mode} | {kept[mode] / 1e6:.1f} | {kept[mode] / kept['none']:.2f} "
        print(row + f"| {statistics.median(seconds[mode]) * 1e3:.0f} | {middle:.2f} ({low:.2f} to {high:.2f}) |")


def profile(steps: dict[str, Step], warm_up: int, measured: int) -> None:
    """A Markdown table: where the time of a step goes, by what torch's profiler counts."""
    print()
    print("| model | products, ms | attention | update | all else | products and attention, without the update |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, step in steps.items():
        for turn in range(warm_up):
            step(tokens(turn))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            for turn in range(measured):
                step(tokens(turn))
        events = recorded.key_averages()
        products = sum(e.self_cpu_time_total for e in events if e.key in ("aten::mm", "aten::addmm", "aten::bmm"))
        attention = sum(e.self_cpu_time_total for e in events if "scaled_dot_product" in e.key)
        update = sum(e.cpu_time_total for e in events if e.key.startswith("Optimizer.step"))
        rest = sum(e.self_cpu_time_total for e in events) - products - attention - update
        cells = [f"{microseconds / 1e3 / measured:.0f}" for microseconds in (products, attention, update, rest)]
        share = (products + attention) / (products + attention + rest)
        print(f"| {name} | {' | '.join(cells)} | {share:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each model, at least 2")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--recompute", action="store_true", help="compare the values of the lab's --recompute")
    parser.add_argument("--compile", action="store_true", help="compare compiled models")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="only the table of this one")
    parser.add_argument("--profile", action="store_true", help="show where the time of a step goes")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps} gives no quartiles: it must be at least 2")
    torch.set_num_threads(arguments.threads)
    set_up_heap()  # as in the lab's runs, here for all models
    print(
        f"Batch {BATCH_SIZE}, sequence {SEQ_LEN}, vocabulary {VOCAB_SIZE}, dmodel {DMODEL}, {NUM_HEADS} heads, "
        f"{N_LAYERS} layers, {arguments.threads} thread(s), {arguments.steps} steps, torch {torch.__version__}"
    )
    if arguments.recompute:
        compare_recomputation(arguments.warm_up, arguments.steps)
        return
    if arguments.compile:
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            if arguments.dtype in (None, name):
                print_table(name, compare(compiled_steps(dtype), arguments.warm_up, arguments.steps))
        return
    float32 = {"ours": ours(torch.float32), "transformers": theirs(torch.float32, autocast=False)}
    if arguments.profile:
        profile(float32, arguments.warm_up, arguments.steps)
        return
    print_table("float32", compare(float32, arguments.warm_up, arguments.steps))
    bfloat16 = {
        "ours, mixed": ours(torch.bfloat16),
        "transformers, autocast": theirs(torch.float32, autocast=True),
        "transformers, parameters in bfloat16 too": theirs(torch.bfloat16, autocast=False),
    }
    print_table("bfloat16", compare(bfloat16, arguments.warm_up, arguments.steps))


if __name__ == "__main__":
    main()
