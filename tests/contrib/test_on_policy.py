"""Test training of a draft on texts that it samples itself."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny_pair
from test_training import SETTINGS

from specdec_jax.checkpoints.load import load_model
from specdec_jax.commands import teacher
from specdec_jax.commands import train as commands
from specdec_jax.contrib.on_policy import train_on_policy
from specdec_jax.core.sampling import Sampling
from specdec_jax.models.families import model_of
from specdec_jax.train.distillation import teacher_topk

pytestmark = pytest.mark.slow


def test_data_is_sampled_by_the_draft_and_labelled_by_the_target(tmp_path, monkeypatch):
  (tmp_path / "lines").write_text("".join(line + "\n" for line in tiny_pair.SENTENCES[:8]))
  train_calls, folder = [], tiny_pair.folder()
  config, params = load_model(str(folder / "near"))
  trained = jax.tree.map(lambda x: 2 * x, params)

  def fake_train(*args):
    train_calls.append(args)
    return trained

  monkeypatch.setattr(commands, "train", fake_train)
  train_draft = functools.partial(
    commands.train_draft,
    data=str(tmp_path),
    sources=["lines"],
    targets=["lines"],
    valid_source="lines",
    config=config,
    vocabulary=str(folder / "vocabulary.model"),
    target=str(folder / "target"),
    samples=1,
  )
  output, work_dir = tmp_path / "draft", tmp_path / "work"
  settings = dataclasses.replace(SETTINGS, epochs=2)
  train_on_policy(train_draft, settings, str(folder / "near"), str(output), str(work_dir))
  assert [call[1].epochs for call in train_calls] == [1, 1]
  assert len({call[4] for call in train_calls}) == 2
  (_, _, text, *_, init), (_, _, second_text, *_, second_init) = train_calls
  first_trained = load_model(str(work_dir / "epoch_1" / "draft"))[1]
  assert jax.tree.all(jax.tree.map(np.array_equal, second_init, first_trained))
  assert jax.tree.all(jax.tree.map(np.array_equal, load_model(str(output))[1], first_trained))
  pair = tiny_pair.pair()
  for found, writer in ((text, params), (second_text, first_trained)):
    near = teacher.without_draft(model_of(config), writer, pair.vocabulary)
    assert found.targets[8:] == teacher.decode(near, found.sources[8:], Sampling())
  want = teacher_topk(pair.target.model.config, pair.target.params, text)
  np.testing.assert_allclose(text.teacher[-1][1], want[-1][1], atol=2e-3)
  assert jax.tree.all(jax.tree.map(np.array_equal, init, params))
