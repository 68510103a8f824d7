"""Test that a target and a draft head are trained together, and decode together."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny_pair
from test_contract import GREEDY, LIMIT
from test_learned import module
from test_training import (  # noqa: F401
  CONFIG,
  batch_of,
  compiled_once,
  copies,
  metrics,
  stopped_after,
)

from experiments.methods import train_jointly as commands
from specdec_jax.checkpoints.folder import load_model, open_folder, save_model
from specdec_jax.core.sampling import row_keys
from specdec_jax.core.trees import chain
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.drafts.heads import init_params, speculator_config
from specdec_jax.errors import InputError
from specdec_jax.load import load_pair
from specdec_jax.models.families import model_of
from specdec_jax.models.partitioning import make_mesh
from specdec_jax.train import distillation
from specdec_jax.train.batches import ParallelText
from specdec_jax.train.distillation import Teacher, model_outputs
from specdec_jax.train.objectives import model_objective
from specdec_jax.train.speculators import speculator_objective
from specdec_jax.train.trainer import TrainSettings, train

ROOT = tiny_pair.folder
TARGET = tiny_pair.random_params(CONFIG, 0)
HEAD = module("heads", CONFIG)
STEPS = TrainSettings(epochs=1, tokens_per_batch=16, peak_learning_rate=0.05, warmup_steps=0)


def head_params(config=HEAD):
  return tiny_pair.random_params(config, 1)


def trained(objective, init, path, steps):
  settings = dataclasses.replace(STEPS, max_steps=steps)
  return jax.device_get(train(objective, settings, copies(), copies(), str(path), init))


def test_with_rate_0_the_head_is_trained_as_for_a_frozen_target(tmp_path):
  init = {"target": TARGET, "head": head_params()}
  joint = commands.joint_objective(HEAD, CONFIG, 1.0, 0.0, stride=1)
  frozen = trained(joint, init, tmp_path / "joint", steps=3)
  alone = speculator_objective(HEAD, CONFIG, TARGET, stride=1)
  want = trained(alone, init["head"], tmp_path / "alone", steps=3)
  jax.tree.map(np.testing.assert_array_equal, frozen["target"], jax.device_get(TARGET))
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, frozen["head"], want)


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


@pytest.mark.parametrize("kind", ["heads", "features", "early_exit"])
def test_gradient_of_the_loss_of_a_head_reaches_the_target(kind):
  """The heads use logits, hidden states and a source, or layers of the target."""
  config, batch = module(kind, CONFIG), batch_of(copies().targets[:4], length=8)
  loss = speculator_objective(config, CONFIG, (), stride=1).loss
  gradient = jax.jit(jax.grad(loss, argnums=1))
  found = gradient(head_params(config), TARGET, batch, jax.random.key(2), 0.0)
  for part in ("encoder", "decoder", "token_embedder"):
    leaves = jax.tree.leaves(found[part])
    assert all(np.isfinite(x).all() for x in leaves), part
    assert max(np.abs(x).max() for x in leaves) > 1e-4, part


def test_beam_search_texts_are_the_best_texts_of_the_search_and_are_written_once(tmp_path):
  pair, path = tiny_pair.pair(), tmp_path / "work" / "beam_search.npz"
  config, params = load_model(str(ROOT() / "target"))
  teacher = Teacher(pair.vocabulary, config, params, make_mesh())
  sources = [pair.encode(text) for text in tiny_pair.SENTENCES[::40]]
  text = commands.beam_search_text(teacher, path, ParallelText(sources, [[1]] * len(sources)), 3)
  prompt = pair.prompt(tiny_pair.SENTENCES[::40], 32)
  result = pair.beam_searcher(3, 0).run(pair.params, prompt, max_new_tokens=96).best()
  want = [row[:n].tolist() for row, n in zip(np.asarray(result.tokens), result.lengths)]
  assert text.sources == sources and text.targets == want and text.teacher is None
  assert want != model_outputs(model_of(config), params, sources)
  assert commands.beam_search_text(teacher, path, ParallelText([], []), 1) == text


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
    config=functools.partial(speculator_config, kind="heads", gamma=3),
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
  assert [open_folder(name).vocabulary for name in names] == [fingerprint] * 2
  (_, target), (config, head) = map(load_model, names)
  start = load_model(str(ROOT() / "target"))[1], init_params(config, jax.random.key(0))
  for new, old in zip(jax.tree.leaves((target, head)), jax.tree.leaves(start), strict=True):
    assert np.abs(new - old).max() > 1e-4


def test_interrupted_run_resumes_with_the_same_texts(folder, monkeypatch):
  whole = folder / "whole"
  steps = metrics(whole / "work")[1]["step"]
  stopped_after(2, lambda: run(folder, "resumed"))  # in the validation before training
  monkeypatch.setattr(distillation, "BeamSearcher", None)  # the search is not repeated
  stopped_after(3 * steps + 1, lambda: run(folder, "resumed"))  # in the second epoch
  run(folder, "resumed")
  for name in ("target", "speculator"):
    ours, want = (load_model(str(folder / run / name))[1] for run in ("resumed", "whole"))
    jax.tree.map(np.testing.assert_array_equal, ours, want)


def test_training_starts_from_the_target_and_from_a_given_head(tmp_path, monkeypatch):
  train_calls = []
  monkeypatch.setattr(commands, "train", lambda *args: train_calls.append(args) or args[5])
  target, params = load_model(str(ROOT() / "target"))
  config = speculator_config(target, kind="heads", gamma=3)
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
    run(tmp_path, "out", **start, config=functools.partial(speculator_config, kind="eagle"))
