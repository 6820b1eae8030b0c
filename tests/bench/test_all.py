"""python bench: compares with the page's tables, and writes them. And the tables that the programs print."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.processes import LAB

from simplellm.errors import InputError

pytestmark = pytest.mark.quick

PAGE = """# Measurements

```sh
python bench/steps.py --rounds 9
```

| ranks | variant | ms a step (median) | time over torch (median) | quartiles |
|---|---|---|---|---|
| 2 | torch | 250 | 1.000 | 1.000 to 1.000 |
| 2 | ours | 245 | 0.974 | 0.959 to 1.001 |

Some words.

| words | step, ms | speed of ours to this one: median (quartiles) |
|---|---:|---:|
| ours | 734 | |
| another | 775 | 1.06 (1.03 to 1.08) |

## Another

```sh
python bench/other.py
python bench/steps.py
```

| ranks | variant | ms a step (median) | time over torch (median) | quartiles |
|---|---|---|---|---|
| 3 | torch | 250 | 1.000 | 1.000 to 1.000 |

## By hand

```sh
git worktree add ../before 3eebf85
python bench/steps.py
```

| ranks | times as fast (median) |
|---|---|
| 2 | 2.0 |
"""
OTHER = """
print("| ranks | variant | ms a step (median) | time over torch (median) | quartiles |")
print("|---|---|---|---|---|")
print("| 9 | torch | 1 | 1.000 | 1.000 to 1.000 |")
"""
PROGRAM = """
print("# about to measure")
print("| ranks | variant | ms a step (median) | time over torch (median) | quartiles |")
print("|---|---|---|---|---|")
print("| 2 | ours | 145 | {ratio} | {low} to {high} |")
print()
print("| words | step, ms | speed of ours to this one: median (quartiles) |")
print("|---|---:|---:|")
print("| another | 700 | 1.07 (1.00 to 1.10) |")
"""


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_all", LAB / "bench" / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where the annotations of its dataclasses are looked up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load()
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "README.md").write_text(PAGE)
    monkeypatch.setattr(module, "LAB", tmp_path)
    monkeypatch.setattr(module, "PAGE", tmp_path / "bench" / "README.md")
    monkeypatch.setattr(module, "QUICK", {"steps": "--rounds 2"})
    return module


def measured(bench: ModuleType, ratio: float, low: float, high: float) -> None:
    (bench.LAB / "bench" / "steps.py").write_text(PROGRAM.format(ratio=ratio, low=low, high=high))


def test_a_ratio_within_the_noise(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    measured(bench, 1.02, 0.97, 1.05)
    bench.main(bench.Request())
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "# python bench/steps.py --rounds 9 --rounds 2"
    assert printed[3:] == [
        "| steps | 2, ours, time over torch (median) | 0.974 (0.959 to 1) | 1.02 (0.97 to 1.05) |  |",
        "| steps | another, speed of ours to this one: median (quartiles) | 1.06 (1.03 to 1.08) | 1.07 (1 to 1.1) |  |",
        "# 0 of 2 ratios moved by more than noise",
    ]


def test_a_ratio_that_has_moved(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    measured(bench, 1.2, 1.15, 1.25)
    with pytest.raises(SystemExit, match="1"):
        bench.main(bench.Request(names=("steps",)))
    printed = capsys.readouterr().out
    assert "| 0.974 (0.959 to 1) | 1.2 (1.15 to 1.25) | moved |" in printed
    assert "# 1 of 2 ratios moved by more than noise" in printed


def test_the_tables_of_the_page_are_written_by_the_program(bench: ModuleType) -> None:
    measured(bench, 0.9, 0.85, 0.95)
    bench.main(bench.Request(names=("steps",), write=True))
    page = bench.PAGE.read_text()
    assert "| 2 | ours | 145 | 0.9 | 0.85 to 0.95 |\n\nSome words.\n" in page
    assert "| 2 | torch |" not in page
    assert "| another | 700 | 1.07 (1.00 to 1.10) |\n\n## Another\n" in page
    assert "| 3 | torch | 250 | 1.000 | 1.000 to 1.000 |\n\n## By hand\n" in page, "another program's"
    assert page.endswith("| 2 | 2.0 |\n")


def test_the_tables_of_several_commands_are_joined(bench: ModuleType) -> None:
    measured(bench, 0.9, 0.85, 0.95)
    (bench.LAB / "bench" / "other.py").write_text(OTHER)
    page = bench.PAGE.read_text().splitlines()
    (section,) = [section for section in bench.sections(page) if section.name == "other"]
    section.tables *= 2  # the second one is that of steps.py
    [first, second] = bench.joined(map(bench.run, section.commands))
    assert first[2:] == ["| 9 | torch | 1 | 1.000 | 1.000 to 1.000 |", "| 2 | ours | 145 | 0.9 | 0.85 to 0.95 |"]
    assert second[2:] == ["| another | 700 | 1.07 (1.00 to 1.10) |"]


def test_what_cannot_be_written_is_named_and_keeps_nothing_back(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(bench, 0.9, 0.85, 0.95)
    (bench.LAB / "bench" / "other.py").write_text(OTHER)
    refused = "not written: python bench/other.py; python bench/steps.py printed 2 tables, but README.md has 1"
    with pytest.raises(InputError, match=refused):
        bench.main(bench.Request(names=("other", "steps"), write=True))
    assert "| 2 | ours | 145 | 0.9 | 0.85 to 0.95 |\n\nSome words.\n" in bench.PAGE.read_text()
    assert "# tables that no program of bench/ writes: By hand\n" in capsys.readouterr().out


def test_a_table_without_any_ratio_in_common_is_an_error(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    text = PROGRAM.format(ratio=1.02, low=0.97, high=1.05)
    (bench.LAB / "bench" / "steps.py").write_text(text.replace("this one: median (quartiles)", "this one"))
    with pytest.raises(InputError, match=r"no ratio of it is printed: steps: \| words \| step, ms \|"):
        bench.main(bench.Request())
    assert "# 0 of 1 ratios moved" in capsys.readouterr().out, "what was measured is there"


def test_what_cannot_be_run(bench: ModuleType) -> None:
    with pytest.raises(InputError, match="nothing: no benchmark with a quick form; there are steps"):
        bench.main(bench.Request(names=("nothing",)))
    with pytest.raises(InputError, match="give the names"):
        bench.main(bench.Request(write=True))
    (bench.LAB / "bench" / "steps.py").write_text("raise SystemExit(3)")
    with pytest.raises(InputError, match="ended with status 3"):
        bench.main(bench.Request())


def test_every_section_with_a_quick_form_has_ratios_on_the_page() -> None:
    bench = load()
    page = bench.PAGE.read_text().splitlines()
    quick = [section for section in bench.sections(page) if section.is_quick]
    assert {section.name for section in quick} == bench.QUICK.keys()
    without = [
        page[first] for section in quick for first, end in section.tables if not bench.parse(page[first:end]).ratios()
    ]
    assert not without
    assert all(section.tables for section in quick)
