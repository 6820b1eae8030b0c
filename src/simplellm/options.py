"""Options of a model, and checks of their combinations."""

from typing import Literal

from simplellm.errors import InputError

Recompute = Literal["none", "blocks", "all"]


def check_heads(dmodel: int, num_heads: int, num_kv_heads: int | None = None) -> None:
    """Raise `InputError` unless the heads have equal, even widths, and the key heads divide the number of heads."""
    if dmodel % num_heads:
        sentence = f"num_heads {num_heads} does not divide dmodel {dmodel}: each head must be equally wide"
        raise InputError(sentence, "num_heads", "dmodel")
    if dmodel // num_heads % 2:
        raise InputError(
            f"num_heads {num_heads} gives heads of width {dmodel // num_heads} at dmodel {dmodel}: "
            "rotary positions need an even width",
            "num_heads",
            "dmodel",
        )
    if num_kv_heads is not None and num_heads % num_kv_heads:
        raise InputError(
            f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}: "
            "each must serve as many query heads as the others",
            "num_kv_heads",
            "num_heads",
        )
