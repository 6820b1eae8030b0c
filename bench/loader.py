"""The loader: tokens that a rank gets in a second, and the time until a resumed run has its first batch.

    python bench/loader.py
    python bench/loader.py --replicas 1 8 --seconds 1

The data are stories of the generator, in a file of JSON lines, and from the generator itself. "Encoded again" is what a
loader without files of tokens does: every rank encodes the whole global batch, and takes its rows.
"""

import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tables import print_head, print_row

from simplellm import command_line
from simplellm.dataloaders import TinyStories
from simplellm.stories import story
from simplellm.token_files import CACHE
from simplellm.tokenizers import SPTokenizer

ROWS, SEQ = 8, 256  # of a rank's batch
STEP = 100_000  # to resume at


@dataclass
class Settings:
    """What to measure."""

    replicas: tuple[int, ...] = (1, 8, 64, 512)
    """numbers of replicas that share a step"""
    stories: int = 20_000
    """documents of the file"""
    seconds: float = 2.0
    """to measure a speed for"""


def tokens_per_second(loader: TinyStories, seconds: float) -> float:
    """Return the speed at which a rank gets its tokens: the median of five equal parts of the time."""
    speeds = []
    next(loader)
    for _ in range(5):
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < seconds / 5 or not steps:
            next(loader)
            steps += 1
        speeds.append(steps * ROWS * SEQ / (time.perf_counter() - started))
    return statistics.median(speeds)


def seconds_to_resume(data: str, tokenizer: SPTokenizer, position: dict[str, int]) -> float:
    started = time.perf_counter()
    loader = TinyStories(tokenizer, ROWS, SEQ, data=data)
    loader.load_state_dict(position)
    next(loader)
    return time.perf_counter() - started


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        measure(settings, Path(folder))


def measure(settings: Settings, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ[CACHE] = str(folder / "cache")
    tokenizer, file = SPTokenizer(), folder / "stories.jsonl"
    texts = [story(number) for number in range(settings.stories)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = sum(len(tokenizer.encode(text)) + 1 for text in texts[:1000]) / 1000 * settings.stories
    print(
        f"batches of {ROWS} x {SEQ} tokens, a file of {file.stat().st_size / 1e6:.0f} MB, {tokens / 1e6:.1f} M tokens\n"
    )
    heads = "mapped, tokens/s:", "encoded for the first time, tokens/s:", "encoded again, tokens/s:"
    print_head("replicas:", *heads)
    for count in settings.replicas:
        speeds = {}
        for name, cache in (("first", "new"), ("again", ""), ("mapped", "cache")):
            os.environ[CACHE] = str(folder / cache) if cache else ""
            loader = TinyStories(tokenizer, ROWS, SEQ, data=str(file), num_replicas=count)
            if name == "mapped":
                for _ in range(int(tokens / (count * ROWS * SEQ)) + 1):  # a whole pass
                    next(loader)
            speeds[name] = tokens_per_second(loader, settings.seconds)
            shutil.rmtree(folder / "new", ignore_errors=True)
        print_row(count, *(f"{speeds[name]:,.0f}" for name in ("mapped", "first", "again")))

    print()
    print_head("data", f"resumed at step {STEP:,}: its tokens are mapped, ms:", "its tokens have to be encoded, ms:")
    mean = tokens / settings.stories
    for name, data in (("the generator", "sample"), ("the file", str(file))):
        position = {"document": int(STEP * ROWS * SEQ / mean), "offset": 7}
        shutil.rmtree(folder / "cache", ignore_errors=True)
        os.environ[CACHE] = str(folder / "cache")
        cold, warm = (seconds_to_resume(data, tokenizer, position) for _ in range(2))
        print_row(name, f"{1e3 * warm:.0f}", f"{1e3 * cold:.0f}")


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
