"""Words of the command line: styles of tensor parallelism, of sharding, and of compression."""

from typing import Literal

from simplellm.errors import InputError

Style = Literal["naive", "megatron"]
Sharded = Literal["optimizer", "gradients", "weights"]
Compression = Literal["none", "bf16", "int8", "int4"]


def check_division(num_heads: int, num_kv_heads: int | None, ranks: int) -> None:
    """Raise `InputError` unless the ranks divide the numbers of query heads and of key and value heads."""
    for flag, heads in (("--num-heads", num_heads), ("--num-kv-heads", num_kv_heads)):
        if heads is not None and heads % ranks:
            what = f"{flag} {heads} among {ranks} tensor-parallel ranks: all ranks must hold the same number of heads"
            raise InputError(f"{what}; give a multiple of {ranks}, or a number of ranks that divides {heads}")
