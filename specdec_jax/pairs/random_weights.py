"""Pairs of models that have published sizes but random weights, to measure speed at scale."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax.checkpoints.checkpoint import ShardingsFn, make_shardings, param_shapes
from specdec_jax.core.loading import DraftFactory, LoadedTarget
from specdec_jax.core.types import Model
from specdec_jax.data.vocabularies import open_vocabulary
from specdec_jax.data.vocabulary import Vocabulary
from specdec_jax.drafts.dynamic import model_draft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.config import Weights, named_dtype
from specdec_jax.models.families import Config, model_of, with_feature_layers
from specdec_jax.models.quantization import MAX_INT8, param_dtype
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.models.sizes import named_config, version_name
from specdec_jax.pairs.load import EMBEDDED, laid_out
from specdec_jax.pairs.pair import LoadedPair
from specdec_jax.pairs.speculators import draft_name


def random_pair(
  target: str,
  draft: str | Callable[[LoadedTarget], DraftFactory],
  alpha: float,
  version: str | float = "1.1",
  dtype: str = "float32",
  vocabulary: str = str(EMBEDDED / "vocabulary.model"),
  max_source_tokens: int = 128,
  shardings: ShardingsFn = None,
  draft_shardings: ShardingsFn = None,
  kernels: str = "auto",
  weights: Weights = "float",
  draft_weights: Weights | None = None,
  num_output_tokens: int | None = None,
) -> LoadedPair:
  """Return a pair of models with named sizes, random weights and a simulated acceptance rate.

  Both models do all of their computation, so the times equal those of real models. Acceptance is
  simulated (`SimulatedModel`), and the outputs have no meaning.

  Args:
    target: size of the target M_p; see `named_config`.
    draft: size of the draft M_q, or a function that loads a draft for a `LoadedTarget`.
    alpha: simulated acceptance rate.
    version: version of T5 ('1.0' or '1.1'), another family of encoder-decoders, such as 't5gemma',
      or a family of decoder-only models; see `named_config`.
    dtype: 'float32' or 'bfloat16'.
    vocabulary: path of the vocabulary.
    max_source_tokens: maximum number of tokens of a source, EOS included.
    shardings: see `load_pair`.
    draft_shardings: see `load_pair`.
    kernels: see `load_pair`.
    weights: see `load_pair`.
    draft_weights: see `load_pair`.
    num_output_tokens: see `random_draft`; for a draft that is given by its size.
  """
  require_count("max_source_tokens", max_source_tokens)
  version, kind = version_name(version), named_dtype(dtype)
  words = open_vocabulary(vocabulary)
  config, target_params = random_model(target, version, kind, words, shardings, kernels, weights)
  if isinstance(draft, str):
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
  model = SimulatedModel(model_of(config), alpha, words.eos_id)
  drafter = draft(LoadedTarget(model, target_params, words))
  return LoadedPair(
    target=with_feature_layers(model, drafter.feature_layers),
    target_params=target_params,
    target_name=size_name(version, target),
    draft=drafter.build,
    draft_params=drafter.params,
    draft_name=drafter.name,
    vocabulary=words,
    task=f"simulated, alpha {model.alpha:g}",
    dtype=dtype,
    max_source_tokens=max_source_tokens,
    kernels=config.kernels + "+int8" * (weights == "int8"),
    simulated_alpha=model.alpha,
    continues=not config.has_encoder,
  )


def random_draft(
  target: LoadedTarget,
  size: str,
  version: str | float = "1.1",
  dtype: str = "float32",
  inner_alpha: float | None = None,
  shardings: ShardingsFn = None,
  kernels: str = "auto",
  weights: Weights = "float",
  num_output_tokens: int | None = None,
) -> DraftFactory:
  """Return a draft model of a named size with random weights.

  Args:
    target: target of the pair.
    size: size of the model; see `named_config`.
    version: see `random_pair`.
    dtype: 'float32' or 'bfloat16'.
    inner_alpha: simulated acceptance rate of the inner draft, if this model is the `draft` of a
      `hierarchical_draft`. Such a model cannot propose tokens alone. None for any other model.
    shardings: see `load_pair`.
    kernels: see `load_pair`.
    weights: see `load_pair`.
    num_output_tokens: number of tokens that have logits, the first ones of the vocabulary; None for
      all tokens.
  """
  version = version_name(version)
  config, params = random_model(
    size,
    version,
    named_dtype(dtype),
    target.vocabulary,
    shardings,
    kernels,
    weights,
    num_output_tokens,
  )
  model: Model = model_of(config)
  if inner_alpha is not None:
    model = SimulatedModel(model, inner_alpha, target.vocabulary.eos_id)
  name = draft_name(size_name(version, size), config)
  return DraftFactory(name, functools.partial(model_draft, model), params)


def size_name(version: str, size: str) -> str:
  """Return the name of a model with random weights, for records."""
  return f"{version if version.isidentifier() else f't5_{version}'}_{size}"


def random_model(
  size: str,
  version: str,
  dtype,
  words: Vocabulary,
  shardings: ShardingsFn,
  kernels: str,
  weights: Weights = "float",
  num_output_tokens: int | None = None,
) -> tuple[Config, Any]:
  """Return a named configuration and random parameters of the given dtype and shardings."""
  config = named_config(version, size, dtype=dtype)
  config = dataclasses.replace(config, eos_id=words.eos_id, pad_id=words.pad_id)
  if len(words) > config.vocab_size:
    raise InputError(
      f"{words.path} has {len(words)} tokens, more than the {config.vocab_size} of {version} "
      f"{size}; give a smaller vocabulary."
    )
  config = laid_out(config, shardings, kernels)
  config = dataclasses.replace(config, weights=weights, num_output_tokens=num_output_tokens)
  leaves, tree = jax.tree.flatten_with_path(param_shapes(config))
  places = jax.tree.leaves(make_shardings(shardings, config)) if shardings else [None] * len(leaves)

  @functools.partial(jax.jit, static_argnames=("shape", "place", "dtype"))
  def random_array(key, shape, place, dtype):
    if dtype == jnp.int8:
      array = jax.random.randint(key, shape, -MAX_INT8, MAX_INT8 + 1, jnp.int8)
    elif len(shape) == 1:
      array = jnp.ones(shape, dtype)
    else:
      array = jax.random.normal(key, shape, dtype) * shape[-2] ** -0.5
    return array if place is None else jax.lax.with_sharding_constraint(array, place)

  keys = jax.random.split(jax.random.key(0), len(leaves))
  arrays = [
    random_array(key, leaf.shape, place, param_dtype(path, leaf, config))
    for key, (path, leaf), place in zip(keys, leaves, places)
  ]
  params = jax.tree.unflatten(tree, arrays)
  # The values of int8 matrices have a standard deviation of 73.
  scale = config.emb_dim**-0.5 / 73

  def special(path, array):
    if path[-1].key == "kernel_scale":
      return array * scale
    if path[-1].key == "output_tokens":
      return jnp.arange(len(array), dtype=jnp.int32)
    return array

  return config, jax.tree_util.tree_map_with_path(special, params)
