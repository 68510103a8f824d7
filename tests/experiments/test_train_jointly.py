"""Test that a target and a draft head are trained together, and decode together."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny_pair
from test_contract import GREEDY, LIMIT
from test_learned import tiny_head
from test_training import (  # noqa: F401
  CONFIG,
  batch_of,
  compiled_once,
  copies,
  metrics,
  stopped_after,
)

from experiments.methods import train_jointly as commands
from specdec_jax.checkpoints.load import load_model, open_checkpoint
from specdec_jax.checkpoints.save import save_model
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.drafts.heads import new_head
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.models.families import init_params
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.objectives import model_objective
from specdec_jax.train.speculators import speculator_objective
from specdec_jax.train.trainer import TrainSettings, train

ROOT = tiny_pair.folder
TARGET = tiny_pair.random_params(CONFIG, 0)
HEAD = tiny_head(CONFIG, "heads")
STEPS = TrainSettings(epochs=1, tokens_per_batch=16, peak_learning_rate=0.05, warmup_steps=0)


def head_params(config=HEAD):
  return tiny_pair.random_params(config, 1)


def trained(objective, init, path, steps):
  settings = dataclasses.replace(STEPS, max_steps=steps)
  return jax.device_get(train(objective, settings, copies(), copies(), str(path), init))


def test_loss_and_gradient_are_the_sums_of_both_parts():
  weight, plain = 0.3, dataclasses.replace(CONFIG, dropout_rate=0.0)
  joint = commands.joint_objective(HEAD, plain, weight, 0.1, label_smoothing=0.1, stride=1)
  backbone = model_objective(plain, 0.1)
  head = speculator_objective(HEAD, plain, (), stride=1)

  @jax.jit
  def values_and_gradients(own, batch, rng):
    def of_target(target):
      return backbone.loss(target, (), batch, rng, 0.0)

    def of_head(own, target):
      return head.loss(own, target, batch, rng, 0.0)

    params = {"target": TARGET, "head": own}
    return (
      jax.value_and_grad(joint.loss)(params, (), batch, rng, 0.0),
      jax.value_and_grad(of_target)(TARGET),
      jax.value_and_grad(of_head, argnums=(0, 1))(own, TARGET),
    )

  batch = batch_of(copies().targets[:4], length=8)
  both, by_target, by_head = values_and_gradients(head_params(), batch, jax.random.key(2))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  close(both[0], by_target[0] + weight * by_head[0])
  assert min(by_target[0], by_head[0]) > 0.5
  want = {
    "target": jax.tree.map(lambda x, y: x + weight * y, by_target[1], by_head[1][1]),
    "head": jax.tree.map(lambda x: weight * x, by_head[1][0]),
  }
  jax.tree.map(close, both[1], want)


def settings(**changes):
  common = dict(epochs=2, tokens_per_batch=384, warmup_steps=2, label_smoothing=0.0)
  return TrainSettings(**{**common, **changes})


def run(path, output, **changes):
  """Train on the outputs of beam search for some of the tiny pair's sentences."""
  lines = tiny_pair.SENTENCES[::9]
  for name in ("train.en", "train.de", "val.en", "val.de"):
    (path / name).write_text("".join(line + "\n" for line in lines))
  options = dict(
    data=str(path),
    sources=["train.en"],
    targets=["train.de"],
    valid_source="val.en",
    valid_target="val.de",
    head=functools.partial(new_head, kind="heads", gamma=3),
    settings=settings(),
    vocabulary=str(ROOT() / "vocabulary.model"),
    target=str(ROOT() / "target"),
    output=str(path / output),
    work_dir=str(path / output / "work"),
    texts="beam_search",
    num_beams=2,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr("specdec_jax.train.batches.BUCKETS", (96,))
    commands.train_jointly(**{**options, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Return the folder of a run, `whole`."""
  path = tmp_path_factory.mktemp("joint")
  run(path, "whole")
  return path


def test_new_target_and_head_decode_as_the_new_target_alone(folder):
  vocabulary = ROOT() / "vocabulary.model"
  names = [str(folder / "whole" / name) for name in ("target", "speculator")]
  pair = load_pair(*names, str(vocabulary), max_source_tokens=24, kernels="xla")
  assert pair.draft.name == "speculator"
  prompt, keys = pair.prompt(tiny_pair.SENTENCES[:4]), row_keys(0, 0, 4)
  alone = pair.decode_fn(GREEDY, chain(0))(prompt, keys, max_new_tokens=LIMIT)
  together = pair.decode_fn(GREEDY, chain(3))(prompt, keys, max_new_tokens=LIMIT)
  np.testing.assert_array_equal(together.tokens, alone.tokens)
  fingerprint = open_vocabulary(str(vocabulary)).fingerprint()
  assert [open_checkpoint(name).vocabulary for name in names] == [fingerprint] * 2
  (_, target), (config, head) = map(load_model, names)
  start = load_model(str(ROOT() / "target"))[1], init_params(config, jax.random.key(0))
  for new, old in zip(jax.tree.leaves((target, head)), jax.tree.leaves(start), strict=True):
    assert np.abs(new - old).max() > 1e-4


def test_training_starts_from_the_target_and_from_a_given_head(tmp_path, monkeypatch):
  train_calls = []
  monkeypatch.setattr(commands, "train", lambda *args: train_calls.append(args) or args[5])
  target, params = load_model(str(ROOT() / "target"))
  config = new_head(target, kind="heads", gamma=3)
  save_model(str(tmp_path / "head"), config, head_params(config))
  start = dict(texts="references", start=str(tmp_path / "head"))
  run(tmp_path, "out", **start)
  run(tmp_path, "random", texts="references")
  (_, _, text, *_, init, _), (*_, random_init, _) = train_calls
  encode = tiny_pair.pair().vocabulary.encode
  lines = [encode(line) for line in tiny_pair.SENTENCES[::9]]
  assert text == ParallelText(lines, lines)
  same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
  same(init, {"target": params, "head": load_model(str(tmp_path / "head"))[1]})
  same(random_init["head"], init_params(config, jax.random.key(0)))
  with pytest.raises(InputError, match="does not fit"):
    run(tmp_path, "out", **start, head=functools.partial(new_head, kind="eagle"))
