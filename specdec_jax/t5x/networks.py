"""Conversion between the configurations of t5x's T5 network and of the T5 in `models.t5`.

Both networks take the same tree of parameters. `extra_ids` fits a vocabulary to a network.
"""

import jax.numpy as jnp
import seqio
from flax import linen as nn
from t5x.examples.t5 import network

from specdec_jax.data.vocabularies import count_extra_ids
from specdec_jax.errors import InputError
from specdec_jax.models.config import T5Config
from specdec_jax.models.layout import Layout


def same_config(module: nn.Module) -> T5Config:
  """Return the config with which `T5Model` takes the parameters of a t5x network unchanged."""
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
    layout=Layout(dtype=jnp.dtype(config.dtype)),
  )


def t5x_network(config: T5Config, dtype: str | None = None) -> network.Transformer:
  """Return the t5x network of a config that is not fused, by default with its dtype.

  `same_config` of this network is the config again, except that vocab_size includes padding, and
  that the dropout rate is 0.
  """
  return network.Transformer(
    network.T5Config(
      vocab_size=config.table_size,
      dtype=jnp.dtype(dtype or config.layout.dtype),
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


def extra_ids(module: nn.Module, vocabulary: str) -> int:
  """Return the number of sentinels to add to the SentencePiece model at the path `vocabulary`.

  It is 100, as in T5, if the SentencePiece model has no sentinels and the embedding table of the
  network has exactly the rows for the pieces and 100 sentinels, padded or not. Otherwise it is 0.
  """
  tokenizer = seqio.SentencePieceVocabulary(vocabulary).tokenizer
  pieces = [tokenizer.id_to_piece(i) for i in range(tokenizer.get_piece_size())]
  return count_extra_ids(pieces, module.config.vocab_size)
