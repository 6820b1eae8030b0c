"""The messages and the memory that a run should have, by the planner's formulas; nothing is measured here."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

from distlab.axes.layout import coordinate
from distlab.parallel.options import encoded_bytes
from distlab.pipeline.schedules import AUTO
from distlab.settings.training import MOMENTS
from distlab_page.records import Records
from distlab_planner.costs import Costs
from distlab_planner.exchanges import TIMES, Size
from distlab_planner.machine import Device
from distlab_planner.memory import held
from distlab_planner.model import NUMBER_BYTES, Model, share
from distlab_planner.sent import Formulas, sent_in_step
from simplellm.errors import InputError

NEEDED = (
    "dmodel num_heads num_kv_heads hidden_dim seq_len n_layers batch_size micro_batches recompute optimizer".split()
)


def costs_of(run: Records) -> Costs | None:
    """Return a run in the planner's terms; None if the planner does not know such runs."""
    settings, layout = run.settings, run.layout
    is_known = all(name in settings for name in NEEDED) and settings.get("tp_style") != "naive"
    shards = run.config.get("shards")  # by a script that has no flag for it; it sends whole weights in float32
    if not is_known or run.repairs or (shards and settings["dtype"] != "float32"):
        return None
    schedule = settings.get("schedule", "naive")
    if schedule == AUTO and settings["chunks_per_stage"] == 1:  # its messages are those of any with the same stages
        schedule = "dapple"
    tokenizer = settings["tokenizer"] and Path(settings["tokenizer"])
    known = SimpleNamespace(**{"shard": shards or "none"} | settings | {"tokenizer": tokenizer, "schedule": schedule})
    split = tuple(run.config.get("layers_per_stage", [settings["n_layers"]]))
    by_hand = "tp" not in settings and "chunks_per_stage" not in settings  # see `StageSettings.casts_messages`
    device: Device = "cuda" if "gpu" in run.config.get("machine", {}) else "cpu"
    costs = replace(Costs.in_bytes(known, layout, split, device), by_hand=by_hand)
    try:
        if len(costs.layout.outline.owners) != len(split):  # other chunks
            return None
    except InputError:  # a schedule of the user's own
        return None
    return costs


def counts_memory(run: Records, costs: Costs) -> bool:
    """Return whether the planner counts the memory of such runs; of compiled passes, it knows those of whole blocks."""
    settings, sizes, layout = run.settings, costs.model.sizes, costs.layout
    if sizes.compiled and (sizes.experts or replace(layout, shard="none").not_compiled):
        return False
    if settings.get("document_mask") or (layout.shard != "none" and settings.get("transport") == "gloo"):
        return False  # it knows neither masks within documents nor shards that are not reduced in shared memory
    if layout.shard == "weights" and "W" in layout.outline.letters:
        return False  # nor blocks that wait for their weights' gradients
    shares_vocabulary = run.layout.get("tp", 1) == 1 or "tp" in settings or "tp_style" in settings
    is_known = settings.get("schedule") != AUTO and settings["optimizer"] in MOMENTS  # a script may have another one
    return shares_vocabulary and is_known and not settings.get("capacity")


def sent_by(run: Records, costs: Costs, rank: int, steps: int) -> Formulas:
    """Return what a rank should send in a step, as the mean of the last `steps`.

    Kinds that are not sent in each step, such as those of checkpoints, have no formula.
    """
    formulas, settings, layout, model = sent_in_step(costs, rank), run.settings, costs.layout, costs.model
    replicas, parts, compress = layout.size("dp"), layout.micro_batches, settings.get("compress", "none")
    own = costs.weights_by_holders(*layout.stages_of(coordinate(layout.axes, rank, "pp")))[0]
    weights, copies = own.count, own.ranks
    if (settings.get("report_every") or 1) > 1:
        reported = sum(record["loss"] is not None for record in run.metrics[-steps:])
        formulas.scale("loss", Fraction(reported, steps), f"{reported} of {steps} steps")
    if run.config.get("averages_in_each_pass"):
        formulas.scale("gradients", parts, f"{parts} passes")
    if settings.get("repair") == "exact":  # a sum for each replica, whoever computes it
        formulas.scale("gradients", replicas, f"{replicas} sums")
    topology = settings.get("all_reduce", "library")
    by_hand = topology not in ("library", "ring")
    if run.sync_every is not None or by_hand or compress in ("powersgd", "topk"):  # in place of the usual averages
        formulas.pop(("gradients", None), None)
    if run.sync_every is not None:
        formulas.add_ring("gradients", layout.size("cp"), 1, 2, Size(weights, f"{weights:,} weights"))
        _add_exchanges(formulas, run, weights, replicas, steps)
    elif by_hand:
        count = _sent_by_hand(topology, rank, copies)
        formulas.add("gradients", None, count, f"{count} messages", Size(weights, f"{weights:,} weights"))
    elif compress == "powersgd":
        factors = _factors(model, settings["powersgd_rank"])
        formulas.add_ring("gradients", copies, 1, 2, Size(factors, f"{factors:,} factors"))
    elif compress == "topk":
        most = Size(int(settings["topk_share"] * weights), f"{settings['topk_share']:g} {TIMES} {weights:,} weights", 8)
        formulas.add("gradients", None, copies - 1, f"({copies} - 1)", most)
    if settings.get("sequence_parallel"):
        gains = Size(model.sizes.dmodel, f"{model.sizes.dmodel} gains")
        formulas.add_ring("norm gradients", layout.size("tp"), parts * (2 * model.n_layers + 1), 2, gains)
    return formulas


