"""The treatment of settings in a resumed run: the ones that it inherits, and the ones that must match."""

from enum import Enum
from typing import get_type_hints


class ResumePolicy(Enum):
    """The treatment of a setting in a resumed run: ``lr: Annotated[float, ResumePolicy.DEFAULT] = 8e-4``."""

    MODEL = "a size of the model; must equal the checkpoint's"
    FIXED = "must equal the checkpoint's"
    DEFAULT = "the checkpoint's value unless another is given"
    SAME_LAYOUT = "like DEFAULT, but only in the layout that wrote the checkpoint"
    PER_REPLICA = "like DEFAULT; in another layout, scaled so that the total over all replicas stays the same"


# The policies of the settings that make a training run what it is, whatever the layout.
OF_TRAINING = ResumePolicy.MODEL, ResumePolicy.FIXED, ResumePolicy.DEFAULT


def marked(settings: object, *policies: ResumePolicy) -> list[str]:
    """Return the names of the fields with one of these policies; a subclass may override a default or policy."""
    found: dict[str, ResumePolicy] = {}
    for declaring in reversed(type(settings).__mro__):
        for name, hint in get_type_hints(declaring, include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, ResumePolicy):
                    found[name] = mark
    return [name for name, policy in found.items() if policy in policies]
