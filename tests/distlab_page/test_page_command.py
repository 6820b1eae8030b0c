"""The command `page`: it writes a small file quickly, refuses what is no run, and serves this machine only."""

import json
import re
import resource
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support.processes import LAUNCH, run

from distlab_page.command import command
from distlab_page.contents import contents
from distlab_page.drawing_library import needed_parts
from distlab_page.records import read
from distlab_page.writing import as_script, write
from simplellm.errors import InputError

plotly = pytest.importorskip("plotly.offline", reason="pages need plotly: pip install plotly")


def test_it_is_made_at_once_and_small_or_with_a_second_run(
    hybrid: Path, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = run(*LAUNCH, "page", hybrid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.out == f"# {hybrid / 'page.html'}\n", ended.err
    assert (hybrid / "page.html").stat().st_size < 2e6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2, "seconds of a core"
    assert write(hybrid.parent) == hybrid / "page.html", "in the folder of the newest run"
    command([str(hybrid), str(alone), "--to", str(both := tmp_path / "both.html")])
    assert capsys.readouterr().out == f"# {both}\n"
    assert as_script(contents(read(hybrid), read(alone))["verdict"]["text"]) in both.read_text(encoding="utf-8")
    code = "import sys, distlab_page.command; print('torch' in sys.modules)"
    assert run(sys.executable, "-c", code).out == "False\n"


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path, alone: Path) -> None:
    for size in ("null", "0"):
        (tmp_path / "config.json").write_text(f'{{"settings": {{}}, "layout": {{"dp": {size}}}}}')
        with pytest.raises(InputError, match="this is not a run's folder"):
            read(tmp_path)
    (tmp_path / "config.json").write_text('{"settings": null, "layout": {}}')
    ended = run(*LAUNCH, "page", tmp_path)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith(f"# {tmp_path}: this is not a run's folder"), ended.err
    assert ended.err.count("\n") == 1
    for args, sentence in (
        ([alone, "--to", tmp_path], f"{tmp_path}: cannot be written (Is a directory)"),
        ([alone, "--port", "80"], "--port 80: only --serve listens"),
        ([alone, "--serve", "--port", "70000"], "--port 70000: a port is a number"),
        ([tmp_path / "none", "--serve", "--to", tmp_path], f"--to {tmp_path} with --serve: give one of the two"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
            command(list(map(str, args)))
    (tmp_path / "config.json").write_text((alone / "config.json").read_text())
    [account] = json.loads((alone / "ledger.json").read_text())
    sent = {"kind": "loss", "way": "send", "peers": [1], "bytes": 8, "messages": 1}
    for name, text, sentence in (
        ("ledger.json", json.dumps(2 * [account]), "this is not a complete record of a run"),
        ("ledger.json", json.dumps([account | {"steps": None}]), r"this is not a .* \(see steps\)"),
        ("ledger.json", json.dumps([account | {"sent": "8"}]), r"this is not a .* \(see sent\)"),
        ("ledger.json", json.dumps([account | {"sent": [sent | {"bytes": "8"}]}]), r"this is not a .* \(see bytes\)"),
        ("ledger.json", json.dumps([account | {"sent": [sent]}]), r"this is not a .* \(it is not of ranks 0 to 0\)"),
        ("memory.json", '[{"parameters"', "this is not a complete record of a run"),
        ("metrics.jsonl", '{"step"\n', "these are not the metrics of a run"),
        ("metrics.jsonl", '{"step": "0", "loss": 2.5, "seconds": 1}\n', "these are not the metrics of a run"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=rf"{name}: {sentence}"):
            read(tmp_path)
        (tmp_path / name).unlink()
    config = json.loads((alone / "config.json").read_text())
    for name, value, right in (
        ("batch_size", None, "must be a whole number"),
        ("hidden_dim", "8", "must be a whole number or null"),
        ("compile", 1, "must be true or false"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"settings": config["settings"] | {name: value}}))
        with pytest.raises(InputError, match=rf"config.json: its setting {name} is {json.dumps(value)}, and {right}"):
            read(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there .*; give another one"):
            command([str(alone), "--serve", "--port", port])
    with pytest.raises(InputError, match="--port 65536: a port is a number from 0 to 65535"):
        command([str(alone), "--serve", "--port", "65536"])


def test_a_script_element_holds_any_text() -> None:
    assert "<" not in as_script({"name": "</script><!--", "loss": float("nan")})
    assert json.loads(as_script(("</script>", [float("inf")]))) == ["</script>", [None]]


def test_the_drawing_library_is_cut_to_what_a_page_draws_with() -> None:
    whole = plotly.get_plotlyjs()
    parts = needed_parts(whole)
    assert len(parts) < len(whole) / 3
    assert whole.startswith(parts[:2000])
    for part, another in (('name:"heatmap"', 'name:"another"'), (".register([", ".enroll([")):
        other = whole.replace(part, another)
        assert needed_parts(other) == other, "all of a script in which the parts are not found"


def test_the_server_answers_this_machine_only(server: str, alone: Path, hybrid: Path) -> None:
    assert server.startswith("http://127.0.0.1:")
    (later := alone.parent / "later").mkdir()  # a run that begins later is another one
    (later / "config.json").write_bytes((alone / "config.json").read_bytes())
    with urllib.request.urlopen(f"{server}data.json") as answer:
        assert json.load(answer)["curves"] == contents(read(alone), read(hybrid))["curves"]
    urllib.request.urlopen(urllib.request.Request(f"{server}data.json", headers={"Host": "localhost:80"})).close()
    foreign = urllib.request.Request(server, headers={"Host": "example.org"})
    for request, status in ((foreign, 403), (urllib.request.Request(f"{server}config.json"), 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request)
        assert refused.value.code == status


def test_the_server_says_that_a_record_is_incomplete(server: str, alone: Path) -> None:
    records = (metrics := alone / "metrics.jsonl").read_bytes()
    metrics.write_bytes(records + b"{\n")
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server}data.json")
    finally:
        metrics.write_bytes(records)
