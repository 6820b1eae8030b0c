"""The page of a run: its numbers, also those in its sentences, are those of the records."""

import json
import re
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from support import repairs
from support.page_numbers import STEPS, Expected, in_texts, lines, named, numbers, of_schedule

from distlab.comm.recorder import COMPUTE, REPAIR, SEND, STEP, WAIT, Event
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages
from distlab.reports.trace import RankTrace, Trace, write_chrome
from distlab_figures.runs import timelines
from distlab_page.contents import contents, layout
from distlab_page.ends import detours
from distlab_page.passes import efficiency, time_spent, timeline
from distlab_page.planned import costs_of, memory_of
from distlab_page.records import Records, read
from distlab_page.tables import evenly_spaced
from distlab_page.writing import html, write
from simplellm.errors import InputError

pytest.importorskip("plotly.offline", reason="pages need plotly: pip install plotly")


def test_each_number_of_a_hybrid_is_computed_from_a_record(hybrid: Path, alone: Path, killed: Path) -> None:
    expected, page = Expected(hybrid), contents(read(hybrid))
    for panel in "layout", "timeline", "time", "ledger", "memory":
        ranks = page[panel]["ranks"]
        assert (ranks if panel != "layout" else [rank["name"] for rank in ranks]) == expected.names()
    unsaid = re.compile(r"\.rows|\.ranks|\.names|\.kinds|\.ended\.logs|\.missing|\.facts\.(?!layout)")  # compared below
    said = {place: of for place, of in in_texts(page).items() if not unsaid.search(place)}
    assert said == expected.sentences()
    assert len(html(read(hybrid))) < 2e6
    [facts], own = (one["facts"] for one in page["about"]), expected.config
    assert (facts["command"], facts["data"], facts["backend"]) == (own["command"], own["data_because"], own["backend"])
    assert facts["software"] == f"python {own['machine']['python']}, torch {own['machine']['torch']}"
    machine = facts["machine"].split(", ")
    assert [part for part in machine if "cores" in part] == [f"{own['machine']['cores']} cores"]
    assert own["machine"]["torch"] not in machine
    colors = [kind["color"] for kind in page["timeline"]["kinds"]]
    assert len({*colors}) == len(colors) > 2, "of the passes, and of waits"
    page["timeline"] = named(page["timeline"])
    for panel in ("layout", "timeline", "time"):
        shown = numbers(page.pop(panel))
        assert len(shown) > 50
        # Bars are rounded to thousandths of a millisecond; the computing time has waits within passes subtracted.
        assert shown == pytest.approx(numbers(getattr(expected, panel)()), rel=1e-6, abs=0.0011), panel

    sent, shown = expected.ledger(), page.pop("ledger")
    most = {row[0]: row[3] for row in sorted(shown["table"]["rows"], key=lambda row: row[3])}
    of_kinds = [*dict.fromkeys(row[0] for row in shown["table"]["rows"])]
    assert of_kinds == sorted(most, key=lambda kind: (-most[kind], kind)), "those with the most bytes first"
    rows = {(int(rank), row[0]): tuple(row[2:6]) for row in shown["table"]["rows"] for rank in row[1].split(", ")}
    assert rows.keys() == sent["rows"].keys()
    for key, (messages, size, each, formula) in rows.items():
        assert (messages, size, each) == sent["rows"][key][:3]
        assert formula == (sent["rows"][key][3] and pytest.approx(sent["rows"][key][3], abs=1)), key
        assert formula is None or each == pytest.approx(formula, abs=1), key
    for rank, peer in ((rank, peer) for rank in expected.ranks for peer in expected.ranks):
        pairs = sent["pairs"][rank, peer]
        by_kind = Counter[str]()
        for kind, size, _ in shown["kinds"][rank][peer]:  # in messages and in collectives
            by_kind[kind] += size
        assert by_kind == pytest.approx(pairs)
        assert shown["matrix"][rank][peer] == pytest.approx(sum(pairs.values()))
    assert [row[2:] for row in shown["pairs"]["rows"]] == [one for line in shown["kinds"] for at in line for one in at]
    by_formula = [(size, formula) for *_, size, formula in shown["pairs"]["rows"] if formula is not None]
    assert len(by_formula) > 40
    assert all(size == pytest.approx(formula, rel=0.03) for size, formula in by_formula)

    held, shown = expected.memory(), page.pop("memory")
    assert shown["bars"] == {kind: values for kind, values in held.items() if any(values)}
    for kind, planned in shown["plan"].items():
        assert planned == pytest.approx(held[kind], rel=0.05 if kind == "activations" else 0), kind
    pair = shown["bars"], shown["plan"]
    beside = [[of[kind][rank] for of in pair] for rank in expected.ranks for kind in pair[0]]
    assert [row[2:] for row in shown["table"]["rows"]] == beside

    rows = (shown := page.pop("schedules"))["table"]["rows"]
    assert shown["none"] == [row[0] for row in rows if row[5] < 0.02] != []
    for name, bubble, seconds, kept, bubble_of_6, bubble_in_steps in rows:
        of_own, of_6, in_steps = (of_schedule(name, 3, *one) for one in ((3, 1), (6, 1), (6, 10)))
        assert (bubble, seconds, kept) == pytest.approx(of_own or (None, None, None)), name
        assert of_6
        assert in_steps
        assert (bubble_of_6, bubble_in_steps) == pytest.approx((of_6[0], in_steps[0])), name
    assert {row[0] for row in rows} == {*SCHEDULES} - {AUTO}
    assert [row[5] for row in rows] == sorted(row[5] for row in rows)

    page["curves"] = page["curves"]["runs"][0]
    assert numbers(page.pop("curves")) == pytest.approx(numbers(expected.curves()))
    assert numbers(page) == {".status.steps": STEPS}, "all other numbers are in texts"
    for folder in (alone, killed):
        one, page = Expected(folder), contents(read(folder), read(hybrid))
        assert numbers(page["layout"]) == numbers(one.layout())
        assert numbers(page["curves"]["runs"][0]) == pytest.approx(numbers(one.curves()))
        assert page["curves"]["runs"][1] == contents(read(hybrid))["curves"]["runs"][0]


