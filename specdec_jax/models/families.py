"""For a shape of any family its module, its model, and its parameters' layouts."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.models.conditioned import ConditionedT5
from specdec_jax.models.config import GPTConfig, T5Config, TransformerConfig
from specdec_jax.models.decoder import empty_slots
from specdec_jax.models.gpt import GPT, GPTModel
from specdec_jax.models.speculator import Head, SpeculatorConfig, in_rows
from specdec_jax.models.t5 import T5, T5Cache, T5Model

Config = T5Config | GPTConfig
AnyConfig = Config | SpeculatorConfig


def module_of(config: Config) -> T5 | GPT:
  """The Flax module; called with (source, inputs, deterministic) it gives teacher-forced logits."""
  return T5(config) if isinstance(config, T5Config) else GPT(config)


def model_of(config: Config) -> T5Model | GPTModel:
  """The model behind the contract of the loops."""
  return T5Model(config) if isinstance(config, T5Config) else GPTModel(config)


def init_params(config: AnyConfig, rng: Array):
  """Random parameters (float32), of a T5 in t5x's tree."""
  if isinstance(config, SpeculatorConfig):
    return _init_speculator(config, rng)
  tokens = jnp.zeros((1, 1), jnp.int32)
  return module_of(config).init(rng, tokens, tokens)["params"]


def without_encoder(config: SpeculatorConfig) -> T5Config:
  """The T5 whose decoder is one of kind 'decoder' or 'anchored'; its encoder is never asked."""
  shared = {
    field.name: getattr(config, field.name) for field in dataclasses.fields(TransformerConfig)
  }
  return T5Config(**shared, num_encoder_layers=1)


def anchored(config: SpeculatorConfig) -> ConditionedT5:
  """The module of kind 'anchored'."""
  return ConditionedT5(without_encoder(config), offsets=config.gamma)


def _init_speculator(config: SpeculatorConfig, rng: Array):
  tokens, hidden = jnp.zeros((1, config.gamma), jnp.int32), jnp.zeros((1, config.state_dim))
  keys, bias = jnp.zeros((1, config.num_heads, 1, config.head_dim)), jnp.zeros((1, 1, 1, 1))
  source = ((keys, keys), bias) if config.has_encoder else (None, None)
  if config.kind == "look_ahead":
    return {"embeddings": jax.random.normal(rng, (config.gamma - 1, config.state_dim))}
  if config.kind == "exit":
    return Head(config).init(rng, hidden)["params"]
  if config.kind == "decoder":
    cross = ((keys, keys),) * config.num_decoder_layers
    cache = T5Cache(jnp.zeros(1, jnp.int32), empty_slots(config, 1, config.gamma), cross, bias)
    return T5(without_encoder(config)).init(rng, cache, tokens, method=T5.extend)["params"]
  if config.kind == "anchored":
    cross, offsets = ((keys, keys),) * config.num_decoder_layers, jnp.zeros_like(tokens)
    states = jnp.zeros((*tokens.shape, config.state_dim))
    given = tokens, states, offsets, cross, bias
    return anchored(config).init(rng, *given, method="after_each")["params"]
  project = lambda x: jnp.zeros((*x.shape[:-1], config.vocab_size))
  return in_rows(config).init(rng, hidden, tokens, source, project)["params"]


def for_decoding(config: AnyConfig, params, concatenate=jnp.concatenate):
  """The same model with fewer, larger products: (config, params).

  Queries, keys and values of self-attention come from one matrix, as do both halves of a gated
  feed-forward, and tied logits get a matrix of their own, since a product with a transposed table
  is slow on a CPU; what T5 divides them by goes into the norm before. To be called once, when a
  model is loaded; costs a copy of those matrices, or none where they are still on disk
  (`checkpoints.stored`) and `concatenate` is of such arrays.
  """

  def side_by_side(parts, *names: str):
    layers = [parts.pop(name) for name in names]
    return {part: concatenate([x[part] for x in layers], axis=-1) for part in layers[0]}

  def fuse(name: str, tree):
    if not isinstance(tree, dict):
      return tree
    tree = {k: fuse(k, v) for k, v in tree.items()}
    if name in ("attention", "self_attention"):
      tree["query_key_value"] = side_by_side(tree, "query", "key", "value")
    if name == "mlp" and config.gated:
      tree["wi"] = side_by_side(tree, "wi_0", "wi_1")
    return tree

  if config.fused:
    return config, params
  params = fuse("", params)
  if config.tied_logits:
    decoder = params["decoder"]
    decoder["logits_dense"] = {"kernel": params["token_embedder"]["embedding"].T}
    if config.logits_divisor != 1:
      decoder["decoder_norm"]["scale"] = decoder["decoder_norm"]["scale"] / config.logits_divisor
  return dataclasses.replace(config, fused=True, tied_logits=False), params
