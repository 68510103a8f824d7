"""A target, a draft model and the vocabulary they share, loaded and ready to decode."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.checkpoints.folder import load_model, vocabulary_of
from specdec_jax.data.vocabulary import Vocabulary, padded
from specdec_jax.drafts.model import model_draft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import named_dtype, t5_config
from specdec_jax.models.simulated import simulated_acceptance
from specdec_jax.models.t5 import for_decoding, init_params, t5_model
from specdec_jax.protocols import Draft, Model
from specdec_jax.sampling import Sampling

EMBEDDED = pathlib.Path(__file__).parent / "assets" / "multi30k_ende"


class Drafter(NamedTuple):
  """An approximation model M_q, loaded: what `Pair` needs of it.

  Attributes:
    name: for records.
    make: (sampling, gamma) -> the draft; the same one for the same arguments, so that what was
      compiled for it is found again (`functools.cache`).
    params: arguments of the compiled programs, never constants in them.
  """

  name: str
  make: Callable[[Sampling, int], Draft]
  params: Any = ()


class Pair(NamedTuple):
  """Everything that decoding a text needs.

  Attributes:
    target: M_p. target_params: its parameters. target_name: for records.
    draft: (sampling, gamma) -> M_q as a draft. draft_params, draft_name: likewise.
    vocabulary: of both.
    task: what they were trained for.
    dtype: of parameters and activations.
    max_source_tokens: longer inputs are cut to it, EOS kept.
    simulated_alpha: the acceptance rate that the target is told to have, or None for a real one.
  """

  target: Model
  target_params: Any
  target_name: str
  draft: Callable[[Sampling, int], Draft]
  draft_params: Any
  draft_name: str
  vocabulary: Vocabulary
  task: str
  dtype: str
  max_source_tokens: int
  simulated_alpha: float | None = None

  def with_draft(self, drafter: Drafter) -> "Pair":
    """The same target with another draft."""
    return self._replace(draft=drafter.make, draft_params=drafter.params, draft_name=drafter.name)

  def prompt(self, texts: Sequence[str], width: int | None = None) -> Array:
    """Source tokens [B, S] of texts, padded to a common multiple of 8 or to `width`."""
    rows = [self.encode(text) for text in texts]
    return jnp.asarray(padded(rows, width or -(-max(map(len, rows)) // 8) * 8))

  def encode(self, text: str) -> list[int]:
    """Token ids of one source, at most max_source_tokens of them, EOS last."""
    ids, most = self.vocabulary.encode(text), self.max_source_tokens
    return ids if len(ids) <= most else ids[: most - 1] + ids[-1:]

  def cut(self, text: str) -> str | None:
    """What is left of a source longer than max_source_tokens, or None if all of it fits."""
    fits = len(self.vocabulary.encode(text)) <= self.max_source_tokens
    return None if fits else self.vocabulary.decode(self.encode(text))


def load_pair(
  target: str = str(EMBEDDED / "target"),
  draft: str | Callable[[Vocabulary], Drafter] = str(EMBEDDED / "draft"),
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  task: str = "multi30k_ende",
  dtype: str = "float32",
  max_source_tokens: int = 128,
) -> Pair:
  """Load a target and a draft; by default the pair that comes with the package.

  Args:
    target: folder of the target, as `save_model` wrote it.
    draft: folder of the draft, or a function that makes one for a vocabulary.
    vocabulary: SentencePiece model file.
    task: name for records.
    dtype: 'float32' or 'bfloat16'.
    max_source_tokens: limit for a source, EOS counted.

  Raises:
    InputError: a file is missing or damaged, or the two do not share the vocabulary.
  """
  require_count("max_source_tokens", max_source_tokens)
  words = Vocabulary(vocabulary)
  target_model, target_params = _load_t5("target", target, words, dtype)
  if callable(draft):
    drafter = draft(words)
  else:
    model, params = _load_t5("draft", draft, words, dtype)
    make = functools.partial(model_draft, model)
    drafter = Drafter(pathlib.Path(draft).name, make, params)
  return Pair(
    target=target_model,
    target_params=target_params,
    target_name=pathlib.Path(target).name,
    draft=drafter.make,
    draft_params=drafter.params,
    draft_name=drafter.name,
    vocabulary=words,
    task=task,
    dtype=dtype,
    max_source_tokens=max_source_tokens,
  )


def random_pair(
  target: str,
  draft: str,
  alpha: float,
  version: str = "1.1",
  dtype: str = "float32",
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  max_source_tokens: int = 128,
) -> Pair:
  """Two published sizes of T5 with random weights and a set acceptance rate: scale, not sense.

  Both models do all their work, so times are those of the real ones; which guesses stand is
  simulated (`simulated_acceptance`), and the texts mean nothing.

  Args:
    target: size of M_p; see `t5_config`.
    draft: size of M_q.
    alpha: acceptance rate.
    version: of T5, '1.0' or '1.1'.
    dtype: 'float32' or 'bfloat16'.
    vocabulary: turns sources into tokens.
    max_source_tokens: limit for a source, EOS counted.
  """
  kind = named_dtype(dtype)
  target_model, target_params = _random_t5(target, version, kind)
  draft_model, draft_params = _random_t5(draft, version, kind)
  return Pair(
    target=simulated_acceptance(target_model, alpha),
    target_params=target_params,
    target_name=f"t5_{version}_{target}",
    draft=functools.partial(model_draft, draft_model),
    draft_params=draft_params,
    draft_name=f"t5_{version}_{draft}",
    vocabulary=Vocabulary(vocabulary),
    task=f"simulated, alpha {alpha:g}",
    dtype=dtype,
    max_source_tokens=max_source_tokens,
    simulated_alpha=alpha,
  )


def _random_t5(size: str, version: str, dtype) -> tuple[Model, Any]:
  """A model laid out for decoding and random parameters of its shapes, made one by one in dtype."""
  config = t5_config(size, version, dtype=dtype, fused=True, tied_logits=False)
  shapes = jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))
  leaves, tree = jax.tree.flatten(shapes)
  ones = lambda leaf: jnp.ones(leaf.shape, dtype)
  scaled = lambda leaf, key: jax.random.normal(key, leaf.shape, dtype) * leaf.shape[0] ** -0.5
  keys = jax.random.split(jax.random.key(0), len(leaves))
  made = [ones(leaf) if leaf.ndim == 1 else scaled(leaf, k) for leaf, k in zip(leaves, keys)]
  return t5_model(config), jax.tree.unflatten(tree, made)


def _load_t5(role: str, folder: str, words: Vocabulary, dtype: str) -> tuple[Model, Any]:
  """The model in a folder, laid out for decoding, and its parameters."""
  config, params = load_model(folder, dtype)
  if config.vocab_size != len(words):
    raise InputError(
      f"The {role} in {folder} has a vocabulary of {config.vocab_size} tokens but {words.path} "
      f"has {len(words)}; target, draft and vocabulary must agree."
    )
  if vocabulary_of(folder) not in (None, words.fingerprint()):
    raise InputError(
      f"The {role} in {folder} was trained with another vocabulary than {words.path}, though "
      "of the same size; target, draft and vocabulary must agree."
    )
  config, params = for_decoding(config, params)
  return t5_model(config), jax.device_put(params)
