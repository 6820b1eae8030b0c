"""Machines for the tests of the planner."""

from dataclasses import replace
from typing import Any

from distlab.comm.link import Link
from distlab_planner.machine import Machine
from distlab_planner.model import Model, Sizes

CLUSTER = Machine(
    name="hosts with eight devices",
    device="cuda",
    hosts=4,
    ranks_per_host=8,
    cores_per_host=8,
    memory_bytes_per_host=8 * 80e9,
    inside=Link(1e-5, 1e11),
    between=Link(2e-5, 2.5e10),
    multiply_adds_per_second=1e14,
)
SIZES = Sizes(dmodel=32, num_heads=4, num_kv_heads=2, hidden_dim=96, seq_len=16, vocab_size=100)
MODEL = Model(SIZES, n_layers=4)


def cluster(**changes: Any) -> Machine:
    return replace(CLUSTER, **changes)
