"""The film reviews: generated, read, filled up, dealt out."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.sentiment_ranks import in_a_fork, load

from simplellm.errors import InputError
from simplellm.samplers import BatchSampler
from simplellm.stories import parse, tell
from simplellm.tokenizers import SPTokenizer

pytestmark = pytest.mark.quick


@in_a_fork
def test_reviews_are_pure_balanced_and_not_repeated_in_validation() -> None:
    review = load("reviews").review
    train = [review(index) for index in range(600)]
    assert train == [review(index) for index in range(600)]
    validation = [review(index, split="validation") for index in range(200)]
    assert sum(label for _, label in train) == 300
    assert not {text for text, _ in train} & {text for text, _ in validation}
    assert len({text for text, _ in train}) == 600
    assert review(3, seed=1) != review(3, seed=0)
    told = "\0".join(text for text, _ in (*train, *validation, review(3, seed=1)))
    digest = hashlib.sha256(told.encode()).hexdigest()  # the same in each process, whatever its hash seed
    expected = "99845db30fe3b8c370ec7da85dd8ba6da076e5968ff5a6db4f85efea1b11cbcc"
    assert digest == expected, "a run that resumes a checkpoint of an earlier revision has the same reviews"


@in_a_fork
def test_most_opinions_of_a_review_are_those_of_its_label_and_some_deny_the_contrary() -> None:
    module, chance = load("reviews"), Random(0).random
    verdicts = [{tell(parse(f"[{texts}]"), {}, chance).strip() for _ in range(1000)} for texts in module.VERDICTS]
    adjectives = [set(re.findall(r"\w+", words)) for words in module.ADJECTIVES]
    denials = re.compile("was (not|never|by no means) ")

    def opinion_in(sentence: str) -> int | None:
        for kind in (module.NEGATIVE, module.POSITIVE):
            if sentence.rstrip(".").split()[-1] in adjectives[kind]:
                return 1 - kind if denials.search(sentence) else kind
            if sentence in verdicts[kind]:
                return kind
        return None

    for split in ("train", "validation"):
        denied = Counter[int]()
        for text, label in (module.review(index, split=split) for index in range(200)):
            counts = Counter(map(opinion_in, re.split(r"(?<=[.!]) ", text)))
            assert counts[label] > counts[1 - label] > 0, text
            assert counts[None] > 1, text
            denied[label] += denials.search(text) is not None
        assert all(20 < denied[label] < 80 for label in (0, 1)), "of 100; words alone do not tell a label"


@in_a_fork
def test_batches_pad_and_mask() -> None:
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


@pytest.mark.parametrize(("samples", "batch_size", "replicas"), [(20, 6, 4), (7, 5, 3), (2, 2, 3)])
@in_a_fork
def test_replicas_share_the_rows(samples: int, batch_size: int, replicas: int) -> None:
    reviews = load("dataset").Reviews("sample", "train", samples, SPTokenizer())
    numbers = {tuple(ids.tolist()): number for number, ids in enumerate(reviews.ids)}

    def rows(batch: Any) -> list[int]:
        texts = zip(batch.tokens, batch.is_padding, strict=True)
        return [numbers[tuple(tokens[~padding].tolist())] for tokens, padding in texts]

    sampler = BatchSampler(samples, batch_size)
    for batch in [reviews.batch(next(sampler)) for _ in range(3)]:
        parts = [rows(batch.rows_of(replica, replicas)) for replica in range(replicas)]
        assert [row for part in parts for row in part] == rows(batch)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    seen = [
        number
        for replica in range(replicas)
        for batch in reviews.evaluation_batches(batch_size, replica, replicas)
        for number in rows(batch)
    ]
    assert seen == list(range(samples)), "each once"


@in_a_fork
def test_reads_a_data_set_like_the_hubs(tmp_path: Path) -> None:
    import datasets

    folder = tmp_path / "imdb"
    folder.mkdir()
    for split, count in (("train", 30), ("test", 12)):
        lines = [json.dumps({"text": f"{split} {i}", "label": int(i >= count / 2)}) for i in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
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
