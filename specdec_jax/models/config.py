"""Configurations of encoder-decoders and decoder-only models."""

import dataclasses
from typing import Any, ClassVar, Literal

from specdec_jax.errors import InputError, require_number
from specdec_jax.models.layout import Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
  """Configuration of a transformer, with the fields that all models share.

  Attributes:
    vocab_size: V, the number of vocabulary entries. Only these tokens are emitted.
    emb_dim: E, the width of the residual stream.
    num_heads: H, the number of attention heads.
    num_kv_heads: G, the number of heads of keys and values, each of which serves H / G heads of
      queries (grouped-query attention); None for H.
    head_dim: size of each head; `num_heads * head_dim` need not be `emb_dim`.
    num_decoder_layers: L, the number of decoder layers.
    gated: whether feed-forward blocks are gated (two input projections), as in T5 1.1.
    activation: 'gelu' (tanh approximation), 'gelu_exact' (BART), 'relu' (T5 1.0) or 'silu'
      (Flan-UL2).
    norm_position: where the norms of a block are: 'before' the block (T5), 'after' the residual
      connection (BART), or 'both' before the block and before the residual connection (Gemma).
    embedding_norm: whether a norm follows the embeddings (BART).
    tied_logits: True if logits are computed with the token embeddings; False if they are computed
      with a separate matrix.
    logits_cap: soft cap of logits, cap * tanh(logits / cap); None for no cap.
    attention_cap: soft cap of attention logits before masking; None for no cap.
    biases: whether all layers except the logits have biases, and norms subtract the mean. False for
      T5.
    num_positions: number of absolute positions, whose embeddings are parameters. It limits the
      length of sources and texts. None for relative or rotary positions.
    bias_per_layer: whether each layer has a bias of relative positions of its own, as in umT5;
      False if all layers of a stack share one, as in T5.
    rope_theta: base of rotary position embeddings (Su et al., 2021); None for other positions.
    window: in layers 0, 2, 4 and so on, a token attends only to tokens whose distance is smaller
      than this number. None for no limit.
    padded_vocab_size: number of rows of the embedding table, if it has padding (32,128 for the
      32,100 pieces of T5). Logits of padding rows are dropped.
    num_output_tokens: number of tokens that have logits of their own, for a draft; the parameter
      `output_tokens` has their ids, and the probability of all other tokens is 0. None for all
      tokens. It needs untied logits.
    layout: layout of the parameters in memory, and what computes with them.
    eos_id: id of EOS, the token that ends a text.
    start_id: id of the token that precedes each text. None for GPT-2, which has no start token; a
      text with an empty prompt starts with EOS instead.
    pad_id: id of the token that pads sources; the last token of a source must be a different one.
      In training it also pads texts.
  """

  vocab_size: int
  emb_dim: int
  num_heads: int
  num_kv_heads: int | None = None
  head_dim: int
  mlp_dim: int
  num_decoder_layers: int
  gated: bool = True
  activation: Literal["gelu", "gelu_exact", "relu", "silu"] = "gelu"
  norm_position: Literal["before", "after", "both"] = "before"
  has_final_norm: bool = True
  embedding_norm: bool = False
  tied_logits: bool = False
  logits_bias: bool = False
  logits_cap: float | None = None
  attention_cap: float | None = None
  biases: bool = False
  num_positions: int | None = None
  bias_per_layer: bool = False
  rope_theta: float | None = None
  window: int | None = None
  padded_vocab_size: int | None = None
  num_output_tokens: int | None = None
  layout: Layout = Layout()
  dropout_rate: float = 0.0
  eos_id: int = 1
  start_id: int | None = 0
  pad_id: int = 0

  def __post_init__(self):
    require_number("dropout_rate", self.dropout_rate, 0, 1, "[)")
    if self.table_size < self.vocab_size:
      raise InputError(
        f"padded_vocab_size is {self.padded_vocab_size}, smaller than vocab_size "
        f"{self.vocab_size}; it must hold every vocabulary entry."
      )

  @property
  def kv_heads(self) -> int:
    """G, the number of heads of keys and values."""
    return self.num_kv_heads or self.num_heads

  @property
  def has_shared_bias(self) -> bool:
    """True if all layers share one bias of relative positions, as in T5."""
    return self.num_positions is None and self.rope_theta is None and not self.bias_per_layer

  @property
  def table_size(self) -> int:
    """Number of rows of the embedding table: V plus padding."""
    return self.padded_vocab_size or self.vocab_size

  @property
  def output_size(self) -> int:
    """Number of columns of the matrix that computes logits."""
    return self.num_output_tokens or self.table_size

  def with_layout(self, **changes: Any) -> Any:
    """Return the configuration with other values of fields of its layout."""
    return dataclasses.replace(self, layout=dataclasses.replace(self.layout, **changes))


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(TransformerConfig):
  """Configuration of an encoder-decoder: T5 (Raffel et al., 2020), T5Gemma, BART or Whisper.

  Attributes:
    encoder_sizes: (emb_dim, num_heads, num_kv_heads, head_dim, mlp_dim) of the encoder, if they
      differ from those of the decoder.
    encoder_embeddings: whether the encoder has its own table of token embeddings.
    num_mels: M, the number of features of each frame of a source, if sources are speech (Whisper);
      None for sources that are tokens.
    source_positions: number of absolute positions of the encoder, if it differs from that of the
      decoder.
  """

  has_encoder: ClassVar[bool] = True
  embedding_std: ClassVar[float] = 1.0

  num_encoder_layers: int
  start_id: int = 0
  encoder_sizes: tuple[int, int, int, int, int] | None = None
  encoder_embeddings: bool = False
  num_mels: int | None = None
  source_positions: int | None = None

  def __post_init__(self):
    super().__post_init__()
    if self.encoder_sizes is not None:
      object.__setattr__(self, "encoder_sizes", tuple(self.encoder_sizes))  # JSON has lists only

  @property
  def encoder(self) -> "T5Config":
    """Configuration with the sizes of the encoder."""
    names = "emb_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"
    sizes: dict[str, Any] = dict(zip(names, self.encoder_sizes or ()))
    if self.source_positions is not None:
      sizes["num_positions"] = self.source_positions
    return dataclasses.replace(self, **sizes, encoder_sizes=None) if sizes else self

  @property
  def logits_divisor(self) -> float:
    """Number that hidden states are divided by before tied logits are computed."""
    return self.emb_dim**0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
  """Configuration of a decoder-only model that continues its prompt, such as GPT-2 or LaMDA.

  EOS also marks the end of a prompt, but is not processed as part of the prompt.
  """

  has_encoder: ClassVar[bool] = False
  embedding_std: ClassVar[float] = 0.02
  logits_divisor: ClassVar[float] = 1.0
