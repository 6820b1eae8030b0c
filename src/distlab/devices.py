"""Where a rank computes and what it talks over: device, backend, threads."""

import os
import socket

import torch

from simplellm.errors import InputError


def pick_device(name: str, rank: int) -> torch.device:
    """The device that `--device` names; `auto` is CUDA if present. The ranks of a host take its GPUs in turn.

    Raises:
        InputError: CUDA is asked for and not there.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device here; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def pick_backend(name: str, device: torch.device, local_ranks: int) -> str:
    """The backend that `--backend` names; `auto` is NCCL when every rank has a GPU of its own, else gloo.

    Raises:
        InputError: NCCL is asked for and cannot work, as with two ranks on one GPU.
    """
    if device.type == "cpu":
        if name == "nccl":
            raise InputError("--backend nccl: NCCL moves CUDA tensors only and this run computes on the CPU; use gloo")
        return "gloo"
    gpus = torch.cuda.device_count()
    if name == "nccl" and local_ranks > gpus:
        raise InputError(
            f"--backend nccl: {local_ranks} ranks share {gpus} GPU, which NCCL refuses; use --backend gloo"
        )
    if name == "auto":
        return "nccl" if local_ranks <= gpus else "gloo"
    return name


def threads_per_rank(local_ranks: int) -> int:
    """Threads for each of the ranks that share this host's cores; OMP_NUM_THREADS overrides."""
    return cores_to_share(local_ranks) or int(os.environ["OMP_NUM_THREADS"])


def cores_to_share(parties: int) -> int | None:
    """This host's cores for each of `parties`, at least 1; None where OMP_NUM_THREADS sets the number of threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // parties)


def keep_to_loopback() -> None:
    """Have gloo listen on the loopback interface alone, whatever this host's name resolves to."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
