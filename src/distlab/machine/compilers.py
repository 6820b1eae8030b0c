"""The compiler that torch.compile needs on this machine."""

import contextlib
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from simplellm.errors import require


def require_compiler() -> None:
    """Raise `InputError` unless torch finds a C++ compiler and Python's headers, with which it compiles."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    is_there = shutil.which(compiler) is not None
    require(is_there, f"--compile: torch needs the C++ compiler {compiler}, which is not here; install it, or set CXX")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    require(header.exists(), f"--compile: torch needs {header}, which is not here; install Python's headers")


def import_compiler() -> None:
    """Import torch's compiler, which takes seconds, and have it find out for which instructions it can compile.

    It tries each kind in processes of their own; forks of this process know the result.
    """
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    from simplellm.compiler import keep_distutils

    keep_distutils()
    with contextlib.suppress(OSError):  # a cache that cannot be written; the ranks say so
        pick_vec_isa()
