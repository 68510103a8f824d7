"""Pairs and drafts with random weights and a simulated acceptance rate, as fast as trained ones."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import load, registry
from specdec_jax.checkpoints.checkpoint import ShardingsFn, make_shardings, param_shapes
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DraftSpec, Loaded, LoadsDraft, Model, Verifier
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.dynamic import model_draft
from specdec_jax.drafts.heads import DraftHead, new_head
from specdec_jax.errors import InputError
from specdec_jax.models.families import Config, model_of
from specdec_jax.models.layout import Layout, Weights, for_device
from specdec_jax.models.quantization import MAX_QUANTIZED
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.sizes import named_config, version_name
from specdec_jax.models.whisper import DraftWhisper, WhisperModel
from specdec_jax.pair import Pair


def random_pair(
  target: str,
  draft: str | LoadsDraft,
  alpha: float,
  version: str | float = "1.1",
  dtype: str = "float32",
  vocabulary: str = str(load.BUNDLED / "vocabulary.model"),
  max_source_tokens: int = 128,
  kernels: str = "auto",
  weights: Weights = "float",
  draft_weights: Weights | None = None,
  num_output_tokens: int | None = None,
  verifier: str | Callable[[Sampling], Verifier] = "tokens",
  *,
  shardings: ShardingsFn = None,
  draft_shardings: ShardingsFn = None,
) -> Pair:
  """Return a pair of models with named sizes, random weights and a simulated acceptance rate.

  Both models do all of their computation, so the times equal those of real models. Acceptance is
  simulated (`SimulatedModel`), and the outputs have no meaning. Other arguments are those of
  `load.load_pair`.

  Args:
    target: size of the target M_p; see `named_config`.
    draft: size of the draft M_q, a name in `registry.DRAFTS`, or a function that loads a draft.
    alpha: simulated acceptance rate.
    version: version of T5 ('1.0' or '1.1'), another family of encoder-decoders, such as 't5gemma',
      or a family of decoder-only models; see `named_config`.
    num_output_tokens: see `random_draft`; for a draft that is given by its size.
  """
  load.cache_programs()
  version, words = version_name(version), open_vocabulary(vocabulary)
  layout = for_device(dtype, "xla" if shardings else kernels, weights)
  config, params = random_model(target, version, layout, words, shardings)
  model = SimulatedModel(model_of(config), alpha, words.eos_id)
  loaded = Loaded(size_name(version, target), model, params, words)
  if isinstance(draft, str) and registry.entry("draft", draft):
    draft = registry.draft(draft)
  elif isinstance(draft, str):
    draft = functools.partial(
      random_draft,
      size=draft,
      version=version,
      dtype=dtype,
      shardings=draft_shardings,
      kernels=kernels,
      weights=weights if draft_weights is None else draft_weights,
      num_output_tokens=num_output_tokens,
    )
  return Pair(
    loaded,
    draft(loaded),
    registry.verifier(verifier),
    task=f"simulated, alpha {model.alpha:g}",
    max_source_tokens=max_source_tokens,
  )


def random_draft(
  target: Loaded,
  size: str,
  version: str | float = "1.1",
  dtype: str = "float32",
  inner_alpha: float | None = None,
  shardings: ShardingsFn = None,
  kernels: str = "auto",
  weights: Weights = "float",
  num_output_tokens: int | None = None,
) -> DraftSpec:
  """Return a draft model of a named size with random weights; see `random_pair`.

  Args:
    size: size of the model; see `named_config`.
    inner_alpha: simulated acceptance rate of the inner draft, if this model is the `draft` of a
      `hierarchical_draft`. Such a model cannot propose tokens alone. None for any other model.
    num_output_tokens: number of tokens that have logits, the first ones of the vocabulary; None for
      all tokens.
  """
  version = version_name(version)
  layout = for_device(dtype, "xla" if shardings else kernels, weights)
  config, params = random_model(
    size, version, layout, target.vocabulary, shardings, num_output_tokens
  )
  model: Model = model_of(config)
  if isinstance(model, WhisperModel):  # with an encoder of its own
    model = DraftWhisper(model.config)
  if inner_alpha is not None:
    model = SimulatedModel(model, inner_alpha, target.vocabulary.eos_id)
  name = load.draft_name(size_name(version, size), config)
  return DraftSpec(name, functools.partial(model_draft, model), params)


def size_name(version: str, size: str) -> str:
  """Return the name of a model with random weights, for records."""
  return f"{version if version.isidentifier() else f't5_{version}'}_{size}"


def random_model(
  size: str,
  version: str,
  layout: Layout,
  words: Vocabulary,
  shardings: ShardingsFn = None,
  num_output_tokens: int | None = None,
) -> tuple[Config, Any]:
  """Return a named configuration and random parameters with the given layout and shardings."""
  config = named_config(version, size)
  config = dataclasses.replace(config, eos_id=words.eos_id, pad_id=words.pad_id)
  if len(words) > config.vocab_size:
    raise InputError(
      f"{words.path} has {len(words)} tokens, more than the {config.vocab_size} of {version} "
      f"{size}; give a smaller vocabulary."
    )
  config = load.laid_out(config, layout, shardings)
  config, layout = dataclasses.replace(config, num_output_tokens=num_output_tokens), config.layout
  leaves, tree = jax.tree.flatten_with_path(param_shapes(config))
  places = jax.tree.leaves(make_shardings(shardings, config)) if shardings else [None] * len(leaves)

  @functools.partial(jax.jit, static_argnames=("shape", "place", "dtype"))
  def random_array(key, shape, place, dtype):
    if (name := jnp.dtype(dtype).name) in MAX_QUANTIZED:
      largest = MAX_QUANTIZED[name]
      array = jax.random.randint(key, shape, -largest, largest + 1, jnp.int8).astype(dtype)
    elif len(shape) == 1:
      array = jnp.ones(shape, dtype)
    else:
      depth = shape[-1 if layout.transposes(shape) else -2]
      array = jax.random.normal(key, shape, dtype) * depth**-0.5
    return array if place is None else jax.lax.with_sharding_constraint(array, place)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  arrays = [
    random_array(key, leaf.shape, place, layout.param_dtype(path[-1].key, leaf.dtype))
    for key, (path, leaf), place in zip(keys, leaves, places)
  ]
  params = jax.tree.unflatten(tree, arrays)

  def special(path, array):
    if path[-1].key == "kernel_scale":
      # The standard deviation of integers up to 127 is 73, and up to 7 it is 4.3.
      std = {"int8": 73, "int4": 4.3}[layout.weights]
      return jnp.full_like(array, config.emb_dim**-0.5 / std)
    if path[-1].key == "output_tokens":
      return jnp.arange(len(array), dtype=jnp.int32)
    return array

  return config, jax.tree_util.tree_map_with_path(special, params)


def random_speculator(target: Loaded, head: Callable[[Config], DraftHead] = new_head) -> DraftSpec:
  """Return a draft head with random weights for `random_pair`; it is as fast as a trained one."""
  new = head(load.require_config(target))
  params = jax.tree.map(lambda x: x.astype(new.layout.dtype), new.init(jax.random.key(0)))
  return load.head_draft(f"random {new.kind}", new, params, target)
