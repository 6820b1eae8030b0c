"""Puts the chapters' scripts into a wheel, as distlab/chapters; pyproject.toml says everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CHAPTERS = "primer", "DP", "PP", "TP", "CP", "EP", "hybrid", "collectives", "mpi"


class WithChapters(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # then they are found in the checkout
            return
        for script in (path for chapter in CHAPTERS for path in Path(chapter).rglob("*.py")):
            copied = Path(self.build_lib, "distlab/chapters", script)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(script, copied)


setup(cmdclass={"build_py": WithChapters})
