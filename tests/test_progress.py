"""A long run says how far it is, whoever listens."""

import pytest

from specdec_jax import progress


@pytest.mark.parametrize("tracked", [True, False])
def test_where_there_is_no_terminal_a_line_comes_now_and_then(tracked, monkeypatch, capsys):
  monkeypatch.setattr(progress, "EVERY", 0.0)
  with progress.Progress() as bar:
    if tracked:
      assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
    else:
      task = bar.add_task("decoding", total=3)
      for _ in range(3):
        bar.advance(task)
  said = capsys.readouterr()
  assert "decoding: 3 of 3" in said.err.splitlines() and said.out == ""


def test_it_is_silent_between_two_lines_and_when_it_is_disabled(monkeypatch, capsys):
  with progress.Progress() as bar:
    assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
  monkeypatch.setattr(progress, "EVERY", 0.0)
  with progress.Progress(disable=True) as bar:
    assert [*bar.track(range(3), description="decoding")] == [0, 1, 2]
  assert capsys.readouterr().err.strip() == ""
