"""The lab's patches of torch that have no public interface.

Tried with torch 2.13.0; tests/distlab/machine/test_torch_patches.py fails when a release changes the internals used
here.
"""

import contextlib
import ctypes
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable
from torch.optim import Optimizer

T = TypeVar("T")


def silence_torch_warnings() -> None:
    """Keep torch's C++ code from printing a trace when a connection is lost; the lab prints a message instead.

    `TORCH_CPP_LOG_LEVEL=ERROR` has the same effect, but torch reads it during its import, before a script can set it.
    A level that the user has set is kept. Also silences the warnings that torch 2.13 has new names for
    `reduce_scatter_tensor` and `all_gather_into_tensor`, which 2.11 does not know.
    """
    old = "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        with contextlib.suppress(OSError, ValueError):
            cpp_log_level().value = 2  # errors only


def cpp_log_level() -> ctypes.c_int:
    """Return the variable that holds the log level of torch's C++ code.

    Raises:
        OSError, ValueError: this build of torch has no such library or variable.
    """
    name = "libc10.dylib" if sys.platform == "darwin" else "libc10.so"
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")


def without_compiler(kind: type[Optimizer]) -> type[Optimizer]:
    """Return an optimizer class that does not import torch's compiler, which takes longer than the first steps.

    torch imports the compiler at the first use of an optimizer, only to exempt the optimizer from compilation. Here the
    methods are already marked as exempt, and `step` is the undecorated method under `no_grad`. If a release of torch
    works differently, the import takes place and nothing else changes.
    """
    for method in (Optimizer.add_param_group, Optimizer.zero_grad):
        plain = getattr(method, "__wrapped__", None)
        if plain is not None:
            plain.__dict__.setdefault("__dynamo_disable", plain)
    plain_step = getattr(kind.step, "__wrapped__", None)
    return kind if plain_step is None else type(kind.__name__, (kind,), {"step": torch.no_grad()(plain_step)})


def uncompiled(kind: type[T]) -> type[T]:
    """Keep torch.compile from translating the methods that a class defines, and the functions that they call.

    In a compiled program it would translate them wherever torch's C++ code calls them, as DDP does, and fail.
    `torch.compiler.disable` does the same, but imports the compiler, which takes seconds.
    """
    from torch._C._dynamo import eval_frame

    skip = eval_frame._FrameAction.SKIP
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kind


def running_backward_pass() -> int | None:
    """Return the number of the backward pass that runs on this thread, different for each; None if none runs."""
    number = torch._C._current_graph_task_id()
    return None if number < 0 else number


def call_after_backward_pass(function: Callable[[], None]) -> bool:
    """Call a function after the backward pass of this thread; False if no node of a pass runs here.

    In calls after the pass there is no node: what they wait for must not be left for another call. (DDP with a static
    graph starts its first all-reduces there, and waits for them at once.)
    """
    if torch._C._current_autograd_node() is None:
        return False
    torch.autograd.Variable._execution_engine.queue_callback(function)
    return True


def keep_work_of_joins() -> None:
    """Keep the all-reduce by which ranks report in `DistributedDataParallel.join` until the next one.

    With `divide_by_initial_world_size=False`, DDP waits for it in the backward pass, and until then holds only its C++
    part. When the Python part is gone, which does the work, C++ waits forever.
    """
    plain, works = Join.notify_join_context, weakref.WeakKeyDictionary[Joinable, Any]()

    def notify(joinable: Joinable) -> Any:
        works[joinable] = work = plain(joinable)
        return work

    Join.notify_join_context = staticmethod(notify)  # type: ignore[method-assign]


def group_of_one() -> Any:
    """Return torch's group of one rank, which needs no store and no thread; torch itself uses it in tests only."""
    from torch._C import _distributed_c10d

    kind: Any = _distributed_c10d.FakeProcessGroup  # torch's annotations lack its options
    return kind._create_internal(0, 1, kind.Options())


def number_groups_from_zero() -> None:
    """Make the next process group the first one again, as `destroy_process_group` does.

    The ranks of a group meet at keys of the store that contain its number. After an `init_process_group` that has
    failed, nothing can be destroyed, and this rank would look for the others at other keys than they.
    """
    dist.distributed_c10d._world.group_count = 0