def test_a_run_that_ended_early_says_so_and_why(killed: Path) -> None:
    page = contents(read(killed))
    steps = lines(killed)[-1]["step"] + 1
    assert page["status"]["state"] == "ended early"
    assert page["status"]["text"].startswith(f"The run ended early, after {steps:,} of 100,000 steps. ")
    assert any("rank 1" in cause for cause in page["ended"]["causes"]), page["ended"]
    assert [rank["died"] for rank in page["layout"]["ranks"]] == [False, True, False]
    assert [row[-1] for row in page["layout"]["table"]["rows"]] == ["", "died", ""]
    early = contents(replace(read(killed), metrics=[]))["missing"]
    assert early["ledger"] == "The run ended before it recorded a step."
    assert early["timeline"] == "The run has no trace: it needs --trace."
    assert early["memory"] == "The run ended before its ranks reported this."
    begun = contents(replace(read(killed), metrics=[], is_running=True))["missing"]
    assert begun["ledger"] == "The run has not recorded a step yet."
    assert begun["memory"] == "The ranks report this at the end of the run."
    sums = [
        sum(record[name] for record in lines(killed)) for name in ("seconds", "waited_seconds", "collective_seconds")
    ]
    assert page["time"]["rows"] == [pytest.approx((sums[0] - sums[1], sums[1] - sums[2], sums[2]))]
    waits = ["who waits for whom:", "  rank 0  waits for the gradients  -> rank 1", "  rank 1  has published no wait"]
    long = ["    it was killed", *map(str, range(300))]
    logs = {"rank 0": ["rank 0 waited 10 s", *waits[:2], "next"], "rank 1": long, "rank 2": waits, "rank 3": waits[:2]}
    page = contents(replace(read(killed), logs=logs))
    assert page["ended"]["waits"] == waits
    assert page["ended"]["causes"] == ["rank 0 waited 10 s"]
    assert page["ended"]["logs"][1] == ["rank 1", *long[-200:]]


