"""The verdict on two runs: by their settings, their batches and their losses."""

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.page_numbers import STEPS, lines

from distlab_page.contents import contents
from distlab_page.records import read
from distlab_page.verdict import verdict

pytest.importorskip("plotly.offline", reason="pages need plotly: pip install plotly")


def test_a_run_is_the_same_as_one_process_or_says_what_differs(hybrid: Path, alone: Path, killed: Path) -> None:
    page = contents(read(hybrid), read(alone))["verdict"]
    most = max(abs(a["loss"] - b["loss"]) for a, b in zip(lines(hybrid), lines(alone), strict=True))
    assert page["is_same"]
    assert page["text"] == f"The same run as one process: losses differ by at most {most:.2g} over {STEPS} steps."
    other, named = read(hybrid), f"{hybrid.name} (2 dp x 3 pp)"
    text = f"losses differ by at most {most:.2g} over {STEPS} steps."
    assert verdict(read(alone), other)["text"] == f"The same run as {named}: {text}"
    early = verdict(read(alone), replace(other, metrics=other.metrics[:12]))["text"]
    assert early.endswith(f" over the first 12 of {STEPS} steps ({hybrid.name} ended early).")
    for factor, dtype, is_same, text in (
        (1 + 5e-6, "float32", True, "The same run as one process: "),
        (1 + 1e-4, "float32", False, "Close to one process, but not the same run: "),
        (1 + 1e-2, "float32", False, "Not the same losses as one process: "),
        (1 + 1e-3, "bfloat16", True, "The same run as one process: "),
        (1 + 1e-2, "bfloat16", False, "Close to one process, but not the same run: "),
    ):
        config = {**read(alone).config, "settings": {**read(alone).settings, "dtype": dtype}}
        right = replace(read(alone), config=config)
        metrics = [*right.metrics[:-1], right.metrics[-1] | {"loss": right.metrics[-1]["loss"] * factor}]
        page = contents(replace(right, metrics=metrics), right)["verdict"]
        assert (page["is_same"], page["text"][: len(text)]) == (is_same, text)
        assert ("launch.sh compare" in page["text"]) == text.startswith("Close")
        most = abs(metrics[-1]["loss"] - right.metrics[-1]["loss"])
        for pair in ((right, replace(right, metrics=metrics)), (replace(right, metrics=metrics), right)):
            assert f"losses differ by at most {most:.2g} over" in verdict(*pair)["text"]
    page = contents(read(killed), read(alone))["verdict"]
    assert page["is_same"] is None
    assert "tokens in a step 48 and 96" in page["text"]
    edited = replace(read(killed), metrics=[record | {"tokens": None} for record in read(killed).metrics])
    assert "tokens in a step" not in verdict(edited, read(alone))["text"], "it is not known"
    one = read(hybrid)
    unused = replace(one, config=one.config | {"settings": one.settings | {"sync_every": 4, "outer": "none"}})
    assert contents(unused, read(alone))["verdict"] == contents(one, read(alone))["verdict"]
    for changed, differs in (
        ({"residual": "bfloat16"}, "residual bfloat16 and float32"),
        ({"sync_every": 4, "outer": "diloco"}, "sync_every 4 and None"),
        ({"data": "hub"}, "data hub and sample"),
    ):
        config = one.config | {"settings": one.settings | changed, "data": changed.get("data", "sample")}
        page = contents(replace(one, config=config), read(alone))["verdict"]
        assert page["text"] == f"Not the same training run as one process: {differs}."
    streaming = {"outer": "diloco", "sync_every": 4, "outer_lr": 0.7, "overlap_steps": 1, "merge_alpha": 0.5}
    outer = {"outer_lr": 0.5, "fragments": 2, "overlap_steps": 1, "merge_alpha": 0.0}
    top, low = {"compress": "topk", "topk_share": 0.1}, {"compress": "powersgd"}
    trials: list[tuple[dict[str, Any], dict[str, Any], bool | None]] = [
        (streaming, {"outer_lr": 0.5}, None),
        (streaming, {"outer_momentum": 0.8}, None),
        (streaming, {"fragments": 2}, None),
        (streaming, {"fragments": 1}, True),
        (streaming, {"overlap_steps": 0}, None),
        (streaming, {"merge_alpha": 0.0}, None),
        (streaming | {"overlap_steps": 0}, {"merge_alpha": 0.0}, True),
        ({"outer": "none"}, outer, True),
        ({"sync_every": 4}, {"outer": "diloco"}, True),  # a script that always takes outer steps
        (low, {"powersgd_rank": 2}, None),
        (top, {"topk_share": 0.2}, None),
        (top, {"powersgd_rank": 2}, True),
    ]
    for given, other_values, same in trials:
        ours, theirs = (
            replace(one, config=one.config | {"settings": one.settings | given | more}) for more in ({}, other_values)
        )
        assert verdict(ours, theirs)["is_same"] is same, (given, other_values)
    recipe = "seed lr optimizer betas weight_decay warmup_steps lr_schedule min_lr clip_norm dtype document_mask"
    mixture = "experts experts_per_token shared_expert router_scores qk_norm capacity balance_rate"
    for name in f"{recipe} {mixture} dmodel num_heads num_kv_heads hidden_dim n_layers seq_len tokenizer".split():
        theirs = replace(one, config=one.config | {"settings": one.settings | {name: "another"}})
        assert f": {name} " in verdict(one, theirs)["text"]
    resumed = verdict(replace(one, metrics=one.metrics[5:]), one)
    assert resumed["is_same"], resumed["text"]
    assert resumed["text"].endswith("equal losses over 15 of 20 steps.")
    dmodel, num_heads = one.settings["dmodel"], one.settings["num_heads"]
    sizes = {"hidden_dim": 4 * dmodel, "num_kv_heads": num_heads}  # from its checkpoint, instead of the defaults
    assert one.settings | sizes != one.settings
    assert verdict(replace(one, config=one.config | {"settings": one.settings | sizes}), one)["is_same"]


