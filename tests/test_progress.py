"""Test the progress lines that are printed if standard error is not a terminal."""

import pytest

from specdec_jax.measure import progress


@pytest.mark.parametrize("tracked", [True, False])
def test_without_a_terminal_lines_are_printed(tracked, monkeypatch, capsys):
  monkeypatch.setattr(progress, "EVERY", 0.0)
  with progress.Progress() as bar:
    if tracked:
      assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
    else:
      task = bar.add_task("decoding", total=3)
      for _ in range(3):
        bar.advance(task)
  captured = capsys.readouterr()
  assert "decoding: 3 of 3" in captured.err.splitlines() and captured.out == ""


def test_nothing_is_printed_between_lines_or_if_disabled(monkeypatch, capsys):
  with progress.Progress() as bar:
    assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
  monkeypatch.setattr(progress, "EVERY", 0.0)
  with progress.Progress(disable=True) as bar:
    assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
  assert capsys.readouterr().err.strip() == ""