def test_a_repaired_run_shows_detours_and_an_unfinished_one_formulas(hybrid: Path) -> None:
    run = read(hybrid)
    said = ["rank 4 (stage 1 of replica 1) has exited: ranks 0, 1, 2, 3 and 5 go on with step 7, 0.1 s after that"]
    settings = run.settings | {"repair": "exact"}
    repaired = replace(run, config=run.config | {"settings": settings}, logs={"rank 0": said, "rank 1": said})
    assert repaired.dead == {4}
    early = contents(replace(repaired, metrics=run.metrics[:9], trace=None, memory=[]))["missing"]
    assert early["timeline"] == early["memory"] == "The run ended before its ranks reported this."
    assert replace(run, logs={"rank 0": ["rank 2 was terminated by SIGKILL, and no rank is left"]}).dead == {2}
    later = [*said, "ranks 0, 1, 2, 3, 4 and 5 go on with step 9, 0.1 s after that"]
    logs = {"rank 0": later[1:], "rank 1": later}
    assert replace(repaired, logs=logs).dead == set(), "spares have taken the places of rank 4, and of rank 0 before"
    later = [*said, "ranks 0, 1, 2, 3 and 4 go on with step 9, 0.1 s after that"]
    twice = replace(repaired, logs={"rank 0": later}, memory=run.memory[:5], trace=None)
    assert twice.alive == (0, 1, 2, 3, 4), "of the last repair"
    [row] = contents(repaired)["ended"]["detours"]["rows"]
    assert row == [7, "rank 4 (stage 1 of replica 1)", "0, 1, 2", "rank 1 (stage 1 of replica 0)"]
    said = [
        "rank 2 was terminated by SIGKILL: ranks 0, 1, 4, 5, 6, 7, 8, 9, 10 and 11 go on with step 7, 0.1 s after that"
    ]
    config = repaired.config | {"layout": {"dp": 2, "pp": 3, "tp": 2}}
    found = detours(replace(repaired, config=config, logs={"rank 0": said}, trace=None, ledger=[]))
    assert found is not None
    pairs = [(dead[:6], numbers, other[:6]) for _, dead, numbers, other in found["rows"]]
    assert pairs == [("rank 2", "0, 1, 2", "rank 8"), ("rank 3", "0, 1, 2", "rank 9")]
    for repair, hosts in ("exact", ["rank 3"]), ("approx", ["rank 3", "rank 5"]):  # of what rank 1 would have done
        config = run.config | {"settings": settings | {"repair": repair}, "layout": {"dp": 3, "pp": 2}}
        said = ["rank 1 was terminated by SIGKILL: ranks 0, 2, 3, 4 and 5 go on with step 7, 0.1 s after that"]
        found = detours(replace(run, config=config, logs={"rank 0": said}, trace=None, ledger=[]))
        assert found is not None
        assert sorted(row[3][:6] for row in found["rows"]) == hosts
        config["layout"] = {"dp": 6}
        assert detours(replace(run, config=config, logs={"rank 0": said}, trace=None, ledger=[])) is None, (
            "no pipelines"
        )
    resumed = replace(run, ledger=[], metrics=run.metrics[5:])
    rows = contents(resumed)["ledger"]["table"]["rows"]
    assert {kind: each for kind, _, each, *_ in rows if kind in ("activations", "gradients", "loss")} == {
        kind: pytest.approx(formula, abs=1) for kind, _, _, formula, words in rows if formula and words
    }


def test_a_run_repaired_in_its_last_step_shows_the_records_of_the_ranks_that_are_left(tmp_path: Path) -> None:
    flags = (
        f"--n-layers 4 --steps {repairs.STEPS} --optimizer sgd --lr 0.5 --dp 2 --pp 3 --batch-size 3 --trace".split()
    )
    repairs.run_with([(4, repairs.STEPS - 1, 9, "SIGKILL")], tmp_path, "hybrid/intro_hybrid_repair.py", *flags)
    repaired = Event(REPAIR, "rank 4 has exited", 1.0, 2.0)
    ranks = [RankTrace([Event(STEP, "step 5", 0.0, 1.0), repaired])] * 5
    write_chrome(Trace(ranks, {"dp": 2, "pp": 3}, alive=(0, 1, 2, 3, 5)), tmp_path / "trace.json")  # no step after that
    page, held = contents(read(tmp_path, has_ended=True)), json.loads((tmp_path / "memory.json").read_text())
    assert page["status"]["text"] == f"The run is complete: {repairs.STEPS} of {repairs.STEPS} steps, 1 repair."
    assert [name.partition(" (")[0] for name in page["memory"]["ranks"]] == [f"rank {rank}" for rank in (0, 1, 2, 3, 5)]
    for kind, values in page["memory"]["bars"].items():
        assert values == [rank[kind] for rank in held]
    assert page["memory"]["plan"] is None, "it is that of the whole layout"
    assert not page["ledger"]["has_formulas"]
    assert page["ledger"]["table"]["caption"] == "Bytes that rank 0 sent (after a repair, no other rank reports)"
    assert (page["timeline"], page["missing"]["timeline"][:42]) == (None, "No step came after the last repair, so the")
    assert write(tmp_path) == tmp_path / "page.html"
    with pytest.raises(InputError, match=r"trace.json: no step came after the last repair"):
        timelines(tmp_path / "timeline.png", [str(tmp_path)])


