"""The generated stories as a source."""

from collections.abc import Iterator
from itertools import count

from simplellm.sources.source import Source
from simplellm.stories import story


class Generator(Source):
    """The generated stories (see `simplellm.stories`)."""

    starts_anywhere = True

    def __init__(self, split: str, seed: int) -> None:
        self._split = split
        self._seed = seed

    def read(self, start: int) -> Iterator[str]:
        return (story(index, self._seed, self._split) for index in count(start))
