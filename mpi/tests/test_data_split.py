"""Every rank gets the rows of its copy of the model.   python3 -m pytest -l -v tests/test_data_split.py"""

import numpy as np
import pytest
from data.data_parallel_preprocess import split_data


@pytest.mark.parametrize(("mp_size", "dp_size"), [(1, 1), (1, 4), (2, 4), (4, 2), (8, 1), (3, 5)])
def test_a_model_parallel_group_shares_a_block_and_the_blocks_make_up_the_data(mp_size: int, dp_size: int) -> None:
    rows = 3 * dp_size
    x_train, y_train = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4), np.arange(rows, dtype=np.int32)
    parts = [split_data(x_train, y_train, mp_size, dp_size, rank) for rank in range(mp_size * dp_size)]
    for rank, (x, y) in enumerate(parts):
        first = 3 * (rank // mp_size)
        np.testing.assert_array_equal(x, x_train[first : first + 3], strict=True)
        np.testing.assert_array_equal(y, y_train[first : first + 3], strict=True)
    np.testing.assert_array_equal(np.concatenate([x for x, _ in parts[::mp_size]]), x_train)


@pytest.mark.parametrize(
    ("x_rows", "y_rows", "rank", "sentence"),
    [
        (10, 10, 0, "10 rows do not divide by dp_size 4"),
        (8, 7, 0, "x_train has 8 rows and y_train 7"),
        (8, 8, 8, "rank 8: "),
        (8, 8, -1, "rank -1: "),
    ],
)
def test_what_cannot_be_split_is_refused(x_rows: int, y_rows: int, rank: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        split_data(np.zeros((x_rows, 4)), np.zeros(y_rows), mp_size=2, dp_size=4, rank=rank)