def _sent_by_hand(topology: str, rank: int, ranks: int) -> int:
    """Return how often a rank sends the whole tensor in an all-reduce of `distlab.collectives`."""
    if topology == "naive":  # to rank 0, which sends the sum to all
        return 1 if rank else ranks - 1
    if topology == "tree":  # up to rank 0, and down: to ranks whose numbers have one further bit in front
        return (rank > 0) + sum(rank < 1 << bit and rank + (1 << bit) < ranks for bit in range(ranks.bit_length()))
    rounds = ranks.bit_length() - 1  # of a butterfly; ranks beyond the largest power of two only send theirs
    return 1 if rank >= 1 << rounds else rounds + (rank + (1 << rounds) < ranks)


def _add_exchanges(formulas: Formulas, run: Records, weights: int, replicas: int, steps: int) -> None:
    """Add what replicas that train independently exchange: weights, or what changes them, in fragments."""
    settings, every = run.settings, run.sync_every or 1
    kind = "outer gradients" if "outer_lr" in settings else "weights"
    fragments, compress = settings.get("fragments", 1), settings.get("compress", "none")
    done = [record["step"] + 1 for record in run.metrics[-steps:]]
    due = [step // (every // fragments) for step in done if step % (every // fragments) == 0]
    if kind == "weights" and settings["steps"] in done and settings["steps"] % every:
        due.append(1)  # after the last step too
    for fragment in range(fragments):
        size = weights * (fragment + 1) // fragments - weights * fragment // fragments
        count = sum((number - 1) % fragments == fragment for number in due)
        times = f"{count} in {steps} steps {TIMES} "
        if compress == "none":
            share, words = Fraction(2 * count * (replicas - 1), replicas * steps), f"2 ({replicas} - 1) / {replicas}"
            formulas.add(kind, None, share, times + words, Size(size, f"{size:,} weights"))
        else:
            message_bytes = encoded_bytes(compress, size)
            message = Size(message_bytes, f"{message_bytes:,} ({size:,} weights as {compress})", 1)
            formulas.add(kind, None, Fraction(count * (replicas - 1), steps), times + f"({replicas} - 1)", message)


def _matrices(model: Model) -> list[tuple[int, int]]:
    """Return the shape of each weight of a model that is a matrix."""
    sizes, d = model.sizes, model.sizes.dmodel
    block = [*2 * [(d, d)], *2 * [(sizes.kv_width, d)], *2 * [(sizes.hidden_dim, d)], (d, sizes.hidden_dim)]
    return [*2 * [(sizes.vocab_size, d)], *model.n_layers * block]


def _factors(model: Model, width: int) -> int:
    """Return the numbers in PowerSGD's factors of all gradients, or in those gradients that are smaller."""
    gains = (2 * model.n_layers + 1) * model.sizes.dmodel
    return sum(min(width * (a + b), a * b) for a, b in _matrices(model)) + gains


def _kept_by_compression(run: Records, costs: Costs, weights: int) -> int:
    """Return the numbers that compression of gradients keeps: its errors, and one of PowerSGD's two factors."""
    compress, width = run.settings.get("compress", "none"), run.settings.get("powersgd_rank", 0)
    if compress == "powersgd":
        return sum((a + width) * b for a, b in _matrices(costs.model) if width * (a + b) < a * b)
    return weights if compress == "topk" else 0


def memory_of(run: Records, costs: Costs, rank: int) -> dict[str, int]:
    """Return the bytes that a rank should hold, by the kinds of `memory.json`."""
    worker, settings = coordinate(costs.layout.axes, rank, "pp"), run.settings
    plan, outer, copied = held(costs, worker), 0, 0
    kept = _kept_by_compression(run, costs, plan.parameters // NUMBER_BYTES) * NUMBER_BYTES
    if settings.get("run_on") or settings.get("repair", "off") != "off":
        copied = costs.updated(*costs.layout.stages_of(worker)) * NUMBER_BYTES + plan.optimizer_state
    if run.sync_every is not None and "outer_lr" in settings:  # weights and momentum of the outer optimizer
        outer = 2 * plan.parameters
        if "fragments" in settings:  # and the outer gradient of a fragment; what a compressed one lacked
            outer += share(plan.parameters // NUMBER_BYTES, settings["fragments"]) * NUMBER_BYTES
            outer += plan.parameters * (settings["compress"] != "none")
    return {
        "parameters": plan.parameters,
        "gradients": plan.gradients * (costs.layout.size("dp") if settings.get("repair") == "exact" else 1),
        "optimizer state": plan.optimizer_state + outer + kept,
        "copy to undo": copied,
        "gathered": plan.gathered,
        "activations": plan.activations,
    }
