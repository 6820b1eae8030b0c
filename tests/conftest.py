"""One thread for the tests' own process, and no GPU: forked ranks (see processes.py) can inherit neither."""

import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.register_assert_rewrite("gpu_runs")
GPU_TESTS = Path(__file__).parent / "gpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests that need a GPU (tests/gpu), and no others")
    parser.addoption("--minutes", type=float, default=9, help="with --gpu: start no test after so many (default: 9)")


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """`--gpu` where there is no GPU: one sentence, and no summary that could be taken for success."""
    if not config.getoption("gpu"):
        return None
    from support.gpu_runs import GPUS, why_no_gpu

    if GPUS:
        return None
    status, sentence = why_no_gpu()
    print(f"# {sentence}")
    return status


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTHONUNBUFFERED", None)  # users' programs write part of their output only when they end
    tokens = tempfile.mkdtemp(prefix="lab-tokens-")
    os.environ["SIMPLELLM_CACHE"] = tokens  # commands that tests start inherit it
    config.add_cleanup(lambda: shutil.rmtree(tokens, ignore_errors=True))
    if not hasattr(config, "workerinput"):
        os.environ["LAB_TESTS_LOCK"] = str(Path(tokens, "lock"))
    if not config.getoption("gpu"):  # before anything can initialize CUDA; commands that tests start inherit it
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not hasattr(config, "workerinput"):  # of several processes, the one that prints
        config.pluginmanager.register(GPUReport(config))
    if not getattr(config.option, "numprocesses", None):  # else other processes run the tests
        config.pluginmanager.import_plugin("support.fixtures")


class GPUReport:
    """Prints why a test has failed as soon as it has, as the time on a rented GPU may end before the tests do.

    And, as the last line, what all this was seen on.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}:\n{report.longreprtext}")

    def pytest_unconfigure(self) -> None:
        import torch
        from support.gpu_runs import GPUS, HERE, REHEARSAL

        if REHEARSAL:
            print(f"# a rehearsal on the CPU, as with {HERE} (LAB_GPU_REHEARSAL): nothing is proven about a GPU")
            return
        names = sorted({torch.cuda.get_device_name(gpu) for gpu in range(GPUS)})
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}"
        print(f"# this was on {HERE} ({' and '.join(names)}), {versions}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    needs_gpu = GPU_TESTS in (collection_path, *collection_path.parents)
    is_other = GPU_TESTS.parent in collection_path.parents and not needs_gpu
    return True if (is_other if config.getoption("gpu") else needs_gpu) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.scheduling import InOrder

    return InOrder(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput") and not config.getoption("gpu"):  # those of a GPU have an order of their own
        from support.scheduling import put_in_order

        put_in_order(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    from support.scheduling import beside_others

    with beside_others(item):
        return (yield)
