"""A save and a resume that take far longer than --timeout: a checkpoint of 4 GB on a disk with a limited speed.

Run it as root. It needs 8 GB of memory, and control groups of version 1. The disk is a file system in an image.

python bench/slow_disk.py
python bench/slow_disk.py --megabytes-per-second 40 --dmodel 1024
"""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

LAB = Path(__file__).resolve().parents[1]
LIMITS = Path("/sys/fs/cgroup/blkio")  # of the root group, so that they hold for writing back, too


@dataclass
class Settings:
    megabytes_per_second: int = 100
    """speed of the disk, for reading and for writing"""
    dmodel: int = 1664
    """width of the model of 8 layers; each parameter takes 12 bytes of a checkpoint"""
    timeout: int = 5
    """the run's --timeout, in seconds"""


@contextlib.contextmanager
def slow_disk(megabytes_per_second: int) -> Iterator[Path]:
    """Yield the folder of a file system of 12 GB, which is empty, and gone at the end."""

    def limit(bytes_per_second: int) -> None:
        for way in ("read", "write"):
            (LIMITS / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {bytes_per_second}")

    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        image, folder = Path(name, "image"), Path(name, "disk")
        folder.mkdir()
        with image.open("wb") as file:
            file.truncate(12 * 10**9)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        device = subprocess.run(
            ["losetup", "--find", "--show", "--direct-io=on", image], check=True, capture_output=True, text=True
        ).stdout.strip()
        stack.callback(lambda: subprocess.run(["losetup", "--detach", device], check=True))
        at = os.stat(device).st_rdev
        number = f"{os.major(at)}:{os.minor(at)}"
        subprocess.run(["mount", device, folder], check=True)
        stack.callback(lambda: subprocess.run(["umount", folder], check=True))
        limit(megabytes_per_second * 10**6)
        stack.callback(limit, 0)
        yield folder


def run(settings: Settings, out: Path, *flags: str) -> tuple[str, float]:
    """Return the output of a run with two stages, and its seconds."""
    model = f"--dmodel {settings.dmodel} --num-heads 16 --n-layers 8 --seq-len 16 --data sample --device cpu"
    pipeline = f"--world-size 2 --batch-size 2 --micro-batches 2 --timeout {settings.timeout} --out {out}"
    started = time.monotonic()
    ended = subprocess.run(
        [LAB / "launch.sh", "pp-gpipe", *model.split(), *pipeline.split(), *flags], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, time.monotonic() - started


def main(settings: Settings) -> None:
    with slow_disk(settings.megabytes_per_second) as folder:
        out = folder / "run"
        told, seconds = run(settings, out, "--steps", "1", "--save-every", "1")
        saving = re.search(r"checkpoints took ([\d.]+) s", told)
        size = sum(file.stat().st_size for file in out.rglob("*.safetensors"))
        print(f"{size / 1e9:.2f} GB at {settings.megabytes_per_second} MB/s, --timeout {settings.timeout}")
        print(f"run of one step: {seconds:.0f} s, of which saving {saving[1] if saving else '?'} s", flush=True)
        for file in out.rglob("*.safetensors"):  # to be read from the disk
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        told, seconds = run(settings, folder / "resumed", "--resume", str(out), "--steps", "2")
        step = next(line for line in told.splitlines() if line.startswith("1 "))
        print(f"resumed, with one step more: {seconds:.0f} s: {step}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
