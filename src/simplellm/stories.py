"""A generator of small stories for small models, so that the lab needs no download.

The idea is that of TinyStories (Eldan and Li, arXiv 2305.07759): a language model of a few million parameters can learn
to tell a coherent story if the training stories use only words and plots that a four-year-old understands. The texts
here are the project's own: each story follows a plot, with its own characters, in one of many wordings. Plots, phrases
and words are text files in the folder `story_data`, each with its rules at the top.

The notation of plots and phrases:

    [smiled|laughed|]      one of these, earlier ones with higher probability; may be nested
    {hero}, {friend.his}   a word that stays the same throughout the story, or a phrase from phrases.txt
    {His}                  the same with a capital letter
    {a toy}, {A toy}       the same after the article that it needs
    ¶, or a blank line     a new paragraph

White space is collapsed; a line break next to a bar or just inside a bracket is ignored.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

DATA = Path(__file__).with_name("story_data")


class Slot(NamedTuple):
    """A place in a template for a word of the scene, or for one of the shared phrases."""

    name: str
    article: bool
    capital: bool


class Choice(NamedTuple):
    """A place in a template for one of several wordings."""

    options: "tuple[Template, ...]"


Template = tuple["str | Slot | Choice", ...]
Row = dict[str, Template]  # one line of a table: column name -> value
Scene = dict[str, str]  # the words for the slots in one story
Chance = Callable[[], float]  # uniform in [0, 1)
T = TypeVar("T")


class Plot(NamedTuple):
    """A plot: the kind of hero, a table of values that fit together, and the text in all its wordings."""

    hero: str
    table: "tuple[Row, ...]"
    text: Template


# How uneven the choices are, as powers for `pick`.
WORDINGS = 2
NAMES = 3


def story(index: int, seed: int = 0, split: str = "train") -> str:
    """Return story number `index` of an endless series: some 200 words in 3 to 6 paragraphs, separated by blank lines.

    A pure function of its arguments, with the same result on every machine and in every version of Python, so any story
    can be generated without the ones before it. A different `seed` or `split` ("train", "validation") gives different
    stories.
    """
    # In the module `random`, only the sequence of random() is guaranteed to stay the same in later versions of Python.
    chance = Random(f"{seed}/{split}/{index}").random
    plot = pick(list(plots().values()), chance)
    scene = cast(plot.hero, chance)
    for column, value in pick(plot.table, chance, WORDINGS).items():  # a later column may refer to an earlier one
        scene[column] = tell(value, scene, chance)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in tell(plot.text, scene, chance).split("¶"))


def pick(options: Sequence[T], chance: Chance, power: int = 1) -> T:
    """Draw one of the options, all equally likely; with a higher power, earlier options are more likely.

    Of three options, power 2 gives 58, 24 and 18 percent; of 80, power 3 gives 23 percent to the first and 0.4 to the
    last. Real text is similarly uneven (Zipf's law): a few words are very frequent, and many are rare.
    """
    x = position = chance()
    for _ in range(power - 1):
        position *= x  # the same on every machine; x**power may not be
    return options[int(len(options) * position)]


def tell(template: Template, scene: Scene, chance: Chance) -> str:
    """Return the template in one of its wordings, with the words of the scene in its slots."""
    told = []
    for part in template:
        if isinstance(part, str):
            told.append(part)
        elif isinstance(part, Choice):
            told.append(tell(pick(part.options, chance, WORDINGS), scene, chance))
        else:
            text = scene[part.name] if part.name in scene else tell(phrases()[part.name], scene, chance)
            if part.article:
                text = f"{article(text)} {text}"
            told.append(text[:1].upper() + text[1:] if part.capital else text)
    return "".join(told)


def article(word: str) -> str:
    """Return the indefinite article before a word of these stories: "a" or "an"."""
    return "an" if word[0] in "aeio" or word.startswith(("um", "un", "up")) else "a"


# ------------------------------------------------------------------------------------------------ who is in the story

_PRONOUNS = {
    "girl": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "boy": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
}
_GENDERS = tuple(_PRONOUNS)


def cast(hero: str, chance: Chance) -> Scene:
    """Return the words for the characters of a story: the hero, a friend, another character, and a grown-up.

    `{hero}` is the hero's name, and `{he}`, `{him}`, `{his}`, `{himself}`, `{kind}` (girl, rabbit, ...) are the hero's;
    the others' words carry their role: `{friend}`, `{friend.he}`, `{elder.his}` and so on.
    """
    if hero == "either":
        hero = pick(("child", "animal"), chance)
    scene: Scene = {}

    def add_person(role: str, name: str, kind: str, gender: str) -> None:
        prefix = "" if role == "hero" else f"{role}."
        scene[role] = name
        scene[f"{prefix}kind"] = kind
        for he, she in _PRONOUNS[gender].items():
            scene[f"{prefix}{he}"] = she

    told = words()
    animals = dict(item.split(": ") for item in told["animals"])
    names: list[str] = []
    kinds: list[str] = []
    for role in ("hero", "friend", "other"):
        gender = pick(_GENDERS, chance)
        name = _another(told[f"{gender if hero == 'child' else hero} names"], names, chance, NAMES)
        kind = gender if hero == "child" else _another(list(animals), kinds, chance, WORDINGS)
        add_person(role, name, kind, gender)
    name, gender = pick(told["elders"], chance).split(": ")
    add_person("elder", name, name.lower(), gender)

    scene["trait"] = pick(told["traits"], chance, WORDINGS)
    if hero == "child":
        scene["hair"] = "hair"
        scene["home"] = pick(told["child homes"], chance, WORDINGS)
        scene["hobby"] = pick(told["child hobbies"], chance, WORDINGS)
    else:
        scene["hair"] = "fur"
        scene["home"] = animals[kinds[0]]
        scene["hobby"] = pick(told["animal hobbies"], chance, WORDINGS)
    return scene


def _another(options: Sequence[str], taken: list[str], chance: Chance, power: int) -> str:
    """Draw an option that is not in `taken`, and add it to `taken`."""
    while (option := pick(options, chance, power)) in taken:
        pass
    taken.append(option)
    return option


# --------------------------------------------------------------------------------------------- from text to templates


def parse(text: str) -> Template:
    """Return a template from its notation; ValueError if the brackets do not match."""
    text = re.sub(r"\n\s*\n", "¶", text.strip())
    text = re.sub(r"(?<=[\[|])\s*\n\s*|\s*\n\s*(?=[|\]])", "", text)
    tokens = re.findall(r"[\[|\]]|\{[^{}]*\}|[^\[|\]{}]+", re.sub(r"\s+", " ", text))
    options = _options(iter([*tokens, "]"]))
    if len(options) != 1 or tokens.count("[") != tokens.count("]"):
        raise ValueError(f"brackets or bars that do not match in: {text}")
    return options[0]


def _options(tokens: Iterator[str]) -> tuple[Template, ...]:
    """Return the wordings up to the closing bracket."""
    options: list[Template] = []
    parts: list[str | Slot | Choice] = []
    for token in tokens:
        if token == "[":
            parts.append(Choice(_options(tokens)))
        elif token in "|]":
            options.append(tuple(parts))
            if token == "]":
                break
            parts = []
        elif token[0] == "{":
            name = token[1:-1].lower()
            parts.append(Slot(name.removeprefix("a "), name.startswith("a "), token[1:-1] != name))
        else:
            parts.append(token)
    return tuple(options)


def parse_table(text: str) -> tuple[Row, ...]:
    """Return the rows of a table whose first line names its columns; lines that begin with a space continue a row."""
    header, *lines = (line.split(";") for line in re.sub(r"\n[ \t]+", " ", text.strip()).split("\n"))
    columns = [column.strip() for column in header]
    return tuple(dict(zip(columns, (parse(cell.strip()) for cell in line), strict=True)) for line in lines)


def sections(file: str) -> dict[str, str]:
    """Return the texts of a file in `story_data`, by the headings above them ("== heading"), without comments."""
    content = (DATA / f"{file}.txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"^== (.+)\n", re.sub(r"^#.*\n", "", content, flags=re.MULTILINE), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


# Read with the first story, because most commands need no stories.
@functools.cache
def words() -> dict[str, list[str]]:
    """Return the lists of words.txt, by their headings."""
    return {
        heading: [item.strip() for item in re.split("[,\n]", text) if item.strip()]
        for heading, text in sections("words").items()
    }


@functools.cache
def phrases() -> dict[str, Template]:
    """Return the phrases of phrases.txt, by their names."""
    return {name: parse(text) for name, text in sections("phrases").items()}


@functools.cache
def plots() -> dict[str, Plot]:
    """Return the plots of plots.txt, by their titles."""
    found = {}
    for title, content in sections("plots").items():
        head, text = content.split("\n---\n")
        hero, table = head.split("\n", 1)
        found[title] = Plot(hero.removeprefix("hero: "), parse_table(table), parse(text))
    return found
