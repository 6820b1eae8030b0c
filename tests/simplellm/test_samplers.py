"""Which rows a step trains on: each once an epoch, in an order that anybody can tell, from any position."""

import pytest

from simplellm.errors import InputError
from simplellm.samplers import BatchSampler

pytestmark = pytest.mark.quick


def epoch(sampler: BatchSampler, steps: int) -> list[list[int]]:
    return [next(sampler).tolist() for _ in range(steps)]


@pytest.mark.parametrize(("rows", "batch_size"), [(10, 3), (7, 7), (12, 4), (1, 1)])
def test_each_row_comes_once_an_epoch(rows: int, batch_size: int) -> None:
    sampler, steps = BatchSampler(rows, batch_size), rows // batch_size
    epochs = [epoch(sampler, steps) for _ in range(3)]
    for batches in epochs:
        taken = [row for batch in batches for row in batch]
        assert len(set(taken)) == len(taken) == steps * batch_size
        assert set(taken) <= set(range(rows))
    assert epochs[0] != epochs[1] != epochs[2] or rows == 1
    assert epochs[0] == epoch(BatchSampler(rows, batch_size), steps)
    assert epochs[0] != epoch(BatchSampler(rows, batch_size, seed=5), steps) or rows == 1


def test_it_goes_on_from_a_position() -> None:
    """Also in the middle of a later epoch, and with batches of another size."""
    sampler = BatchSampler(11, 2, seed=3)
    for _ in range(7):
        next(sampler)
    position = sampler.state_dict()
    assert position == {"epoch": 1, "offset": 4}
    expected = epoch(sampler, 9)
    again, wide = BatchSampler(11, 2, seed=3), BatchSampler(11, 4, seed=3)
    for other in (again, wide):
        other.load_state_dict(position)
    assert epoch(again, 9) == expected
    assert next(wide).tolist() == expected[0] + expected[1]
    at_the_end = BatchSampler(12, 4)
    first = epoch(at_the_end, 3)
    again = BatchSampler(12, 4)
    again.load_state_dict(at_the_end.state_dict())
    assert epoch(again, 3) == epoch(at_the_end, 3) != first


def test_what_there_is_not() -> None:
    with pytest.raises(InputError, match="the data set has 3 rows, which do not make a batch of 4"):
        BatchSampler(3, 4)
    with pytest.raises(InputError, match="there is no row 12 in a data set of 11"):
        BatchSampler(11, 2).load_state_dict({"epoch": 0, "offset": 12})
