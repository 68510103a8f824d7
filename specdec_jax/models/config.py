"""Shapes of T5 encoder-decoders: one dataclass, and the published sizes by name."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from specdec_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class T5Config:
  """Everything that fixes a T5's parameter tree and arithmetic (Raffel et al., 2020).

  Attributes:
    vocab_size: V, entries in the vocabulary; the only ids that are ever emitted.
    emb_dim: E, width of the residual stream.
    num_heads: H.
    head_dim: D, per head; H * D need not be E.
    mlp_dim: M, hidden width of the feed-forward blocks.
    num_encoder_layers: encoder depth.
    num_decoder_layers: decoder depth.
    gated: T5 1.1's gated feed-forward (two input projections) or T5 1.0's single one.
    activation: 'gelu' (1.1) or 'relu' (1.0).
    tied_logits: T5 1.0 reads logits off the embedding table, 1.1 has its own matrix.
    padded_vocab_size: rows of the embedding table when padded past V (32,128 for
      T5's 32,100 pieces); None for V. Logits of padding entries are masked.
    fused: parameters as `t5.for_decoding` lays them out: fewer, larger products.
    kernels: who multiplies matrices: 'xla', or 'skinny' for `kernels.skinny`, to decode in float32
      on a CPU; kernels of layers then come in panels (`skinny.pack`), and may be bfloat16.
    dtype: of activations; float32 or bfloat16.
    dropout_rate: for training only.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  num_encoder_layers: int
  num_decoder_layers: int
  gated: bool = True
  activation: Literal["gelu", "relu"] = "gelu"
  tied_logits: bool = False
  padded_vocab_size: int | None = None
  fused: bool = False
  kernels: str = "xla"
  dtype: Any = jnp.float32
  dropout_rate: float = 0.0

  def __post_init__(self):
    if self.activation not in ("gelu", "relu"):
      raise InputError(f"activation is {self.activation!r}; expected 'gelu' or 'relu'.")
    if self.table_size < self.vocab_size:
      raise InputError(
        f"padded_vocab_size is {self.padded_vocab_size}, smaller than vocab_size "
        f"{self.vocab_size}; it must hold every vocabulary entry."
      )

  @property
  def table_size(self) -> int:
    """Rows of the embedding table: V plus padding."""
    return self.padded_vocab_size or self.vocab_size


# (emb_dim, num_heads, head_dim, layers of each stack, mlp_dim), as published for T5 1.0
# (Raffel et al., 2020) and T5 1.1; xl is 3B and xxl 11B. tiny is t5x's test model.
_SIZES = {
  "1.0": {
    "tiny": (8, 4, 3, 2, 16),
    "small": (512, 8, 64, 6, 2048),
    "base": (768, 12, 64, 12, 3072),
    "large": (1024, 16, 64, 24, 4096),
    "xl": (1024, 32, 128, 24, 16384),
    "xxl": (1024, 128, 128, 24, 65536),
  },
  "1.1": {
    "tiny": (8, 4, 3, 2, 16),
    "small": (512, 6, 64, 8, 1024),
    "base": (768, 12, 64, 12, 2048),
    "large": (1024, 16, 64, 24, 2816),
    "xl": (2048, 32, 64, 24, 5120),
    "xxl": (4096, 64, 64, 24, 10240),
  },
}


def t5_config(size: str, version: str = "1.1", **overrides) -> T5Config:
  """The published shape of T5 `size`, in `version` '1.0' or '1.1'.

  Args:
    size: tiny (t5x's test model), small, base, large, xl (3B) or xxl (11B).
    version: '1.0' (ReLU, logits tied to the embedding) or '1.1' (gated GELU, untied).
    **overrides: fields of `T5Config` to set instead of the published ones.

  Raises:
    ValueError: an unknown size or version.
  """
  if version not in _SIZES:
    raise InputError(f"T5 version {version!r} is not known; use '1.0' or '1.1'.")
  if size not in _SIZES[version]:
    raise InputError(f"T5 size {size!r} is not known; use one of {', '.join(_SIZES[version])}.")
  emb_dim, num_heads, head_dim, num_layers, mlp_dim = _SIZES[version][size]
  published = T5Config(
    vocab_size=32100,
    padded_vocab_size=32128,
    emb_dim=emb_dim,
    num_heads=num_heads,
    head_dim=head_dim,
    mlp_dim=mlp_dim,
    num_encoder_layers=num_layers,
    num_decoder_layers=num_layers,
    gated=version == "1.1",
    activation="gelu" if version == "1.1" else "relu",
    tied_logits=version == "1.0",
  )
  return dataclasses.replace(published, **overrides)


def named_dtype(name: str):
  """The dtype of activations and parameters that a user calls `name`."""
  if name not in ("float32", "bfloat16"):
    raise InputError(f"dtype is {name!r}; use 'float32' or 'bfloat16'.")
  return jnp.dtype(name)
