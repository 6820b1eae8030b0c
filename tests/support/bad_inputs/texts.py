"""Files of stories, and tokenizers."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow  # type: ignore[import-untyped]
import sentencepiece

from simplellm.tokenizers import SHIPPED_MODEL
from support.bad_inputs.files import STORY, cut, noise, special, table, write
from support.bad_inputs.inputs import PRIMER, PYTHON, TINY, BadInput, command_of
from support.processes import LAB


def data(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    good = json.dumps({"text": STORY}) + "\n"
    ok = table(folder / "whole.parquet", {"text": [STORY] * 50})
    lines: dict[str, bytes | str] = {
        "empty": "",
        "blank": " \n\t\n\n",
        "noise": noise(chance, 2000),
        "utf16": STORY.encode("utf-16"),
        "latin1": (STORY + " Ein Märchen.\n").encode("latin-1"),
    }
    contents = {
        **{f"{name}.txt": content for name, content in lines.items()},
        **{f"{name}.jsonl": content for name, content in lines.items()},
        "markers.txt": "<|endoftext|>\n" * 30,
        "wide.txt": "\u3000\n\n" * 30,
        "textless.jsonl": '{"text": ""}\n' * 30,
        "textless.parquet": table(folder / "textless", {"text": [""] * 30}),
        "cut.jsonl": good * 3 + good[: chance.randrange(3, len(good) - 3)],
        "list.jsonl": '["text"]\n',
        "other.jsonl": '{"story": "no text"}\n',
        "number.jsonl": '{"text": 5}\n',
        "null.jsonl": '{"text": null}\n',
        "half.jsonl": '{"text": "\\ud800"}\n',
        "deep.jsonl": "[" * 100_000 + "\n",
        "digits.jsonl": "9" * 10_000 + "\n",
        "two.jsonl": good.strip() * 2 + "\n",
        "prose.jsonl": STORY,
        "empty.parquet": b"",
        "noise.parquet": noise(chance, 3000),
        "magic.parquet": b"PAR1" + noise(chance, 500) + b"PAR1",
        "cut.parquet": cut(ok, chance),
        "late.parquet": ok[chance.randrange(1, 60) :],
        "text.parquet": STORY,
        "column.parquet": table(folder / "column", {"story": [STORY]}),
        "numbers.parquet": table(folder / "numbers", {"text": [1, 2, 3]}),
        "nulls.parquet": table(folder / "nulls", {"text": pyarrow.array([None, None], pyarrow.string())}),
        "latin1.parquet": table(folder / "latin1", {"text": pyarrow.array([b"caf\xe9"]).view(pyarrow.string())}),
        "rowless.parquet": table(folder / "rowless", {"text": pyarrow.array([], pyarrow.string())}),
        "story.md": STORY,
        "story": STORY,
        "story.txt.gz": STORY,
    }
    specials = [
        *(("fifo.txt", "fifo"), ("fifo.jsonl", "fifo"), ("fifo.parquet", "fifo"), ("folder.txt", "folder")),
        *(("zero.txt", "/dev/zero"), ("null.jsonl", "/dev/null"), ("random.parquet", "/dev/urandom")),
        *(("loop.txt", "loop"), ("dangling.txt", "nowhere-at-all")),
    ]
    cases: list[tuple[str, bytes | str | None, str]] = [(name, content, "") for name, content in contents.items()]
    cases += [(name, None, how) for name, how in specials]
    chance.shuffle(cases)
    for number, (name, content, how) in enumerate(itertools.islice(itertools.cycle(cases), count)):
        path = folder / str(number) / name

        def prepare(path: Path = path, content: bytes | str | None = content, how: str = how) -> None:
            special(path, how) if content is None else write(path, content)

        # The launcher looks at the beginning of the data; what comes later is seen by all ranks, in their terminals.
        by_launcher = chance.random() < 0.2 and name != "cut.jsonl"
        start = [str(LAB / "launch.sh"), "dp-ga"] if by_launcher else [PYTHON, str(LAB / PRIMER)]
        yield BadInput("data", [[*start, *TINY, "--steps", "200", "--data", str(path)]], (str(path),), prepare)
    validation = write(folder / "short.txt", STORY)
    yield BadInput(
        "data", [[PYTHON, str(LAB / PRIMER), *TINY, "--eval-every", "2", "--data", str(validation)]], (str(validation),)
    )


def tokenizer_without_end(folder: Path) -> bytes:
    """One that marks no end of a document, which stories are cut at."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([STORY] * 20),
        model_prefix=str(folder / "no-end"),
        vocab_size=40,
        eos_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return (folder / "no-end.model").read_bytes()


def tokenizers(chance: random.Random, count: int, folder: Path) -> Iterator[BadInput]:
    whole = SHIPPED_MODEL.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    no_end = tokenizer_without_end(folder)

    makers: list[tuple[str, Callable[[], bytes | None]]] = [
        ("noise", lambda: noise(chance, 4000)),
        ("cut", lambda: whole[:-1]),  # inside of the last field: what is cut between two is a model
        ("empty", lambda: b""),
        ("text", STORY.encode),
        ("json", b'{"model": {"type": "BPE"}}'.strip),
        ("no-end", lambda: no_end),
        ("folder", lambda: None),
        ("begun", lambda: noise(chance, 100) + whole),
        ("zeros", lambda: bytes(5000)),
    ]
    for number, (name, maker) in enumerate(itertools.islice(itertools.cycle(makers), count - 1)):
        path, content = folder / str(number) / f"{name}.model", maker()

        def prepare(path: Path = path, content: bytes | None = content) -> None:
            special(path, "folder") if content is None else write(path, content)

        script = chance.choice([PRIMER, "hybrid/intro_hybrid.py"]) if name != "no-end" else PRIMER
        wanted = ("--tokenizer",)
        yield BadInput(
            "tokenizers", [command_of(script, ["--data", "sample", "--tokenizer", str(path)])], wanted, prepare
        )
    fifo = folder / "fifo.model"
    yield BadInput(
        "tokenizers",
        [command_of(PRIMER, ["--data", "sample", "--tokenizer", str(fifo)])],
        ("--tokenizer",),
        lambda: special(fifo, "fifo"),
    )
