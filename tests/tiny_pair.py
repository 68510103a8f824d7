"""A vocabulary and models with random weights on disk, in the layout of a trained pair."""

import dataclasses
import functools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from specdec_jax.checkpoints.load import load_model
from specdec_jax.checkpoints.save import save_model
from specdec_jax.data.pieces import train_sentence_pieces, train_word_pieces
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.drafts.heads import AnyConfig
from specdec_jax.load import load_pair
from specdec_jax.models.families import init_params
from specdec_jax.pair import Pair

_WHO = ("A man", "Two dogs", "A little girl", "The old woman", "Drei Männer", "Ein kleines Mädchen")
_DOES = ("runs through", "is looking at", "plays with", "sitzt auf", "stands in front of")
_WHAT = ("a red ball.", "the green field.", "a big house!", "dem Fuß der Brücke.")
SENTENCES = [f"{who} {does} {what}" for who in _WHO for does in _DOES for what in _WHAT]


@functools.cache
def folder() -> pathlib.Path:
  """Return a folder with `vocabulary.model` and one subfolder per model, created once per session.

  Draft tokens of the draft `near` are often accepted, draft tokens of `random` rarely, and draft
  tokens of `target` always. `small` is a model for a smaller vocabulary.
  """
  path = pathlib.Path(_folder().name)
  train_sentence_pieces([*SENTENCES, "[/b]", *"[]/0123456789"], str(path / "vocabulary.model"), 72)
  size = len(open_vocabulary(str(path / "vocabulary.model")))
  cfg = tiny.config(vocab_size=size, layers=1)
  other = tiny.config(
    vocab_size=size, layers=1, emb_dim=8, gated=False, activation="relu", tied_logits=True
  )
  small = tiny.config(vocab_size=60, layers=1)
  params = random_params(cfg, 0)
  save_model(str(path / "target"), cfg, params, dtype=jnp.bfloat16)
  save_model(str(path / "near"), cfg, jax.tree.map(_noisy(0.1), params), dtype=jnp.bfloat16)
  save_model(str(path / "random"), other, random_params(other, 2), dtype=jnp.bfloat16)
  save_model(str(path / "small"), small, random_params(small, 3), dtype=jnp.bfloat16)
  return path


@functools.cache
def gpt_folder() -> pathlib.Path:
  """Return a folder of decoder-only models: `vocabulary.txt`, `target`, `near` and `random`.

  `random` has LaMDA's architecture: gated activations, relative positions, no biases.
  """
  path = folder() / "gpt"
  path.mkdir()
  train_word_pieces(SENTENCES, str(path / "vocabulary.txt"), 100)
  size = len(open_vocabulary(str(path / "vocabulary.txt")))
  cfg = tiny.gpt_config(vocab_size=size, layers=1, num_positions=96)
  other = tiny.gpt_config(
    vocab_size=size, layers=1, emb_dim=8, gated=True, biases=False, num_positions=None
  )
  params = random_params(cfg, 0)
  save_model(str(path / "target"), cfg, params, dtype=jnp.bfloat16)
  save_model(str(path / "near"), cfg, jax.tree.map(_noisy(0.1), params), dtype=jnp.bfloat16)
  save_model(str(path / "random"), other, random_params(other, 2), dtype=jnp.bfloat16)
  return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="tiny_pair")  # removed when the session ends


@functools.cache
def pair(draft: str = "near", max_source_tokens: int = 24, **options: Any) -> Pair:
  """Return the target with one of the drafts of `folder`.

  The limit on source tokens truncates all of SENTENCES to one width.
  """
  return load_pair(
    target=str(folder() / "target"),
    draft=str(folder() / draft),
    vocabulary=str(folder() / "vocabulary.model"),
    task="tiny",
    max_source_tokens=max_source_tokens,
    **options,
  )


def config_and_params() -> tuple[AnyConfig, Any]:
  """Return the target as a model in memory."""
  return load_model(str(folder() / "target"))


def changed(pair: Pair, draft=None, draft_params=None, **target) -> Pair:
  """Return a pair with changed fields of its target, and with another draft if one is given.

  Args:
    pair: target and draft.
    draft: function of (sampling, tree, options) that returns the draft.
    draft_params: parameters of the draft; None for those of the pair's draft.
    target: changed fields of `pair.target`.
  """
  draft_params = pair.draft.params if draft_params is None else draft_params
  spec = dataclasses.replace(pair.draft, build=draft or pair.draft.build, params=draft_params)
  return pair.with_target(**target).with_draft(spec)


@functools.cache
def gpt_pair(draft: str = "near", max_source_tokens: int = 32) -> Pair:
  """Return the decoder-only target with one of the drafts of `gpt_folder`."""
  return load_pair(
    target=str(gpt_folder() / "target"),
    draft=str(gpt_folder() / draft),
    vocabulary=str(gpt_folder() / "vocabulary.txt"),
    task="tiny_gpt",
    max_source_tokens=max_source_tokens,
  )


def random_params(cfg: AnyConfig, seed: int):
  """Return random parameters of a model or of a draft head; nothing is compiled.

  Logits have a deviation of about 3.
  """
  rng = np.random.default_rng(seed)

  def sample(path, leaf):
    name = "/".join(key.key for key in path)
    if name.endswith("bias"):
      return jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32)
    if leaf.ndim == 1:  # scales
      return jnp.ones(leaf.shape)
    size = 3.0 if "logits_dense" in name or "rel_embedding" in name else 1.0
    fan_in = leaf.shape[0] if "kernel" in name else 1.0
    return jnp.asarray(rng.normal(0, size / np.sqrt(fan_in), leaf.shape), jnp.float32)

  shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
  return jax.tree_util.tree_map_with_path(sample, shapes)


def _noisy(share: float):
  """Return a function that adds noise, `share` times the standard deviation of an array."""
  rng = np.random.default_rng(1)
  return lambda x: x + share * float(x.std()) * rng.normal(size=x.shape).astype(np.float32)
