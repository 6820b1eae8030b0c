"""Generating text with and without the key-value cache: token by token in turn, in one run.

    python bench/generation.py
    python bench/generation.py --stories 10 --threads 2

The loop is that of primer/tell_story.py, with a model of the default sizes and fresh weights.
"""

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import per_second, print_head, print_row
from turns import quartiles_of_ratios

sys.path.append(str(Path(__file__).resolve().parents[1]))
from turns import each

from primer.tell_story import Settings as Story
from primer.tell_story import tell
from simplellm import command_line
from simplellm.errors import require
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer

WINDOW = 16  # tokens before each context length over which the medians are taken


@dataclass
class Settings:
    """What to measure."""

    stories: int = 5
    """stories to tell, each of 256 tokens"""
    threads: int = 1
    """threads of torch"""


def seconds_of_next(tokens: Iterator[int]) -> float:
    start = time.perf_counter()
    next(tokens)
    return time.perf_counter() - start


def main(settings: Settings) -> None:
    require(settings.stories > 0, f"--stories {settings.stories}: give at least 1")
    torch.set_num_threads(settings.threads)
    tokenizer = SPTokenizer()
    net = LLama(CausalLLama, tokenizer.vocab_size, device="cpu")
    cached: dict[int, list[float]] = {context: [] for context in range(1, net.ctx_size)}
    uncached: dict[int, list[float]] = {context: [] for context in range(1, net.ctx_size)}
    for number in each(range(settings.stories), "stories"):
        # No token is the end (-1): all stories fill the context.
        with_cache, without = (
            tell(net, [tokenizer.eos_id], Story(Path(), seed=number, cache=cache), -1, torch.device("cpu"))
            for cache in (True, False)
        )
        for context in cached:
            turns = [(cached, with_cache), (uncached, without)]
            for seconds, tokens in turns if context % 2 else reversed(turns):
                seconds[context].append(seconds_of_next(tokens))

    print(f"{settings.stories} stories, {settings.threads} thread(s), torch {torch.__version__}\n")
    heads = "tokens of context:", "with the cache, tokens/s:", "without, tokens/s:", "times as fast (median):"
    print_head(*heads, "quartiles")
    for end in (32, 64, 128, 256):
        contexts = range(end - WINDOW, end)
        fast = [seconds for context in contexts for seconds in cached[context]]
        slow = [seconds for context in contexts for seconds in uncached[context]]
        speeds = per_second(1, fast), f"{1 / statistics.median(slow):,.1f}"
        print_row(end, *speeds, *quartiles_of_ratios(slow, fast).cells(1))
    fast_story, slow_story = (
        [sum(times) for times in zip(*by_context.values(), strict=True)] for by_context in (cached, uncached)
    )
    print(
        f"\nA whole story of {net.ctx_size - 1} tokens: {statistics.median(fast_story):.1f} s with the cache, "
        f"{statistics.median(slow_story):.1f} s without"
    )


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
