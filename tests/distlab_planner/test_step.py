"""The step that the planner plays, where it can be compared: with the simulation of a schedule, and by hand."""

import itertools
from dataclasses import replace

import pytest
from support.planner_machines import CLUSTER, MODEL, SIZES, cluster

from distlab.comm.link import Link
from distlab.parallel.options import BUCKET_BYTES, SHARDED_BUCKET_BYTES, CPKind
from distlab.pipeline import plan
from distlab.pipeline.actions import ActionCosts, Backward, Forward
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import SCHEDULES, stages_per_worker
from distlab_planner.costs import Costs
from distlab_planner.layouts import CP_KINDS, RECOMPUTE, SAME_WEIGHTS, SHARDS, RunLayout, default_split
from distlab_planner.machine import AllReduce, Machine, Measured, PassSeconds, Waking
from distlab_planner.model import Model
from distlab_planner.sent import LOSS_BYTES, sent_bytes, sent_in_step
from distlab_planner.sequences import SharedAttention
from distlab_planner.step import Step, least_seconds, predict

NAMES = [name for name in SCHEDULES if name != "auto"]


def layout(schedule: str = "dapple", pp: int = 2, micro_batches: int = 4, dp: int = 1, tp: int = 1) -> RunLayout:
    split = default_split(MODEL, pp * stages_per_worker(schedule))
    return RunLayout({"dp": dp, "pp": pp, "tp": tp}, micro_batches, micro_batches, schedule, "none", "none", split)


