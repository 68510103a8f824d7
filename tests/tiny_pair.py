"""A vocabulary and models with random weights on disk, as a pair that was trained would lie there."""

import functools
import pathlib
import tempfile

import tiny

from specdec_jax.checkpoints.folder import save_model
from specdec_jax.data.vocabulary import Vocabulary, train_vocabulary
from specdec_jax.pairs import Pair, load_pair

_WHO = ("A man", "Two dogs", "A little girl", "The old woman", "Drei Männer", "Ein kleines Mädchen")
_DOES = ("runs through", "is looking at", "plays with", "sitzt auf", "stands in front of")
_WHAT = ("a red ball.", "the green field.", "a big house!", "dem Fuß der Brücke.")
SENTENCES = [f"{who} {does} {what}" for who in _WHO for does in _DOES for what in _WHAT]
OTHERS = [f"{what} {does}?" for what in ("Schöne Züge", "Quick foxes") for does in _WHAT]


@functools.cache
def folder() -> pathlib.Path:
  """A folder made once a session: vocabulary.model, and models by name.

  Draft `near` is often right, `random` hardly ever, `target` always. `other.model` is a vocabulary
  of the same size with other pieces; `small` a model for a smaller vocabulary.
  """
  path = pathlib.Path(_folder().name)
  train_vocabulary([*SENTENCES, "[/b]", *"[]/0123456789"], str(path / "vocabulary.model"), 100)
  train_vocabulary([*OTHERS, *"([]/0123456789)"], str(path / "other.model"), 60)
  size = len(Vocabulary(str(path / "vocabulary.model")))
  cfg = tiny.config(vocab_size=size, layers=1)
  params = tiny.params(cfg, 0)
  save_model(str(path / "target"), cfg, params)
  save_model(str(path / "near"), cfg, tiny.near(params, seed=1, noise=0.1))
  other = tiny.config(
    vocab_size=size, layers=1, emb_dim=8, gated=False, activation="relu", tied_logits=True
  )
  save_model(str(path / "random"), other, tiny.params(other, 2))
  small = tiny.config(vocab_size=60, layers=1)
  save_model(str(path / "small"), small, tiny.params(small, 3))
  return path


@functools.cache
def _folder() -> tempfile.TemporaryDirectory:
  return tempfile.TemporaryDirectory(prefix="tiny_pair")  # removed when the session ends


@functools.cache
def pair(draft: str = "near", max_source_tokens: int = 48) -> Pair:
  """The target with one of the drafts of `folder`."""
  return load_pair(
    target=str(folder() / "target"),
    draft=str(folder() / draft),
    vocabulary=str(folder() / "vocabulary.model"),
    task="tiny",
    max_source_tokens=max_source_tokens,
  )
