"""How tensor parallelism can divide a model: the styles, and among how many ranks."""

from typing import Literal

from simplellm.errors import InputError

Style = Literal["naive", "megatron"]


def check_division(num_heads: int, num_kv_heads: int | None, ranks: int) -> None:
    """Raise `InputError` unless each rank can hold as many heads, of queries and of keys and values, as the others."""
    for flag, heads in (("--num-heads", num_heads), ("--num-kv-heads", num_kv_heads)):
        if heads is not None and heads % ranks:
            what = f"{flag} {heads} among {ranks} tensor-parallel ranks: each must hold as many heads as the others"
            raise InputError(f"{what}; give a multiple of {ranks}, or a number of ranks that divides {heads}")
