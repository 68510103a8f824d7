"""Learned draft heads: small modules that are trained for one target, one file per kind."""

import dataclasses
from typing import Any

from jax import Array
from jaxtyping import Key

from specdec_jax.drafts.heads.base import DraftHead, SpeculatorConfig
from specdec_jax.drafts.heads.conditioned import ConditionedHead
from specdec_jax.drafts.heads.drafter import DrafterHead
from specdec_jax.drafts.heads.eagle import EagleHead
from specdec_jax.drafts.heads.eagle_text import EagleTextHead
from specdec_jax.drafts.heads.early_exit import EarlyExitHead
from specdec_jax.drafts.heads.features import FeaturesHead
from specdec_jax.drafts.heads.medusa import MedusaHead
from specdec_jax.drafts.heads.parallel import ParallelHead
from specdec_jax.drafts.heads.pass_embeddings import PassHead
from specdec_jax.drafts.heads.shared_encoder import SharedEncoderHead
from specdec_jax.errors import InputError
from specdec_jax.models import families
from specdec_jax.models.config import TransformerConfig

AnyConfig = families.Config | SpeculatorConfig

HEADS: dict[str, type[DraftHead]] = {
  "heads": MedusaHead,
  "eagle": EagleHead,
  "parallel": ParallelHead,
  "pass": PassHead,
  "early_exit": EarlyExitHead,
  "shared_encoder": SharedEncoderHead,
  "conditioned": ConditionedHead,
  "features": FeaturesHead,
  "eagle_text": EagleTextHead,
  "drafter": DrafterHead,
}


def head_of(config: SpeculatorConfig) -> DraftHead:
  """Return the draft head that a configuration describes.

  Raises:
    InputError: the configuration names a kind of head that does not exist.
  """
  if config.kind not in HEADS:
    raise InputError(f"kind is {config.kind!r}; it must be one of {', '.join(map(repr, HEADS))}.")
  return HEADS[config.kind](config)


def init_params(config: AnyConfig, rng: Key[Array, ""]) -> Any:
  """Return random parameters (float32) of a model or of a learned draft head."""
  if isinstance(config, SpeculatorConfig):
    return head_of(config).init(rng)
  return families.init_params(config, rng)


def speculator_config(
  target: TransformerConfig,
  kind: str = "parallel",
  gamma: int = 8,
  emb_dim: int = 160,
  mlp_dim: int = 512,
  num_layers: int = 2,
  rank: int = 64,
  exit_layers: int = 1,
  layers: tuple[int, ...] | None = None,
  num_encoder_layers: int = 1,
  num_heads: int | None = None,
) -> SpeculatorConfig:
  """Return the configuration of a draft head for a target; see `SpeculatorConfig`.

  `num_layers` is `SpeculatorConfig.num_decoder_layers`. The other arguments have the same names.
  `num_heads` is that of the target by default.

  Raises:
    InputError: there is no head of this kind, a size is not a positive integer, or the head does
      not fit the target.
  """
  config = SpeculatorConfig(
    kind=kind,
    vocab_size=target.vocab_size,
    padded_vocab_size=target.padded_vocab_size,
    state_dim=target.emb_dim,
    has_encoder=target.has_encoder,
    num_heads=target.num_heads if num_heads is None else num_heads,
    num_kv_heads=target.num_kv_heads if num_heads is None else None,
    head_dim=target.head_dim,
    gamma=gamma,
    emb_dim=emb_dim,
    mlp_dim=mlp_dim,
    num_decoder_layers=num_layers,
    rank=rank,
    exit_layers=exit_layers,
    layers=layers,
    num_encoder_layers=num_encoder_layers,
    dtype=target.dtype,
    eos_id=target.eos_id,
    start_id=target.start_id,
    pad_id=target.pad_id,
  )
  if features := head_of(config).feature_layers:
    config = dataclasses.replace(config, state_dim=target.emb_dim * len(features))
  head = head_of(config)
  head.require_target(target)
  return head.config
