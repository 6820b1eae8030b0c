"""The generated stories: a pure function that stays what it is, and endlessly various."""

import functools
import hashlib
import subprocess
import sys
from random import Random

import pytest

from simplellm import stories
from simplellm.stories import parse, story

pytestmark = pytest.mark.quick


@functools.cache
def sample() -> list[str]:
    return [story(index) for index in range(2000)]


@pytest.mark.parametrize(
    ("seed", "split", "first", "digest"),
    [
        (0, "train", 0, "3ad1ca4466bac6a142d64af30f142c9f43ab109eb7dcfd635f7fbad6c5381aad"),
        (0, "validation", 0, "4d3788e5ac316908a9413db8b378ceaa4d157bf3dc049cad0fd9081ebb2d56ce"),
        (1, "train", 0, "ea6b4d2c1233caf856d2c9af1a6ce2c8da9ff254972d5610c71531d12635eaef"),
        (4711, "train", 0, "a1048b851fd10b7714f23f92e6abf47b9c8e356e36a5e0863a62a764269058c0"),
        (0, "train", 10**6, "4fc8708391d05e993abc54e53d1929f2c2244e7d531bdb57164438d3e5d6a995"),
    ],
)
def test_stories_stay_what_they_were(seed: int, split: str, first: int, digest: str) -> None:
    """Losses in the README and checkpoints of earlier runs go with these very stories: new plots need a new name."""
    told = "".join(story(index, seed, split) + "\0" for index in range(first, first + 300))
    assert hashlib.sha256(told.encode()).hexdigest() == digest


def test_no_file_is_read_before_the_first_story() -> None:
    code = (
        "import sys; opened = []; sys.addaudithook(lambda name, args: name == 'open' and opened.append(str(args[0])));"
        "from simplellm import sources, stories; texts = lambda: [p for p in opened if 'story_data' in p];"
        "assert not texts(); stories.story(0); assert len(texts()) == 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_chance_uses_nothing_but_the_sequence_of_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later versions of Python keep that sequence; they are free to change `choice` and the others."""
    for name in ("choice", "choices", "randrange", "randint", "shuffle", "sample", "uniform", "triangular"):
        monkeypatch.delattr(Random, name)
    assert story(3) == sample()[3]


def test_the_sequence_is_that_of_every_python() -> None:
    chance = Random("0/train/7").random
    assert [chance() for _ in range(3)] == [0.8224699477444912, 0.06800724844181005, 0.5342123820278635]
    assert [stories.pick(range(1000), Random("0/train/7").random, power) for power in (1, 2, 3)] == [822, 676, 556]


def test_stories_are_many_and_splits_share_none() -> None:
    validation = {story(index, split="validation") for index in range(2000)}
    assert len(set(sample())) == len(sample())
    assert len(validation) == 2000
    assert not validation & set(sample())


def test_notation() -> None:
    scene = {"toy": "old ball", "his": "her"}
    template = parse("{His} [{a toy}\n |{A toy}].\n\n  End")
    told = {stories.tell(template, scene, Random(seed).random) for seed in range(20)}
    assert told == {"Her an old ball.¶ End", "Her An old ball.¶ End"}


@pytest.mark.parametrize("text", ["[one|two", "one]", "one|two", "[[one]"])
def test_unbalanced_notation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="brackets"):
        parse(text)


def test_a_capital_begins_a_word_of_a_scene_which_may_have_others() -> None:
    template = (
        stories.Slot("who", article=True, capital=True),
        " and ",
        stories.Slot("who", article=False, capital=False),
    )
    assert stories.tell(template, {"who": "uncle Tom"}, lambda: 0.5) == "An uncle Tom and uncle Tom"