@pytest.mark.parametrize("name", NAMES)
def test_with_cores_for_all_it_is_the_simulation_of_the_schedule(name: str) -> None:
    costs = Costs(cluster(pass_seconds=1e-6, inside=Link(3e-6)), MODEL, layout(name))
    programs = costs.layout.programs()
    known = {(a.letter, a.stage): costs.seconds(a) for program in programs for a in program}
    simulated = simulate(programs, ActionCosts(measured=known, transfer=3e-6))
    step = predict(costs)
    loss = costs.on_hosts.all_reduce(("tp",), 8).seconds + 2 * 3e-6
    assert step.seconds == pytest.approx(simulated.makespan + loss)
    assert step.bubble == pytest.approx(sum(simulated.bubble) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_playing_with_and_without_disturbance_is_the_same_where_there_is_none(name: str) -> None:
    for recompute in ("none", "all"):
        own = replace(layout(name, tp=2, dp=2), recompute=recompute)
        waking = Waking(0.0, 1e-6), Waking(1e-5, 5e-6)
        machine = cluster(pass_seconds=1e-6, optimizer_seconds=1e-9, inside=Link(3e-6, 1e9), waking=waking)
        quick, slow = (predict(Costs(one, MODEL, own)) for one in (machine, replace(machine, slowdown=(1.0,))))
        assert vars(quick) == pytest.approx(vars(slow), abs=1e-12)


def test_ranks_beyond_the_cores_share_them() -> None:
    two_cores = cluster(cores_per_host=2, device="cpu")
    one, two, four = (predict(Costs(two_cores, MODEL, layout(pp=1, dp=dp))).seconds for dp in (1, 2, 4))
    assert one < two < four
    assert predict(Costs(two_cores, MODEL, layout(pp=1, dp=4))).sharing > 0
    assert predict(Costs(two_cores, MODEL, layout(pp=1, dp=2))).sharing == pytest.approx(0)


def test_weights_are_gathered_for_both_passes_and_gradients_reduced_in_the_backward_pass() -> None:
    machine = cluster(device="cpu")
    seconds = {
        shard: [Costs(machine, MODEL, replace(layout(pp=1, dp=2), shard=shard)).exchanged(letter, 0) for letter in "FB"]
        for shard in SHARDS
    }
    assert seconds["none"] == seconds["optimizer"] == [0, 0]
    assert seconds["gradients"][0] == 0 < seconds["gradients"][1]
    forward, backward = seconds["weights"]
    assert backward == pytest.approx(2 * forward) != 0
    sharded = Costs(machine, MODEL, replace(layout("zb-h1", pp=1, dp=2), shard="gradients"))
    assert sharded.exchanged("W", 0) == 0, "they are reduced with those of the inputs"
    sharded = Costs(machine, WIDE, replace(layout(pp=1, dp=2), shard="gradients"))
    of_all, buckets = sharded.weights(0) * 4, sharded.weights(0) * 4 // SHARDED_BUCKET_BYTES
    half = sharded.on_hosts.half(SAME_WEIGHTS, of_all / buckets, "shared").alone
    assert sharded.exchanged("B", 0) == pytest.approx(buckets * half)
    on_hosts = Costs(machine, MODEL, layout(pp=1, dp=2)).on_hosts
    parts = 1 + MODEL.n_layers + 1
    weights_bytes = Costs(machine, MODEL, layout(pp=1, dp=2)).weights(0) * 4
    assert forward == pytest.approx(parts * on_hosts.half(SAME_WEIGHTS, weights_bytes / parts, "shared").alone)


def test_threads_that_were_asked_for_are_those_of_every_action() -> None:
    machine = cluster(cores_per_host=2, device="cpu")
    alone = Costs(machine, MODEL, layout(pp=1))
    one, two = (predict(replace(alone, threads=threads)) for threads in (1, 2))
    assert one.computing == pytest.approx(2 * two.computing)
    assert two.seconds == pytest.approx(predict(alone).seconds)
    assert least_seconds(replace(alone, threads=1)) == pytest.approx(2 * least_seconds(alone), rel=0.1)
    assert least_seconds(replace(alone, threads=2)) == pytest.approx(least_seconds(alone))
    on_gpus = Costs(CLUSTER, MODEL, layout(pp=1))
    assert predict(replace(on_gpus, threads=4)) == predict(on_gpus)
    for name in ("naive", "dapple"):
        turns = Costs(cluster(cores_per_host=2, device="cpu", inside=Link(0.0, 1e15)), WIDE, layout(name))
        assert 0.5 < least_seconds(turns) / predict(turns).seconds <= 1, "an action has the cores of idle workers"


def test_an_all_reduce_takes_as_long_as_its_halves_between_parts_of_sequences() -> None:
    whole = layout(pp=1, tp=2)
    slices, parts = (Costs(CLUSTER, MODEL, replace(whole, sequence_parallel=flag)) for flag in (False, True))
    for letter in "FB":
        assert parts.exchanged(letter, 0) == pytest.approx(slices.exchanged(letter, 0), rel=0.05)


def test_rows_of_experts_travel_there_and_back_in_both_passes() -> None:
    mixed = Costs(
        CLUSTER, replace(MODEL, sizes=replace(SIZES, experts=2)), replace(layout(pp=1), axes={"ep": 2, "pp": 1})
    )
    rows_bytes = mixed.tokens * SIZES.dmodel * 4
    once = mixed.on_hosts.all_to_all(("ep",), rows_bytes).alone
    assert mixed.exchanged("F", 0) == mixed.exchanged("B", 0) == pytest.approx(2 * MODEL.n_layers * once)


def test_a_message_costs_its_ends_time() -> None:
    """Three stages with a micro-batch: the way there and back has four messages, each with two ends."""
    plain = cluster(slowdown=(1.0,), cores_per_host=8)
    step, slower = (
        predict(Costs(replace(plain, message_seconds=seconds), MODEL, layout("naive", pp=3, micro_batches=1))).seconds
        for seconds in (0.0, 1.0)
    )
    assert slower - step == pytest.approx(8)


@pytest.mark.parametrize("slowdown", [(), (1.0,)], ids=["undisturbed", "disturbed"])
def test_a_pass_takes_longer_if_its_rank_has_waited(slowdown: tuple[float, ...]) -> None:
    """Four of six passes follow a wait: not the first one, and not the backward pass of the last stage."""
    machine = cluster(slowdown=slowdown, cores_per_host=8)
    at_once, later = (
        predict(Costs(replace(machine, waking=waking), MODEL, layout("naive", pp=3, micro_batches=1)), 1)
        for waking in ((), (Waking(0.0, 1.0),))
    )
    assert later.seconds - at_once.seconds == pytest.approx(4)
    assert later.computing - at_once.computing == pytest.approx(2), "of the stage in the middle"
    assert later.sharing == pytest.approx(at_once.sharing)


def test_a_slow_link_decides_what_a_step_takes() -> None:
    """A step of GPipe takes what the link carries: all activations, and then all their gradients."""
    machine, model = cluster(inside=Link(0.0, 1e3)), replace(MODEL, sizes=replace(SIZES, dtype="bfloat16"))
    for by_hand, number_bytes in ((False, 2), (True, 4)):
        slow = Costs(machine, model, layout("gpipe", micro_batches=4), by_hand=by_hand)
        sent = 2 * 4 * SIZES.seq_len * SIZES.dmodel * number_bytes
        assert predict(slow).seconds == pytest.approx(sent / 1e3, rel=0.01)


def test_threads_that_slow_each_other_are_not_slowed_twice() -> None:
    passes = PassSeconds((1.0,), (2.0,), (1.0,), (1.0,))
    none = PassSeconds((0.0,), (0.0,), (0.0,), (0.0,))
    measured = tuple(Measured(SIZES, 1, threads, (1,), none, passes, none) for threads in (1, 2))
    machine = cluster(cores_per_host=2, device="cpu", slowdown=(1.0, 1.5), measured=measured)
    step = predict(Costs(machine, MODEL, layout(pp=1, micro_batches=1)))
    assert step.seconds == pytest.approx(3.0 * MODEL.n_layers)


def test_layers_are_split_by_what_both_passes_take() -> None:
    none, block, head = (PassSeconds((f,), (b,), (0.0,), (0.0,)) for f, b in ((0.0, 0.0), (1.0, 2.0), (0.0, 6.0)))
    measured = cluster(measured=(Measured(SIZES, 1, 1, (1,), none, block, head),))
    assert Costs(measured, MODEL, layout()).balanced_split() == (3, 1)


@pytest.mark.parametrize("split", [(3, 1), (1, 3)])
def test_the_activities_are_those_of_the_worker_with_the_most_layers(split: tuple[int, ...]) -> None:
    costs = Costs(CLUSTER, MODEL, replace(layout(), split=split))
    assert predict(costs) == predict(costs, worker=split.index(3)) != predict(costs, worker=split.index(1))


def test_recomputation_takes_longer_with_attention() -> None:
    again = [replace(layout(), recompute=recompute) for recompute in ("none", "except-attention", "blocks")]
    none, without, whole = (Costs(CLUSTER, MODEL, one).seconds(Backward(0, 0)) for one in again)
    assert none < without < whole
    assert len({Costs(CLUSTER, MODEL, one).seconds(Forward(0, 0)) for one in again}) == 1, "but not forward passes"


@pytest.mark.parametrize("kind", CP_KINDS)
def test_of_two_slices_each_computes_half_of_a_layer(kind: CPKind) -> None:
    """Whatever is computed again, and whichever part of the pairs of queries and keys a rank has."""
    for recompute, cp, letter in itertools.product(RECOMPUTE, (1, 2), "FBIW"):
        seconds = []
        for tp in (1, 2):
            axes = {"dp": 1, "pp": 3, "cp": cp, "tp": tp}
            own = replace(layout("zb-h1", pp=3), axes=axes, recompute=recompute, cp_kind=kind, split=(1, 2, 1))
            costs = Costs(CLUSTER, MODEL, own)
            seconds.append(costs.pass_seconds(letter, 1, 1) - costs.exchanged(letter, 1))
        assert seconds[1] == pytest.approx(seconds[0] / 2), (recompute, cp, letter)


def test_heads_go_around_once() -> None:
    """Each of four ranks sends three quarters of its queries, keys, values and results."""
    own = replace(layout(pp=1, micro_batches=1), axes={"dp": 1, "cp": 4}, cp_kind="heads")
    costs = Costs(cluster(device="cpu", inside=Link(0.0, 1e6)), Model(replace(SIZES, num_kv_heads=4), 4), own)
    seconds = 4 * 3 / 4 * 4 * (SIZES.dmodel * SIZES.seq_len) / 1e6
    assert costs.sequence_seconds("F", 0) == pytest.approx(seconds)
    forward = replace(costs, machine=cluster(inside=Link(0.0, 1e18))).seconds(Forward(0, 0))
    for share, left in ((1 / 4, [3 / 4, 1 / 2]), (2, [0, 0])):  # GPUs compute while they send
        machine = cluster(inside=Link(0.0, 1e6), multiply_adds_per_second=1e14 * forward / (share * seconds))
        found = [replace(costs, machine=machine).sequence_seconds(letter, 0) / seconds for letter in "FB"]
        assert found == pytest.approx(left, rel=1e-5)


def test_the_last_rank_of_contiguous_parts_has_the_most_work() -> None:
    causal = [sum(range(16 * rank + 1, 16 * rank + 17)) for rank in range(4)]
    shared = SharedAttention(replace(SIZES, seq_len=64), 1, ranks=4)
    assert replace(shared, order="contiguous").work == pytest.approx(causal[-1] / (sum(causal) / 4), rel=0.02)
    assert shared.work == 1
    assert replace(shared, kind="gather").work == 2, "all pairs, with a mask"


def in_all(step: Step) -> float:
    """The parts of a step together."""
    return step.computing + step.exchanging + step.averaging + step.updating + step.sharing + step.idle


WIDE = Model(replace(SIZES, dmodel=1024, hidden_dim=4096), n_layers=4)


@pytest.mark.parametrize("share", [0.25, 16.0], ids=["fast network", "slow network"])
def test_gradients_are_averaged_bucket_by_bucket_behind_the_last_backward_pass(share: float) -> None:
    """The first of k buckets sets out after a k-th of the pass, and the last one when it ends, or later."""
    machine = cluster(hosts=2, ranks_per_host=1, multiply_adds_per_second=1e11)
    costs = Costs(machine, WIDE, layout(pp=1, dp=2))
    last, size_bytes = costs.seconds(Backward(0, 3)), 4 * costs.weights(0)
    buckets = round(size_bytes / BUCKET_BYTES)
    assert buckets > 4
    link = Link(0.0, size_bytes / (last * share))  # a ring of two: each sends half, twice
    step = predict(replace(costs, machine=replace(machine, between=link)))
    each = last * share / buckets
    ends = max(last / buckets + last * share, last + each)
    assert step.averaging == pytest.approx(ends - last + link.seconds(LOSS_BYTES), rel=1e-6)
    assert (step.bound == "averaging gradients") == (share > 1)


def test_the_loss_is_among_the_collectives() -> None:
    for machine in (CLUSTER, cluster(slowdown=(1.0,))):
        costs = Costs(replace(machine, inside=Link(1e-3)), MODEL, layout(pp=1, dp=2))
        # In rings of two: two messages for the loss, one for the gradients, and one for the new weights.
        for shard, seconds in zip(SHARDS, (4e-3, 4e-3, 3e-3, 2e-3), strict=True):
            step = predict(replace(costs, layout=replace(costs.layout, shard=shard)))
            assert step.idle == pytest.approx(0, abs=1e-12)
            assert step.averaging == pytest.approx(seconds, rel=1e-3), shard


@pytest.mark.parametrize("name", ["none", "optimizer", "gradients"])
def test_the_update_is_of_the_weights_that_a_rank_holds_the_state_of(name: str) -> None:
    machine = cluster(step_seconds=1e-3, optimizer_seconds=1e-8, sgd_seconds=1e-9, pass_seconds=1e-6)
    own = replace(layout(dp=2), shard=name)  # type: ignore[arg-type]
    costs = Costs(machine, MODEL, own)
    held = costs.weights(0) / (1 if name == "none" else 2)
    step = predict(costs, worker=0)
    assert step.updating == pytest.approx(1e-3 + 1e-8 * held), "gathering the new weights is a collective"
    assert step.sent_bytes == max(sent_bytes(costs)) > sent_bytes(costs)[0], "the last stage has a norm, too"
    assert least_seconds(costs) <= step.seconds, "or a search would leave out layouts that are fastest"
    assert predict(replace(costs, optimizer="sgd"), worker=0).updating == pytest.approx(1e-3 + 1e-9 * held)
    assert in_all(step) == pytest.approx(step.seconds)


def test_the_bytes_sent_are_those_of_every_run_and_not_of_some_or_small_ones() -> None:
    axes = {"dp": 1, "cp": 2, "pp": 1, "tp": 1}
    own = RunLayout(axes, 4, 2, "dapple", "none", "none", (MODEL.n_layers,))
    costs = Costs(CLUSTER, replace(MODEL, sizes=replace(SIZES, experts=2)), own)
    formulas = {kind: one.bytes for (kind, _), one in sent_in_step(costs, 0).items()}
    counted = "gradients", "keys and values", "gradients of keys and values"
    assert sent_bytes(costs) == [sum(formulas[kind] for kind in counted)]
    others = {"loss", "loads", "gradient norm", "other routes", "choices of experts"}
    assert formulas.keys() - {*counted} == others, "small, or with a flag that is not part of a layout"
    head = replace(own, axes={"dp": 1, "cp": 2, "pp": 2, "tp": 1}, split=(MODEL.n_layers, 0))
    of_head = {kind for kind, _ in sent_in_step(replace(costs, layout=head), 1)}
    assert not of_head & {"loads", "choices of experts"}, "of the last stage, which has no experts"


def test_a_collective_that_is_not_played_takes_what_was_measured() -> None:
    """Behind a backward pass, and for the loss: what two busy ranks slow each other is in what was measured."""
    reductions = (AllReduce(2, "gloo", (8.0, 1e6), (1.0, 1.0)),)
    machine = cluster(device="cpu", cores_per_host=2, all_reduces=reductions)
    found = [
        predict(Costs(replace(machine, slowdown=slowdown), MODEL, layout(pp=1, dp=2))) for slowdown in ((), (1.0, 1.6))
    ]
    for step in found:
        assert step.averaging == pytest.approx(2.0, rel=1e-3)
        assert in_all(step) == pytest.approx(step.seconds)
    # Inside a pass it is played, and comes to the same.
    sliced = predict(Costs(replace(machine, slowdown=(1.0, 1.6)), MODEL, layout(pp=1, tp=2, micro_batches=1)))
    collectives = 2 * 2 * MODEL.n_layers + 2 + 2  # of blocks, of the embedding and the head, and for the loss
    assert sliced.seconds == pytest.approx(collectives + 1.0, rel=1e-3)


def measured_machine() -> Machine:
    """Two cores; a rank with two threads is slower than with one."""
    passes = PassSeconds((1e-3, 2e-3), (2e-3, 4e-3), (1e-3, 2e-3), (1.2e-3, 2e-3))
    slow = PassSeconds((3e-3, 6e-3), (4e-3, 8e-3), (2e-3, 4e-3), (2e-3, 4e-3))
    kinds = [(1, 1, passes), (1, 2, slow), (2, 1, passes)]
    measured = tuple(Measured(SIZES, tp, threads, (1, 2), one, one, one) for tp, threads, one in kinds)
    reductions = AllReduce(2, "gloo", (8.0, 1e5), (1e-4, 2e-3)), AllReduce(2, "shared", (8.0, 1e5), (1e-4, 1e-3))
    more = {"waking": (Waking(0.0, 1e-4), Waking(1e-3, 2e-4)), "message_seconds": 2e-5, "optimizer_seconds": 1e-8}
    return cluster(
        device="cpu", cores_per_host=2, slowdown=(1.0, 1.3, 2.0), measured=measured, all_reduces=reductions, **more
    )


MACHINES = {
    "slow passes": cluster(multiply_adds_per_second=1e9),
    "two cores": cluster(device="cpu", cores_per_host=2),
    "passes cost": cluster(pass_seconds=1e-5),
    "many hosts": cluster(hosts=8, ranks_per_host=3, between=Link(1e-3, 1e8)),
    "measured": measured_machine(),
    "measured, many hosts": replace(measured_machine(), hosts=8, ranks_per_host=2, between=Link(1e-3, 1e8)),
}


@pytest.mark.parametrize(
    ("machine", "enough"),
    [
        *((machine, plan.MULTIPLY_ADDS_OF_A_THREAD) for machine in MACHINES.values()),
        *((MACHINES[name], 1.0) for name in ("two cores", "measured, many hosts")),
    ],
    ids=[*MACHINES, "two cores, further threads", "measured, further threads"],
)
@pytest.mark.parametrize("name", NAMES)
def test_no_step_is_shorter_than_the_least(
    name: str, machine: Machine, enough: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MULTIPLY_ADDS_OF_A_THREAD", enough)
    ratios, choices = [], itertools.cycle((None, 1, 2) if machine.device == "cpu" else (None,))  # a GPU takes none
    for dp, tp, shard, recompute in itertools.product((1, 2), (1, 2), SHARDS, RECOMPUTE):
        if shard != "none" and dp == 1:
            continue
        own = layout(name, pp=1 if shard == "weights" else 2, dp=dp, tp=tp)
        own = replace(own, recompute=recompute, shard=shard)
        costs = Costs(machine, MODEL, own, next(choices))
        least, step = least_seconds(costs), predict(costs)
        assert 0 < least <= step.seconds * (1 + 1e-9), (own, costs.threads)
        assert in_all(step) == pytest.approx(step.seconds)
        ratios.append(least / step.seconds)
    assert max(ratios) > 0.3, "a bound that is far below every step would leave nothing out"


def test_threads_between_those_that_were_measured_and_beyond() -> None:
    passes = [PassSeconds((seconds,), (seconds,), (seconds,), (seconds,)) for seconds in (8.0, 2.0)]
    none = PassSeconds((0.0,), (0.0,), (0.0,), (0.0,))
    measured = tuple(
        Measured(SIZES, 1, threads, (1,), none, of_block, none)
        for threads, of_block in zip((1, 8), passes, strict=True)
    )
    machine = cluster(device="cpu", measured=measured, pass_seconds=100.0)  # of passes that were not measured
    one = Costs(machine, Model(SIZES, 1), replace(layout(pp=1), split=(1,)))
    seconds = {threads: one.seconds(Forward(0, 0), threads) for threads in (1, 4, 8, 16)}
    assert seconds == {1: 8.0, 4: pytest.approx(2 + 6 * (1 / 4 - 1 / 8) / (7 / 8)), 8: 2.0, 16: 1.0}
    # On eight cores, each of two replicas has four threads; sixteen threads of one rank take turns.
    two = predict(replace(one, layout=replace(one.layout, axes={"dp": 2}, micro_batches=1, batch_size=1)))
    assert two.computing == pytest.approx(2 * seconds[4])
    many = replace(one, layout=replace(one.layout, micro_batches=1, batch_size=1), threads=16)
    assert predict(many).seconds == pytest.approx(2 * seconds[8], rel=1e-6)
