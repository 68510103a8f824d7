"""T5 as t5x has it and as we have it, of one tree of parameters."""

import jax.numpy as jnp
from flax import linen as nn
from t5x.examples.t5 import network

from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config


def same_config(module: nn.Module) -> T5Config:
  """The config with which our T5 takes the parameters of a t5x network as they are.

  Raises:
    InputError: the network is not one of t5x.examples.t5, or of a shape that we do not have.
  """
  if not isinstance(module, network.Transformer):
    raise InputError(
      f"The network is a {type(module).__module__}.{type(module).__name__}; speculative decoding "
      "knows t5x.examples.t5.network.Transformer."
    )
  config = module.config
  activation, *linear = config.mlp_activations
  if linear not in ([], ["linear"]) or config.float32_attention_logits:
    raise InputError(
      f"The network has mlp_activations {config.mlp_activations} and float32_attention_logits "
      f"{config.float32_attention_logits}; T5's are ('relu',) or ('gelu', 'linear'), and False."
    )
  return T5Config(
    vocab_size=config.vocab_size,
    emb_dim=config.emb_dim,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    mlp_dim=config.mlp_dim,
    num_encoder_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    gated=bool(linear),
    activation=activation,
    tied_logits=config.logits_via_embedding,
    dtype=jnp.dtype(config.dtype),
  )


def t5x_network(config: T5Config) -> network.Transformer:
  """The t5x network with the parameters of a config that is not fused: inverse of `same_config`."""
  return network.Transformer(
    network.T5Config(
      vocab_size=config.table_size,
      dtype=config.dtype,
      emb_dim=config.emb_dim,
      num_heads=config.num_heads,
      num_encoder_layers=config.num_encoder_layers,
      num_decoder_layers=config.num_decoder_layers,
      head_dim=config.head_dim,
      mlp_dim=config.mlp_dim,
      mlp_activations=(config.activation, "linear") if config.gated else (config.activation,),
      dropout_rate=config.dropout_rate,
      logits_via_embedding=config.tied_logits,
    )
  )