def test_a_verdict_says_which_losses_are_missing_and_how_many_steps_count(alone: Path) -> None:
    run = read(alone)

    def compared(left: Collection[int], right: Collection[int], every: int = 1, steps: int = STEPS) -> tuple[bool, str]:
        """Compare the run with itself, with losses lost in some steps; one has ended early, or reports some losses."""
        one, other = (
            [r | ({"loss": None} if r["step"] in lost else {}) for r in run.metrics] for lost in (left, right)
        )
        settings = run.settings | {"report_every": every}
        seldom = replace(run, config=run.config | {"settings": settings}, metrics=one)
        page = contents(seldom, replace(run, metrics=other[:steps]))["verdict"]
        return page["is_same"], page["text"].partition("one process: ")[2]

    some = [12, 13, 14]
    assert compared([12], []) == (False, "equal losses over 19 of 20 steps; in step 12, the run has no finite loss.")
    neither = "equal losses over 17 of 20 steps; in step 12 and 2 more, neither has a finite loss."
    assert compared(some, some) == (True, neither)
    one = (
        "equal losses over 17 of 20 steps; in step 12 and 1 more, one process has no finite loss; in step 14, neither "
    )
    assert compared([14], some) == (False, f"{one}has a finite loss.")
    assert compared(range(STEPS), []) == (False, "in step 0 and 19 more, the run has no finite loss.")
    early = "equal losses over the first 12 of 20 steps (one process ended early)."
    assert compared([], [], steps=12) == (True, early)
    longer = replace(run, config=run.config | {"settings": run.settings | {"steps": 2 * STEPS}})
    text = contents(run, longer)["verdict"]["text"]
    assert text.endswith("equal losses over the first 20 of 40 steps (one process ended early).")
    seldom = [step for step in range(STEPS) if (step + 1) % 5]
    assert compared(seldom, [], every=5) == (True, "equal losses over 4 of 20 steps.")
    nothing = contents(run, replace(run, metrics=[]))["verdict"]
    assert nothing["is_same"] is None
    assert nothing["text"] == "Nothing to compare with one process: the runs share no step."
    lost = [record | {"loss": math.nan} for record in run.metrics]
    found = contents(replace(run, metrics=lost), run)["verdict"]
    assert (found["is_same"], "in step 0 and 19 more, the run has no finite loss" in found["text"]) == (False, True)
