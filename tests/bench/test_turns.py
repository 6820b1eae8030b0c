"""Progress of benchmarks."""

import pytest
import torch.distributed as dist

from distlab.run import progress


def test_each_tells_how_many_are_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from turns import each

    monkeypatch.setattr(progress, "SECONDS_TO_ESTIMATE", 0)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    assert list(each("abcdef", "letters")) == list("abcdef")
    out, err = capsys.readouterr()
    assert err == (
        "# about 1 s for the remaining 3 letters\n# 4 of 6 letters, about 1 s left\n# 5 of 6 letters, about 1 s left\n"
    )
    assert not out
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert list(each("abcdef", "letters")) == list("abcdef")
    assert capsys.readouterr() == ("", ""), "rank 0 says it"
