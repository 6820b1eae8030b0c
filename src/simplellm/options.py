"""Options of a model, and checks of their combinations."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from simplellm.errors import InputError

Recompute = Literal["none", "except-attention", "blocks", "all"]
BLOCK_BY_BLOCK: tuple[Recompute, ...] = ("except-attention", "blocks")  # each recomputed within its backward pass
RouterScores = Literal["softmax", "sigmoid"]


class Mixture(NamedTuple):
    """The sizes of a mixture of experts."""

    experts: int
    per_token: int  # experts that the router chooses for each token
    shared: bool = False  # whether a further expert sees all tokens
    scores: RouterScores = "softmax"  # how scores follow from logits: as in Mixtral, or as in DeepSeek-V3
    own: Sequence[int] | None = None  # the experts that this process holds; None for all

    @property
    def options(self) -> dict[str, Any]:
        """The options of a model in `simplellm.llama` with such mixtures, in any number of processes."""
        names = "experts", "experts_per_token", "shared_expert", "router_scores"
        return dict(zip(names, self, strict=False))


def check_mixture(experts: int, experts_per_token: int) -> None:
    """Raise `InputError` unless each token can have different experts."""
    if experts < 0:
        raise InputError(f"experts {experts}: give 0 for none, or how many each block has", "experts")
    if not 1 <= experts_per_token <= experts:
        sentence = (
            f"experts_per_token {experts_per_token}: there are {experts} experts; give a number from 1 to {experts}"
        )
        raise InputError(sentence, "experts_per_token")


class RopeScaling(NamedTuple):
    """The slower rotary positions of long wavelengths in Llama 3.1 and later, with transformers' names."""

    factor: float  # by which wavelengths of more than original / low_freq_factor positions grow
    low_freq_factor: float
    high_freq_factor: float  # wavelengths of less than original / high_freq_factor positions stay
    original_max_position_embeddings: int

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> "RopeScaling | None":
        """Read a dictionary, as from a file, which may have further keys; `InputError` if a value cannot be right."""
        if values is None:
            return None
        numbers = [values.get(name) for name in cls._fields]
        for name, value in zip(cls._fields, numbers, strict=True):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise InputError(f"{name} {value!r:.50} of scaled positions: it must be a number greater than 0")
        found = cls(*numbers)  # type: ignore[arg-type]
        if found.low_freq_factor >= found.high_freq_factor:
            raise InputError(
                f"low_freq_factor {found.low_freq_factor} of scaled positions: give one below the high one"
            )
        return found


def check_heads(dmodel: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None) -> None:
    """Raise `InputError` unless the heads have equal, even widths, and the key heads divide the number of heads."""
    if head_dim is not None:
        if head_dim < 1 or head_dim % 2:
            raise InputError(f"head_dim {head_dim}: rotary positions need an even width of at least 2", "head_dim")
    elif dmodel % num_heads:
        sentence = f"num_heads {num_heads} does not divide dmodel {dmodel}: each head must be equally wide"
        raise InputError(sentence, "num_heads", "dmodel")
    elif dmodel // num_heads % 2:
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
