"""The GPU tests: what they compare with, in which order they run, and for how long."""

import os
import time

import pytest
import torch
from support.gpu_runs import GPURun, train

ORDER = "test_parity test_nccl test_checkpoints test_failures test_reports test_model".split()
STARTED = time.monotonic()

for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
    os.environ.pop(name, None)  # with TF32, products of float32 have ten bits: no parity
torch.set_float32_matmul_precision("highest")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("gpu"):  # this folder was named
        raise pytest.UsageError("the tests in tests/gpu need --gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What matters most comes first, in case the time does not suffice."""
    items.sort(key=lambda item: ORDER.index(item.path.stem))


@pytest.fixture(autouse=True)
def _in_time(request: pytest.FixtureRequest) -> None:
    minutes = request.config.getoption("minutes")
    if time.monotonic() - STARTED > 60 * minutes:
        pytest.fail(f"not run: {minutes:g} minutes have passed; --minutes allows more", pytrace=False)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> GPURun:
    """One process on the CPU, in float32, whose losses all layouts on the GPU must have."""
    run = train("primer --batch-size 6 --eval-every 3", tmp_path_factory.mktemp("reference"), device="cpu")
    assert run.losses[0] - run.losses[-1] > 0.5, "it learns, so that a wrong gradient shows in the losses"
    return run
