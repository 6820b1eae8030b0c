"""The rows of the training data that each rank trains on."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def split_data(x_train: Array, y_train: Array, mp_size: int, dp_size: int, rank: int) -> tuple[Array, Array]:
    """This rank's rows. The data is split into `dp_size` blocks, one for each model-parallel group.

    Args:
        x_train: (rows, ...) inputs.
        y_train: (rows, ...) labels.
        mp_size: number of ranks that share a model: a model-parallel group, with consecutive numbers.
        dp_size: number of replicas of the model.
        rank: number of this process.

    Returns:
        Views of (rows / dp_size, ...) inputs and labels: the block `rank // mp_size`.

    Raises:
        ValueError: the rows are not divisible, inputs and labels do not match, or there is no such rank.
    """
    rows = len(x_train)
    if len(y_train) != rows:
        raise ValueError(f"x_train has {rows} rows and y_train {len(y_train)}")
    if not 0 <= rank < mp_size * dp_size:
        raise ValueError(f"rank {rank}: mp_size {mp_size} and dp_size {dp_size} have the ranks below their product")
    if rows % dp_size:
        raise ValueError(f"{rows} rows do not divide by dp_size {dp_size}")
    block = rows // dp_size
    mine = slice(rank // mp_size * block, (rank // mp_size + 1) * block)
    return x_train[mine], y_train[mine]
