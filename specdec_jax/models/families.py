"""Flax modules, models, parameters and fused layouts of all families."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from specdec_jax.core.types import Model, WrappedModel
from specdec_jax.errors import InputError
from specdec_jax.models.config import GPTConfig, T5Config
from specdec_jax.models.gpt import GPT, GPTModel
from specdec_jax.models.t5 import T5, T5Model
from specdec_jax.models.whisper import WhisperModel

Config = T5Config | GPTConfig


def module_of(config: Config) -> T5 | GPT:
  """Return the Flax module of a model. It maps (source, inputs) to teacher-forced logits."""
  return model_of(config).module_type(config)


def model_of(config: Config) -> T5Model | GPTModel:
  """Return the model of a configuration, which implements the `Model` contract."""
  if isinstance(config, GPTConfig):
    return GPTModel(config)
  return T5Model(config) if config.num_mels is None else WhisperModel(config)


def config_of(model: Model) -> Config | None:
  """Return the configuration of a T5 or decoder-only model, wrapped or not; None for others."""
  if isinstance(model, WrappedModel):
    return config_of(model.model)
  return model.config if isinstance(model, T5Model | GPTModel) else None


def with_feature_layers(model: Model, layers: tuple[int, ...]) -> Model:
  """Return a model whose hidden states are the outputs of `layers`; see `DecoderStack`."""
  if feature_layers(model) == layers:
    return model
  if isinstance(model, WrappedModel):
    return dataclasses.replace(model, model=with_feature_layers(model.model, layers))
  if isinstance(model, T5Model | GPTModel):
    return dataclasses.replace(model, feature_layers=layers)
  raise InputError(f"{type(model).__name__} has no layers whose outputs a draft could read.")


def feature_layers(model: Model) -> tuple[int, ...]:
  """Return the layers whose outputs are the hidden states of a model; see `DecoderStack`."""
  if isinstance(model, WrappedModel):
    return feature_layers(model.model)
  return model.feature_layers if isinstance(model, T5Model | GPTModel) else ()


def init_params(config: Any, rng: Key[Array, ""]) -> Any:
  """Return random float32 parameters of a model, or of a draft head, whose config initializes it.

  Parameters of T5 have the names of t5x.
  """
  if not isinstance(config, T5Config | GPTConfig):
    return config.init(rng)
  tokens = source = jnp.zeros((1, 1), jnp.int32)
  if isinstance(config, T5Config) and config.num_mels is not None:
    source = jnp.zeros((1, 2, config.num_mels))
  return module_of(config).init(rng, source, tokens)["params"]


def for_decoding(
  config: Any, params: Any, concatenate: Callable[..., Any] = jnp.concatenate
) -> tuple[Any, Any]:
  """Return a configuration and parameters with which a model or head runs fewer, larger matmuls.

  One matrix computes queries, keys and values of self-attention, and one matrix both input
  projections of a gated feed-forward block. Tied logits get their own matrix, because a matmul with
  a transposed embedding table is slow on a CPU; the divisor of T5's tied logits is merged into the
  norm before them. These matrices are copied, unless they are still on disk (`checkpoints`). If
  `config` is already fused, `config` and `params` are returned unchanged.
  """

  def concatenate_layers(parts: dict[str, Any], *names: str) -> dict[str, Any]:
    layers = [parts.pop(name) for name in names]
    return {part: concatenate([x[part] for x in layers], axis=-1) for part in layers[0]}

  def fuse(name: str, tree: Any) -> Any:
    if not isinstance(tree, dict):
      return tree
    tree = {k: fuse(k, v) for k, v in tree.items()}
    if name in ("attention", "self_attention"):
      tree["query_key_value"] = concatenate_layers(tree, "query", "key", "value")
    if name == "mlp" and config.gated:
      tree["wi"] = concatenate_layers(tree, "wi_0", "wi_1")
    return tree

  if config.layout.fused:
    return config, params
  params = fuse("", params)
  if config.tied_logits:
    decoder = params["decoder"]
    decoder["logits_dense"] = {"kernel": params["token_embedder"]["embedding"].T}
    if config.logits_divisor != 1:
      decoder["decoder_norm"]["scale"] = decoder["decoder_norm"]["scale"] / config.logits_divisor
  return dataclasses.replace(config.with_layout(fused=True), tied_logits=False), params
