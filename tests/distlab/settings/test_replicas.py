"""The settings of replicas: what of them is in a checkpoint, and what is said of steps that are left over."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distlab.settings.common import parse
from distlab.settings.hybrid import HybridRepairSettings, HybridSettings
from distlab.settings.replicas import BucketSettings, DiLoCoSettings, RepairSettings, WeightAverageSettings
from distlab.settings.stages import PipelineSettings
from distlab.settings.training import TrainSettings
from simplellm.errors import InputError

pytestmark = pytest.mark.quick
DEATH = r"up to ([\d.]+) times as long .* up to (\d+) micro-batches instead of (\d+)"


def test_each_rank_has_moments_of_its_own_where_several_replicas_train_independently() -> None:
    cases: list[tuple[Any, int, bool]]  # "lion" is of a script of the user's own
    cases = [("adam", 2, True), ("sgd", 2, False), ("adamw", 1, False), ("lion", 2, True)]
    for optimizer, ranks, expected in cases:
        assert DiLoCoSettings(optimizer=optimizer, world_size=ranks).per_rank_optimizer_state == expected
        assert HybridSettings(optimizer=optimizer, dp=ranks, outer="diloco").per_rank_optimizer_state == expected
    assert not HybridSettings(optimizer="adam", dp=2).per_rank_optimizer_state


def test_moments_that_stay_with_a_rank_and_the_layers_of_stages_are_told() -> None:
    decided = {"data_because": "the generator", "layers_per_stage": (1, 2, 0)}
    kinds: list[tuple[Any, dict[str, str]]]
    kinds = [(WeightAverageSettings, {}), (DiLoCoSettings, {}), (HybridSettings, {"outer": "diloco"})]
    for kind, options in kinds:
        for optimizer, told in (("adam", ["adam's moments"]), ("lion", ["lion's moments"]), ("sgd", [])):
            remarks = kind(optimizer=optimizer, **options).remarks(decided)
            assert re.findall(r"each rank keeps (.*?'s moments)", " ".join(remarks)) == told
    assert PipelineSettings().remarks(decided) == ["stories from the generator", "layers of each stage: 1, 2, 0"]


def test_steps_after_the_last_exchange_are_told() -> None:
    settings = DiLoCoSettings(sync_every=10)
    assert settings.remarks_on_exchanges(30, "sgd") == []
    [late] = settings.remarks_on_exchanges(25, "sgd")
    assert "the last 5 steps learn; --steps 20 avoids it" in late


def test_only_generated_stories_depend_on_the_seed() -> None:
    assert TrainSettings(data="tinystories", seed=7).data_identity == {"source": "tinystories"}
    assert TrainSettings(data="sample", seed=7).data_identity == {"source": "sample", "seed": 7}
    decided = TrainSettings(data="auto", seed=7).decide()
    assert decided["data_identity"] == TrainSettings(data=decided["data"], seed=7).data_identity
    assert TrainSettings(data="sample").decide()["data_because"] == "the generator (--data sample)"


def test_a_folder_of_stories_is_known_by_its_files_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    for name in ("a", "b", "more/c"):
        (tmp_path / name).write_text(f"a story of {name}")
    before = TrainSettings(data=str(tmp_path)).data_identity
    (tmp_path / "a").rename(tmp_path / "A")
    after = TrainSettings(data=str(tmp_path)).data_identity
    assert after != before
    (tmp_path / "more/c").write_text("a story of more/d")
    assert TrainSettings(data=str(tmp_path)).data_identity != after


def test_what_needs_the_cpu_or_gloo_has_it_whatever_the_machine_has() -> None:
    assert parse(RepairSettings(data="sample"), "", []).device == "cpu"
    by_hand = parse(BucketSettings(data="sample"), "", ["--all-reduce", "ring"])
    assert (by_hand.backend, by_hand.transport) == ("gloo", "gloo")


def test_what_a_death_would_cost_is_told_where_it_can_be_repaired() -> None:
    settings = parse(HybridRepairSettings(data="sample"), "", [])
    told = re.search(DEATH, " ".join(settings.remarks(settings.decide())))
    assert told
    factor, most, usual = map(float, told.groups())
    after = [settings.slowdown({*range(settings.dp * settings.pp)} - {dead}, cores=64) for dead in range(settings.pp)]
    assert factor == pytest.approx(max(after), abs=0.005)
    assert factor > 1
    assert most / usual == settings.growth() > 1
    assert RepairSettings().growth() == 1
    settings = replace(settings, repair="off")
    assert not re.search(DEATH, " ".join(settings.remarks(settings.decide())))


def test_the_memory_that_a_machine_lacks_after_a_death_is_told_in_gb() -> None:
    """All ranks' together: a machine with a little more than that is not refused."""
    settings = RepairSettings(repair="on", dmodel=8192, num_heads=64, n_layers=64)
    sentence = r"^--repair on: all ranks together would hold (.*) GB after a death, and this machine has 100\.0 GB;"
    with pytest.raises(InputError, match=sentence) as caught:
        settings.check_memory(100e9)
    needed = float(re.findall(sentence, str(caught.value))[0].replace(",", "")) * 1e9
    lion: Any = "lion"  # of a script of the user's own: it counts like Adam
    for own in (settings, replace(settings, optimizer=lion)):
        own.check_memory(1.01 * needed)
        with pytest.raises(InputError, match=r"^--repair on: "):
            own.check_memory(0.99 * needed)


def test_the_work_of_a_pass_is_that_of_the_positions_that_a_rank_has_with_its_heads_and_networks() -> None:
    flags = ["--batch-size 1 --micro-batches 1", "--batch-size 6 --micro-batches 3", "--cp 2 --batch-size 3"]
    flags += ["--experts 4 --shared-expert", f"--hidden-dim {3 * 4 * 288}", "--num-kv-heads 2"]
    one, two, half, experts, wide, grouped = (
        parse(HybridSettings(data="sample"), "", each.split()).pass_costs(100).layer_multiply_adds for each in flags
    )
    assert (two, half, experts) == (2 * one, one / 2, wide)
    assert grouped < one


def test_the_slices_of_a_stage_share_the_cores_in_the_plan_of_a_death() -> None:
    whole, slices = (parse(HybridRepairSettings(data="sample"), "", ["--tp", tp]) for tp in "12")
    expected = whole.slowdown(range(1, 6), cores=3)
    assert expected > 1
    assert slices.slowdown(range(2, 12), cores=6) == pytest.approx(expected)
    assert slices.detour_options()["cores"] == whole.detour_options()["cores"] / 2, "of this machine, by default"
