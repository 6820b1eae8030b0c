"""A trained model tells a story, token by token.

    ./launch.sh tell RUN --prompt "Once upon a time"      # RUN: folder of a run or of an exported model
    ./launch.sh tell RUN --temperature 0.8 --top-p 0.9 --seed 3

A language model scores every token that may come next. To tell a story, pick one of them, append it to the text, and
repeat. Compare `--no-cache`: the story is the same, but the model processes the whole text again for each token.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor

from distlab.exchange import read_saved
from distlab.machine.devices import pick_device_type
from distlab.run.terminal import say
from simplellm import command_line
from simplellm.errors import InputError
from simplellm.generation import TextStream, prompt_ids
from simplellm.llama import CausalLLama
from simplellm.tokenizers import SPTokenizer


@dataclass
class Settings:
    """The model, the prompt, and how to sample."""

    model: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """folder of a run, of a checkpoint, or of an exported model"""
    prompt: str = "Once upon a time"
    """beginning of the text; "" for a new document"""
    temperature: float = 0.8
    """1: sample with the model's probabilities; below 1: favor probable tokens; 0: always the most probable (greedy)"""
    top_k: int | None = None
    """sample only from this many of the most probable tokens"""
    top_p: float = 1.0
    """sample only from the smallest set of tokens with at least this total probability"""
    seed: int = 0
    """random seed; another seed gives another story"""
    max_tokens: int | None = None
    """maximum tokens after the prompt; by default, until the story ends or the model's context is full"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where to compute; auto: CUDA if present"""
    cache: bool = True
    """cache the keys and values of the text so far"""

    def check(self) -> None:
        """Raise `InputError` for a value that cannot work."""
        for flag, value, is_right, wanted in (
            ("--temperature", self.temperature, 0 <= self.temperature < float("inf"), "must be 0 or more"),
            ("--top-k", self.top_k, self.top_k is None or self.top_k >= 1, "must be at least 1"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "must be greater than 0 and at most 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "must be at least 1"),
            ("--seed", self.seed, -(2**63) <= self.seed < 2**63, "must have at most 63 bits"),
        ):
            if not is_right:
                raise InputError(f"{flag} {value}: {wanted}")


def pick(logits: Tensor, args: Settings, generator: torch.Generator) -> int:
    """Sample the next token from its logits (vocab,)."""
    if args.temperature == 0:
        return int(logits.argmax())
    # In float64, since float32 would round a tiny temperature to 0.
    logits = ((logits - logits.max()).double() / args.temperature).float()
    logits, tokens = logits.sort(descending=True, stable=True)
    logits, tokens = logits[: args.top_k], tokens[: args.top_k]
    probabilities = logits.softmax(dim=0)
    before = probabilities.cumsum(dim=0) - probabilities  # total probability of all more probable tokens
    probabilities[before >= args.top_p] = 0  # the more probable tokens already have top_p
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@torch.inference_mode()
def tell(
    net: CausalLLama, ids: list[int], args: Settings, end: int, device: torch.device, document_mask: bool = False
) -> Iterator[int]:
    """Yield the tokens after `ids`, until the `end` of the document, `--max-tokens`, or the model's context is full.

    With `document_mask`, as in training, an `end` that predicts the first token is not seen by the tokens after it.
    """
    generator = torch.Generator().manual_seed(args.seed)
    room = net.ctx_size - len(ids)
    cache = net.new_cache() if args.cache else None
    text = list(ids)
    x = text
    for _ in range(room if args.max_tokens is None else min(room, args.max_tokens)):
        logits = net(torch.tensor([x], device=device), cache)[0, -1]
        token = pick(logits.float().cpu(), args, generator)
        yield token
        if token == end:
            return
        if document_mask and text == [end]:
            text, cache = [], net.new_cache() if args.cache else None
        text.append(token)
        # The cache has the keys and values of the text, so the model needs only the last token.
        x = text if cache is None else [token]


def main(args: Settings) -> None:
    args.check()
    device = torch.device(pick_device_type(args.device))
    saved = read_saved(args.model, say)
    tokenizer = SPTokenizer(saved.tokenizer)
    net = saved.build(device)
    ids = prompt_ids(args.prompt, tokenizer, net.ctx_size)
    size = f"{saved.parameter_count:,} parameters{saved.after_steps}"
    say(f"{args.model}: {size}, at most {net.ctx_size} tokens of text, on {device.type}")

    stream, told = TextStream(tokenizer), 0
    print(*(stream.add(id) for id in ids), sep="", end="", flush=True)
    started, token = time.perf_counter(), None
    for token in tell(net, ids, args, tokenizer.eos_id, device, saved.document_mask):
        told += 1
        print(stream.add(token), end="", flush=True)
    seconds = time.perf_counter() - started
    print(stream.rest())

    ending = f"stopped where the text has the {net.ctx_size} tokens that the model can read"
    if token == tokenizer.eos_id:
        ending = "the model ended its story"
    elif told == args.max_tokens:
        ending = f"stopped after --max-tokens {told}"
    how = "with" if args.cache else "without"
    print(f"# {ending}\n# {told} tokens in {seconds:.2f} s: {told / seconds:.1f} tokens/s, {how} a cache")


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
