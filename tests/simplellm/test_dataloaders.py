"""Batches: the same global batch in every layout, exact positions, every source, and every sentence for bad data."""

import json
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest
import torch

from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError
from simplellm.stories import story
from simplellm.tokenizers import SPTokenizer

TOKENIZER = SPTokenizer()
EOS = TOKENIZER.eos_id


class Letters:
    """One token a character, so that a test can count."""

    eos_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def sample(**options: object) -> TinyStories:
    return TinyStories(TOKENIZER, data="sample", **options)  # type: ignore[arg-type]


def letters(path: Path, **options: object) -> TinyStories:
    return TinyStories(Letters(), data=str(path), **{"seq_l": 2, **options})  # type: ignore[arg-type]


def stream(texts: list[str]) -> list[int]:
    return [id for text in texts for id in [*TOKENIZER.encode(text), EOS]]


# ---------------------------------------------------------------------------------------------------- which token where


def test_the_layout_may_change_on_the_way() -> None:
    alone = torch.stack(list(islice(sample(batch_size=6, seq_l=32), 9))).view(-1, 32)
    three = [sample(batch_size=2, seq_l=32, rank=rank, num_replicas=3) for rank in range(3)]
    rows = [torch.cat([next(rank) for rank in three]) for _ in range(4)]
    position = three[2].state_dict()
    assert position == json.loads(json.dumps(position))

    two = [sample(batch_size=3, seq_l=32, rank=rank, num_replicas=2) for rank in range(2)]
    for rank in two:
        next(rank)
        rank.load_state_dict(position)
    rows += [torch.cat([next(rank) for rank in two]) for _ in range(5)]
    assert torch.equal(torch.cat(rows), alone)


@pytest.mark.parametrize("seq", [2, 3, 5])
@pytest.mark.parametrize("steps", range(12))
def test_a_position_is_exact_wherever_the_cut_falls(tmp_path: Path, steps: int, seq: int) -> None:
    """Documents of 2, 3 and 4 tokens with their end: cuts fall within and between documents, and at their end."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a", "bc", "def"]))
    data = letters(path, seq_l=seq)
    for _ in range(steps):
        next(data)
    tokens = seq * steps
    document, offset = tokens // 9 * 3, tokens % 9
    for length in (2, 3):
        if offset >= length:
            document, offset = document + 1, offset - length
        else:
            break
    assert data.state_dict() == {"document": document, "offset": offset}
    again = letters(path, seq_l=seq)
    again.load_state_dict(data.state_dict())
    assert again.state_dict() == data.state_dict()
    for _ in range(5):
        assert torch.equal(next(again), next(data))


def test_restoring_does_not_read_what_came_before() -> None:
    class Counting(SPTokenizer):
        encoded = 0

        def encode(self, text: str) -> list[int]:
            self.encoded += 1
            return super().encode(text)

    tokenizer = Counting()
    data = TinyStories(tokenizer, data="sample")
    data.load_state_dict({"document": 10**9, "offset": 10})
    next(data)
    assert 0 < tokenizer.encoded < 1100, "its group, and where the loader began"
    assert data.state_dict()["document"] >= 10**9


def test_skip_and_iter_and_seed_and_split() -> None:
    assert next(sample(skip=5))[0].tolist() == stream([story(index) for index in range(5, 12)])[:256]
    data = sample()
    first = next(iter(data))
    assert not torch.equal(next(iter(data)), first)  # iter goes on; it does not start again
    assert next(sample(seed=1))[0].tolist() == stream([story(index, seed=1) for index in range(4)])[:256]
    validation = next(sample(split="validation"))[0].tolist()
    assert validation == stream([story(index, split="validation") for index in range(4)])[:256]


def test_it_keeps_nothing_that_it_gave() -> None:
    data, kept = sample(batch_size=2, seq_l=64), []
    tracemalloc.start()
    for _ in range(2):
        for _ in range(100):
            next(data)
        kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert kept[1] - kept[0] < 100_000, "the tokens of 100 steps, as a list, would be more"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 0}, "batch_size 0: a batch needs at least 1 sequence"),
        ({"seq_l": 1}, "seq_l 1: a sequence needs at least 2 tokens, one to read and one to predict"),
        ({"skip": -1}, "skip=-1: documents to skip are 0 or more"),
        ({"num_replicas": 0}, "num_replicas=0: there is at least 1 replica"),
        ({"rank": 3, "num_replicas": 3}, "rank=3: a rank among 3 replicas is from 0 to 2"),
        ({"rank": -1}, "rank=-1: a rank among 1 replicas is from 0 to 0"),
        ({"split": "test"}, 'split="test": the splits are train and validation'),
    ],
)
def test_arguments_out_of_range(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as error:
        sample(**options)
    assert str(error.value) == sentence


def test_a_tokenizer_without_an_end_of_document() -> None:
    class Endless(Letters):
        eos_id = -1

    with pytest.raises(InputError, match=r"^the tokenizer has no end-of-document piece \(eos\); give one that has$"):
        TinyStories(Endless(), data="sample")


def test_a_position_that_does_not_exist(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("abc\n\nde\n")
    data = letters(path)
    data.load_state_dict({"document": 1, "offset": 2})
    with pytest.raises(InputError) as error:
        data.load_state_dict({"document": 1, "offset": 3})
    assert str(error.value) == (
        "token 3 of document 1 does not exist (3 tokens); "
        "go on with the data and the tokenizer that the position is from"
    )
