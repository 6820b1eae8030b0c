"""Which rows of the training data a rank learns from."""

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


def split_data(x_train: Array, y_train: Array, mp_size: int, dp_size: int, rank: int) -> tuple[Array, Array]:
    """This rank's rows: the data is cut into `dp_size` blocks, and the ranks of a model-parallel group share one.

    Args:
        x_train: (rows, ...) inputs.
        y_train: (rows, ...) labels.
        mp_size: ranks that share a model.
        dp_size: copies of the model.
        rank: of this process; the ranks of a model-parallel group follow each other.

    Returns:
        Views of (rows / dp_size, ...) inputs and labels: the block `rank // mp_size`.

    Raises:
        ValueError: the rows do not divide, inputs and labels do not match, or there is no such rank.
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
