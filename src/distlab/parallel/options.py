"""Words of the command line: styles of tensor parallelism, sharding, compression, sharing sequences, repair; sizes."""

from typing import Literal

from simplellm.errors import InputError, require

Style = Literal["naive", "megatron"]
Sharded = Literal["optimizer", "gradients", "weights"]
Compression = Literal["none", "bf16", "int8", "int4"]
CPKind = Literal["ring", "gather", "heads"]  # how queries get the keys and values of the ranks that share a sequence
CPOrder = Literal["zigzag", "contiguous"]  # which positions each of these ranks holds
RepairMode = Literal["off", "on", "exact"]
BUCKET_BYTES = 25_000_000  # of gradients
SHARDED_BUCKET_BYTES = BUCKET_BYTES // 5  # of sharded gradients, of which two buckets are whole at once
BLOCK = 256  # values of a compressed vector that share a scale
LARGEST = {"int8": 127, "int4": 7}  # integers go from minus this to this


def check_division(num_heads: int, num_kv_heads: int | None, ranks: int) -> None:
    """Raise `InputError` unless the ranks divide the numbers of query heads and of key and value heads."""
    for flag, heads in (("--num-heads", num_heads), ("--num-kv-heads", num_kv_heads)):
        if heads is not None and heads % ranks:
            what = f"{flag} {heads} among {ranks} tensor-parallel ranks: all ranks must hold the same number of heads"
            fewer = f", or a number of ranks that divides {heads}" if heads > 1 else ""
            raise InputError(f"{what}; give a multiple of {ranks}{fewer}")


def padded_length(seq: int, ranks: int, order: CPOrder) -> int:
    """Return the length to which a sequence is padded, so that the ranks that share it hold chunks of equal length."""
    chunks = 1 if ranks == 1 else ranks * (2 if order == "zigzag" else 1)
    return -(-seq // chunks) * chunks


def check_sharing(seq_len: int, heads: int, ranks: int, kind: CPKind, flag: str = "--cp") -> None:
    """Raise `InputError` unless `ranks`, which `flag` sets, can share sequences, with `heads` on each of them."""
    least, given = 2 * ranks, f"{flag} {ranks}"
    require(ranks == 1 or seq_len >= least, f"--seq-len {seq_len} with {given}: give at least {least} tokens")
    advice = f"each rank gets as many of {heads} heads as the others; give a divisor, or another --cp-kind"
    require(kind != "heads" or heads % ranks == 0, f"--cp-kind heads with {given}: {advice}")


def encoded_bytes(kind: Compression, elements: int) -> int:
    """Return the size of the message that `distlab.parallel.quantization.encode` makes of `elements` values."""
    values = {"none": 4 * elements, "bf16": 2 * elements, "int8": elements, "int4": (elements + 1) // 2}[kind]
    return values + (4 * -(-elements // BLOCK) if kind in LARGEST else 0)
