"""A generator of short film reviews, so that the classifier needs no download.

Each review contains a few opinions, most of them matching its label, among neutral sentences. Some opinions negate the
opposite word ("The acting was not dull."). The notation of the sentences is that of `simplellm.stories`.
"""

from random import Random

from simplellm.stories import Chance, parse, pick, tell

NEGATIVE, POSITIVE = 0, 1
OPINIONS = 5  # in a review; the first `OWN` to be drawn are of its own kind
OWN = 4
DENIED = 0.1  # fraction of opinions that deny the contrary

SUBJECTS = """
    acting|plot|script|music|camera work|ending|dialogue|cast|direction|editing|story|second half|opening|love story|
    hero|villain|leading actress|leading actor|pace|sound|final scene|humor
"""
ADJECTIVES = (
    """
    dull|awful|bad|wooden|boring|lifeless|clumsy|terrible|predictable|weak|tiresome|shallow|noisy|silly|pointless|
    poor|flat|unbearable
    """,
    """
    brilliant|moving|good|lovely|exciting|superb|clever|wonderful|surprising|strong|charming|deep|elegant|funny|
    gripping|great|warm|unforgettable
    """,
)
VERDICTS = (
    """
    I [want my two hours back|nearly left early|looked at my watch again and again]. |
    [Save your money|Stay away from this one|Watch something else]. | I regret that I [bought a ticket|stayed]. |
    What a [waste of time|mess|disappointment]!
    """,
    """
    I [could have watched for hours|will see it again|laughed and cried]. |
    [Tell your friends|Go and see it|Do not miss this one]. | I am glad that I [bought a ticket|stayed]. |
    What a [joy|treasure|triumph]!
    """,
)
ASIDES = """
    We saw it on a [rainy Sunday|Friday night|quiet afternoon]. | It runs for [two hours|ninety minutes]. |
    My [brother|sister|neighbor] [came along|brought popcorn|had read the book]. |
    It is set in [Paris|a small town|the desert|the last century]. |
    The director made [one film|two films] before. | The theater was [half empty|full]. |
    I had [seen the trailer|read nothing about it].
"""
DEGREES = "|very |quite |really |rather |truly "

_SUBJECT, _ASIDE = parse(f"[{SUBJECTS}]"), parse(f"[{ASIDES}]")
_VERDICTS = [parse(f"[{verdicts}]") for verdicts in VERDICTS]
_AFFIRMED = [parse(f"[was|seemed] [{DEGREES}][{adjectives}]") for adjectives in ADJECTIVES]
_DENIED = [parse(f"[was not|was never|was by no means] [{adjectives}]") for adjectives in reversed(ADJECTIVES)]


def review(index: int, seed: int = 0, split: str = "train") -> tuple[str, int]:
    """Return review number `index` of an endless series: some 50 words, and its label; every other one is `POSITIVE`.

    A pure function of its arguments. A different `seed` or `split` ("train", "validation") gives different reviews.
    """
    chance = Random(f"reviews/{seed}/{split}/{index}").random
    label = index % 2
    sentences = [opinion(label if number < OWN else 1 - label, chance) for number in range(OPINIONS)]
    sentences += [tell(_ASIDE, {}, chance) for _ in range(pick((2, 3, 4), chance))]
    order = sorted((chance(), sentence) for sentence in sentences)
    return " ".join(" ".join(sentence for _, sentence in order).split()), label


def opinion(kind: int, chance: Chance) -> str:
    """Return a positive (`POSITIVE`) or negative (`NEGATIVE`) sentence."""
    if chance() < 0.2:
        return tell(_VERDICTS[kind], {}, chance)
    says = _DENIED[kind] if chance() < DENIED else _AFFIRMED[kind]
    return f"The {tell(_SUBJECT, {}, chance)} {tell(says, {}, chance)}."