def test_predictions_experts_and_rings_are_shown_where_a_run_has_them(hybrid: Path, further: Records) -> None:
    page = contents(read(hybrid))
    assert (page["prediction"], page["experts"], page["ring"]) == (None, None, None)
    page, counted = contents(further), further.metrics[3:]  # as in the comparison that the run prints
    means = [statistics.fmean(r[name] for r in counted) for name in ("seconds", "waited_seconds", "collective_seconds")]
    measured = (means[0], means[0] - means[1], means[2], means[1] - means[2])
    predicted = further.config["predicted_seconds"].items()
    assert page["prediction"]["parts"] == [
        (what, planned, pytest.approx(taken)) for (what, planned), taken in zip(predicted, measured, strict=True)
    ]
    assert [row[3] for row in page["prediction"]["table"]["rows"]] == [
        pytest.approx(planned - taken) for _, planned, taken in page["prediction"]["parts"]
    ]
    early = contents(replace(further, metrics=further.metrics[:2]))["prediction"]
    assert early["table"]["caption"].endswith("mean of 2 steps"), "there are no later ones"
    assert (page["experts"]["steps"], page["experts"]["loads"][9]) == ([*range(1, STEPS + 1)], 1 + 9 / 64)
    assert page["ring"]["rows"] == [[0.25, 0.25], [0.125, 0.0]]
    sends = [Event(STEP, "step 0", 0.0, 4.0), Event(COMPUTE, "pass", 0.0, 2.0)]
    sends += [Event(SEND, "a message", 1.0, 1.5), Event(WAIT, "its receiver", 1.25, 1.5)]  # within the pass
    spent = time_spent(replace(further, trace=Trace([RankTrace(sends)], {"dp": 1})))
    assert spent is not None
    assert spent["rows"] == [(1.5, 0.25, 0.25, 2.0)]
    kinds = timeline(Trace([RankTrace(sends)], {"dp": 1}))["kinds"]
    assert [kind["key"] for kind in kinds] == ["compute", "wait"], "a wait is no pass, whatever its name begins with"
    assert "the last step" in spent["table"]["caption"], "there is no other"
    steps = [Event(STEP, f"step {n}", n, n + 1.0) for n in range(3)]
    ranks = [RankTrace([*steps, Event(WAIT, "gradients", n + 0.25, n + 0.75)]) for n in (1, 2)]  # each in another step
    factors = efficiency(Trace(ranks, {"dp": 2}))
    assert factors is not None
    assert [share for _, share, _ in factors["rows"]] == [1, 0.75, 1, 0.75], "one computes all the time"


def test_a_timeline_of_many_bars_shows_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab_page.passes.MOST_BARS", 7)
    lengths = dict(enumerate(range(1, 11))) | {9: 3}
    rank = RankTrace([Event(STEP, f"step {n}", 20 * n, 20.0 * n + length) for n, length in lengths.items()])
    page = timeline(Trace([rank, rank], {"dp": 2}))
    assert (page["typical"], page["slowest"]) == (2, 1), "of those that are shown, with 2, 6 and 3 s"
    assert ([step["label"] for step in page["steps"]], page["of_steps"]) == (["step 1", "step 5", "step 9"], 9)
    monkeypatch.setattr("distlab_page.passes.MOST_STEPS", 4)
    rank = RankTrace([*rank.events, Event(WAIT, "gradients", 181.5, 183.0)])  # for half of the last step
    factors = efficiency(Trace([rank, rank], {"dp": 2}))
    assert factors is not None
    assert factors["rows"][-1][1] == pytest.approx((2 + 1.5) / (2 + 3)), "of the first and the last step"


