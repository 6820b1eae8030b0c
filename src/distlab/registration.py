"""Registers the backend "lab" with torch.distributed, now or when torch is imported.

Without arguments, `launch.sh` lists the topologies in half a second; the import of torch takes longer. So
`import distlab` does not import torch. If torch is not imported yet, the registration follows its import.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

TORCH = "torch.distributed"


def register() -> None:
    """Make `dist.init_process_group("lab")` return the lab's process group."""
    if TORCH in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _register() -> None:
    from torch.distributed import Backend

    if not hasattr(Backend, "LAB"):
        Backend.register_backend("lab", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: Any) -> Any:
    from torch.distributed import is_initialized

    from distlab.comm.context import is_of_program

    is_programs_first = is_of_program(options) and not is_initialized()
    if is_programs_first:
        from distlab.launching import programs

        programs.explain_failures(group.group_rank)
    if group.group_size == 1:
        from distlab.comm import alone

        made: Any = alone.create(group, options)
    else:
        from distlab.rendezvous import groups

        made = groups.create(group, options)
    if is_programs_first:
        from distlab.run.failure import watch_nccl

        watch_nccl(made.context)
        programs.summarize_at_exit(made.context)
    return made


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch.distributed like the other finders, and registers the backend after its execution."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
