"""One process: a training step of the lab's model against the same step of transformers' LlamaForCausalLM.

    python bench/single.py --steps 20 --threads 1
    python bench/single.py --recompute               the lab's model with --recompute none, blocks and so on instead
    python bench/single.py --compile                 both compiled, and the lab's as it is
    python bench/single.py --profile                 where the time of a step goes, in both models

Both models start from the same weights and take the same batches and the same Adam, in turns within one run, so that
whatever else the machine does falls on both; the ratio of each pair of steps is taken before the median. Times are
wall-clock times of a whole step: zero_grad, forward, loss, backward, optimizer.
"""

from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, get_args

import torch
from tables import milliseconds, print_head, print_row
from torch import Tensor, nn
from torch.optim import Adam
from training import VOCAB_SIZE, Step, loss_of, training_step
from training import tokens as tokens_of
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn, through_lab

from distlab.machine.heap import set_up_heap
from simplellm import command_line
from simplellm.errors import require_package
from simplellm.llama import CausalLLama, LLama
from simplellm.options import Recompute
from simplellm.saved_activations import SavedActivations

DMODEL, NUM_HEADS, N_LAYERS, SEQ_LEN, BATCH_SIZE = 288, 6, 6, 256, 4


@dataclass
class Settings:
    """What to measure."""

    steps: int = 20
    """measured steps of each model, at least 2"""
    warm_up: int = 3
    """steps before the measured ones"""
    threads: int = 1
    """threads of torch"""
    recompute: bool = False
    """compare the values of the lab's --recompute"""
    compile: bool = False
    """compare compiled models"""
    dtype: Literal["float32", "bfloat16"] | None = None
    """only the table of this one"""
    profile: bool = False
    """show where the time of a step goes"""


def ours(dtype: torch.dtype, recompute: Recompute = "none") -> Step:
    model = build(dtype, recompute)
    return training_step(loss_of(model), Adam(model.parameters(), lr=8e-4))


def theirs(parameters: torch.dtype, autocast: bool, compiled: bool = False) -> Step:
    require_package("transformers", "the comparison")
    from transformers import LlamaConfig, LlamaForCausalLM

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

    def plain_loss(ids: Tensor) -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    compiled_or_plain = torch.compile(plain_loss) if compiled else plain_loss

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return compiled_or_plain(ids)

    return training_step(loss, Adam(model.parameters(), lr=8e-4))


def compiled_steps(dtype: torch.dtype) -> dict[str, Step]:
    return {
        "ours, compiled": through_lab(ours(dtype)),
        "ours": ours(dtype),
        "transformers, compiled": theirs(torch.float32, autocast=dtype != torch.float32, compiled=True),
    }


def build(dtype: torch.dtype, recompute: Recompute = "none") -> CausalLLama:
    sizes = {"dmodel": DMODEL, "num_heads": NUM_HEADS, "n_layers": N_LAYERS, "ctx_size": SEQ_LEN}
    return LLama(CausalLLama, VOCAB_SIZE, **sizes, device="cpu", dtype=dtype, recompute=recompute)


def tokens(turn: int, batch_size: int = BATCH_SIZE) -> Tensor:
    """Token ids (batch, seq)."""
    return tokens_of(turn, batch_size, SEQ_LEN)


def compare(steps: dict[str, Step], settings: Settings) -> dict[str, list[float]]:
    """Seconds of each measured step, by name, of steps that compute the same loss."""
    losses = {name: step(tokens(0)).item() for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 0.01:
        raise RuntimeError(f"these do not compute the same loss: {losses}")
    return seconds_in_turn(steps, tokens, settings.steps, settings.warm_up)


def print_table(title: str, steps: dict[str, Step], settings: Settings) -> None:
    """Medians, and how many times as fast the first is as each of the others."""
    seconds = compare(steps, settings)
    print(f"\n**{title}**\n")
    print_head("model", "step, ms:", "tokens/s:", "speed of ours to this one: median (quartiles):")
    first, *_ = seconds.values()
    for name, own in seconds.items():
        ratio = "" if own is first else quartiles_of_ratios(own, first)
        print_row(name, milliseconds(own), f"{BATCH_SIZE * SEQ_LEN / median(own):.0f}", ratio)


def compare_recomputation(settings: Settings) -> None:
    """In float32: what is kept, and how long a step takes, with and without recomputation."""
    modes = get_args(Recompute)
    kept = {}
    for mode in modes:
        model = build(torch.float32, mode)
        saved = SavedActivations(model.parameters())
        with saved.counting():
            loss_of(model)(tokens(0)).backward()
        kept[mode] = saved.peak_bytes
    seconds = compare({mode: ours(torch.float32, mode) for mode in modes}, settings)
    print()
    heads = "--recompute", "activations kept, MB:", "to none:", "step, ms:", "time to none: median (quartiles):"
    print_head(*heads)
    for mode in modes:
        bytes_of = f"{kept[mode] / 1e6:.1f}", f"{kept[mode] / kept['none']:.2f}"
        print_row(mode, *bytes_of, milliseconds(seconds[mode]), quartiles_of_ratios(seconds[mode], seconds["none"]))


def profile(steps: dict[str, Step], settings: Settings) -> None:
    """Where the time of a step goes, by what torch's profiler counts."""
    heads = "model", "products, ms:", "attention:", "update:", "all else:"
    print()
    print_head(*heads, "products and attention, without the update:")
    for name, step in steps.items():
        for turn in range(settings.warm_up):
            step(tokens(turn))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            for turn in range(settings.steps):
                step(tokens(turn))
        events = recorded.key_averages()
        products = sum(e.self_cpu_time_total for e in events if e.key in ("aten::mm", "aten::addmm", "aten::bmm"))
        attention = sum(e.self_cpu_time_total for e in events if "scaled_dot_product" in e.key)
        update = sum(e.cpu_time_total for e in events if e.key.startswith("Optimizer.step"))
        rest = sum(e.self_cpu_time_total for e in events) - products - attention - update
        times = (f"{microseconds / 1e3 / settings.steps:.0f}" for microseconds in (products, attention, update, rest))
        print_row(name, *times, f"{(products + attention) / (products + attention + rest):.0%}")


def main(settings: Settings) -> None:
    require_quartiles("--steps", settings.steps)
    torch.set_num_threads(settings.threads)
    set_up_heap()  # as in the lab's runs, here for all models
    print(
        f"Batch {BATCH_SIZE}, sequence {SEQ_LEN}, vocabulary {VOCAB_SIZE}, dmodel {DMODEL}, {NUM_HEADS} heads, "
        f"{N_LAYERS} layers, {settings.threads} thread(s), {settings.steps} steps, torch {torch.__version__}"
    )
    if settings.recompute:
        compare_recomputation(settings)
    elif settings.compile:
        for name in (settings.dtype,) if settings.dtype else ("float32", "bfloat16"):
            print_table(name, compiled_steps(getattr(torch, name)), settings)
    else:
        float32 = {"ours": ours(torch.float32), "transformers": theirs(torch.float32, autocast=False)}
        if settings.profile:
            profile(float32, settings)
            return
        print_table("float32", float32, settings)
        bfloat16 = {
            "ours, mixed": ours(torch.bfloat16),
            "transformers, autocast": theirs(torch.float32, autocast=True),
            "transformers, parameters in bfloat16 too": theirs(torch.bfloat16, autocast=False),
        }
        print_table("bfloat16", bfloat16, settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