def test_a_wait_within_a_pass_is_no_time_of_free_messages() -> None:
    """The second stage waits for one of the two seconds of its forward pass, as for a rank that shares its layers."""
    step, wait = Event(STEP, "step 1", 0.0, 5.0), Event(WAIT, "a sum", 1.5, 2.5)
    passes = [[("F0", 0.0, 1.0), ("B0", 4.0, 5.0)], [("F0", 1.0, 3.0), ("B0", 3.0, 4.0)]]
    ranks = [RankTrace([step, *(Event(COMPUTE, *one) for one in own)]) for own in passes]
    ranks[1].events.append(wait)
    programs = all_stages("gpipe", 2, micro_batches=1)
    rows = timeline(Trace([ranks[0], ranks[0], ranks[1], ranks[1]], {"pp": 2, "dp": 2}, programs))["table"]["rows"]
    assert [row[3] for row in rows] == pytest.approx([0.6, 0.6, 0.4, 0.4]), "the bubbles of neighboring replicas"
    factors = efficiency(Trace(ranks, {"pp": 2}, programs))
    assert factors is not None
    assert [share for _, share, _ in factors["rows"]] == [2 / 2, 2 / 4, 4 / 5, 2 / 5]
    assert efficiency(Trace([RankTrace([step, Event(WAIT, "a sum", 0.0, 5.0)])], {"dp": 1})) is None, (
        "it computed nothing"
    )


def test_a_run_with_a_schedule_of_the_users_own_has_a_page(hybrid: Path) -> None:
    run = read(hybrid)
    own = replace(run, config=run.config | {"settings": run.settings | {"schedule": "my/order.py"}})
    assert contents(own)["layout"]["ranks"] == contents(run)["layout"]["ranks"], "by the trace"
    assert [rank["stages"] for rank in contents(replace(own, trace=None))["layout"]["ranks"]] == [[0], [1], [2]] * 2
    assert run.trace is not None
    recorded = replace(own, trace=replace(run.trace, programs=all_stages("interleaved", 3, 3)))
    assert [rank["stages"] for rank in layout(recorded)["ranks"]] == [[0, 3], [1, 4], [2, 5]] * 2
    with_experts = replace(run, config=run.config | {"layout": {"dp": 2, "ep": 2, "pp": 3}}, trace=None, ledger=[])
    assert layout(with_experts)["rows"] == 1 + max(rank["row"] for rank in layout(with_experts)["ranks"]) == 4


def test_a_run_with_an_optimizer_of_the_users_own_has_a_page_without_a_plan_of_its_memory(hybrid: Path) -> None:
    run = read(hybrid)
    page = contents(replace(run, config=run.config | {"settings": run.settings | {"optimizer": "lion"}}))
    assert page["memory"] == contents(run)["memory"] | {"plan": None, "table": page["memory"]["table"]}
    assert page["ledger"] == contents(run)["ledger"], "which has formulas"


def test_a_worker_holds_as_many_stages_as_the_run_gives_it(hybrid: Path) -> None:
    run, rows = read(hybrid), list[tuple[float, ...]]()
    for chunks in (2, 3):
        own = {"schedule": "interleaved", "chunks_per_stage": chunks}
        config = run.config | {"settings": run.settings | own, "layers_per_stage": [*range(3 * chunks)]}
        page = contents(replace(run, config=config, trace=None))
        stages = [range(worker, 3 * chunks, 3) for worker in range(3)]
        held = [(rank["stages"], rank["layers"]) for rank in page["layout"]["ranks"]]
        assert held == [([*some], sum(some)) for some in stages] * 2
        rows += [row for row in page["schedules"]["table"]["rows"] if row[0] == "interleaved"]
    assert rows[1][4] < rows[0][4], "with more stages, the bubble is shorter"


def test_slices_and_parts_stand_side_by_side_in_the_place_of_a_stage(alone: Path) -> None:
    run = read(alone)
    page = contents(replace(run, config=run.config | {"layout": {"dp": 1, "cp": 2, "tp": 3}}, ledger=[]))
    assert ([rank["inner"] for rank in page["layout"]["ranks"]], page["layout"]["inner"]) == ([*range(6)], 6)
    assert page["title"] == f"{run.name}: 2 cp x 3 tp"
    assert contents(run)["missing"]["ledger"] == "One process sends nothing."
    without = {name: value for name, value in run.settings.items() if name != "steps"}  # as of a run with --niters
    page_without = contents(replace(run, config=run.config | {"settings": without}))
    assert page_without["status"]["text"] == f"The run is complete: {STEPS} steps."
    assert ["betas", ", ".join(map(str, run.settings["betas"]))] in [
        list(row) for row in page["about"][0]["table"]["rows"]
    ]


