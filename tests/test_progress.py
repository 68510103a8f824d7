"""Test the progress lines that are printed if standard error is not a terminal."""

import pytest

from specdec_jax.measure import progress


@pytest.mark.parametrize("disable", [False, True])
def test_without_a_terminal_lines_are_printed(disable, monkeypatch, capsys):
  monkeypatch.setattr(progress, "EVERY", 0.0)
  with progress.Progress(disable) as bar:
    assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
    bar.advance(bar.add_task("measuring", total=1))
  captured = capsys.readouterr()
  lines = captured.err.splitlines()
  assert ("decoding: 3 of 3" in lines) == ("measuring: 1 of 1" in lines) == (not disable)
  assert captured.out == ""