def test_records_of_some_ranks_are_shown_as_theirs(hybrid: Path, alone: Path, tmp_path: Path) -> None:
    run = read(hybrid)
    assert contents(replace(run, memory=[], ledger=[]))["missing"]["memory"] == "The run did not count its memory."
    page = contents(replace(run, memory=run.memory[:4]))
    assert page["memory"] is None
    assert page["missing"]["memory"] == "The counts of 4 ranks are recorded, but not which ranks these are."
    for recompute, is_planned in (("blocks", True), ("except-attention", False)):  # not as whole blocks
        settings = run.settings | {"compile": True, "recompute": recompute}
        page = contents(replace(run, config=run.config | {"settings": settings}))
        assert (page["memory"]["plan"] is not None) == is_planned, recompute
    weights, costs = run.memory[0]["parameters"], costs_of(run)
    assert costs is not None
    on_gpus = costs_of(replace(run, config=run.config | {"machine": {"gpu": "H200"}}))
    assert (costs.machine.device, on_gpus and on_gpus.machine.device) == ("cpu", "cuda")
    outer = {"outer": "diloco", "sync_every": 2, "outer_lr": 0.7, "fragments": 2}
    for compress, times in (("none", 2.5), ("int8", 3.5)):  # outer weights, momentum, a fragment; what one lacked
        config = run.config | {"settings": run.settings | outer | {"compress": compress}}
        plan = memory_of(replace(run, config=config), costs, 0)
        assert plan["optimizer state"] == pytest.approx(times * weights, abs=4), compress
    one = read(alone)
    sharded = one.config | {"settings": one.settings | {"compile": True, "shard": "weights"}}
    assert contents(replace(one, config=sharded))["memory"]["plan"] is not None, "layer by layer"
    first = run.memory[0] | {"activations": 0}
    assert contents(replace(run, memory=[first, *run.memory[1:]]))["memory"]["bars"]["activations"][0] == 0
    before = "rank 5 has exited: ranks 0, 1, 2, 3 and 4 go on with step 3, 0.1 s after that"
    said = {"rank 1": [before, "rank 0 has exited: ranks 1, 2, 3 and 4 go on with step 7, 0.1 s after that"]}
    left = replace(run, logs=said, trace=None, ledger=[])
    caption = contents(left)["time"]["table"]["caption"]
    assert "rank 0 and, after it died, the first rank that was left (after a repair" in caption
    (tmp_path / "config.json").write_text((hybrid / "config.json").read_text())
    (tmp_path / "metrics.jsonl").write_text((hybrid / "metrics.jsonl").read_text() + '{"step": 20, "lo')
    (tmp_path / "rank0.log").write_bytes(b"# began \xff\n#   with\n0 8.3\n")
    assert read(tmp_path).steps == STEPS, "a rank is writing the last line"
    assert read(tmp_path).logs["rank 0"] == ["began \ufffd", "  with"]


def test_the_curves_of_a_long_run_keep_all_validation_losses(alone: Path) -> None:
    record = lines(alone)[0]
    own = {"loss": 2.5, "seconds": record["seconds"], "reviews_per_second": 1.0}  # as of a classifier, without waits
    steps = [own | {"step": n, "reviews": 2 * n, "max_over_mean_load": 1 + n} for n in range(9700)]
    for validated in steps[96::97]:
        validated["validation_loss"] = 1.0
    page = contents(replace(read(alone), metrics=steps, ledger=[]))
    [curve] = page["curves"]["runs"]
    assert (len(page["experts"]["steps"]), page["experts"]["loads"][-1]) == (4000, 9700)
    assert (curve["at"]["reviews"][-1], page["time"]) == (2 * 9699, None)
    assert curve["values"]["validation_loss"].count(1.0) == 100
    assert 4000 <= len(curve["at"]["steps"]) < 4100
    assert curve["at"]["seconds"][-1] == pytest.approx(9700 * record["seconds"]), "of all steps"
    assert curve["caption"] == f"{len(curve['at']['steps']):,} of 9,700 steps"
    assert read(alone).state == replace(read(alone), metrics=lines(alone)[5:]).state == "complete", "if it is resumed"
    assert [evenly_spaced(range(9), most) for most in (1, 3, 9)] == [[4], [0, 4, 8], [*range(9)]], "first and last"
