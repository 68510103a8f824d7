"""BiLD: a small model hands over where it is not confident, and the target rolls back (lossy).

Source: Kim et al., Speculative Decoding with Big Little Decoder (NeurIPS 2023).
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from specdec_jax.contrib.stopping import StoppingDraft, confidence
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DraftOptions, DraftSpec, Loaded, LoadsDraft
from specdec_jax.core.verify.lossy import AcceptableSetVerifier
from specdec_jax.drafts.composed import build_model
from specdec_jax.errors import require_number


def hand_over_draft(target: Loaded, draft: LoadsDraft, fallback: float = 0.6) -> DraftSpec:
  """Return a draft model that proposes tokens while it is confident (`HandOverDraft`; BiLD)."""
  model = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> HandOverDraft:
    return HandOverDraft(build_model(model, sampling, tree, options), fallback)

  name = f"{model.name} (hands over below {fallback:g})"
  return dataclasses.replace(model, name=name, build=build, path=None)


@dataclasses.dataclass(frozen=True)
class HandOverDraft(StoppingDraft):
  """A draft that ends before the first token of which the model is not confident (BiLD's fallback).

  The target writes that token, so a proposal may be empty. With `RollbackVerifier`, this is
  BiLD (Kim et al., 2023); with an exact verifier, outputs have the target's distribution.

  Attributes:
    threshold: lowest probability of the model's most probable token at which it is proposed.
  """

  min_length = 0

  def proposes(
    self,
    threshold: float | Float[Array, " B"],
    reach: Float[Array, " B"],
    logits: Float[Array, "B V"],
  ) -> tuple[Bool[Array, " B"], Float[Array, " B"]]:
    lowest = jnp.minimum(reach, confidence(logits))
    return lowest >= threshold, lowest


@dataclasses.dataclass(frozen=True)
class RollbackVerifier(AcceptableSetVerifier):
  """Verifier that rolls back only where the target disagrees strongly (BiLD; Kim et al., 2023).

  It accepts a token x if -log p(x) is at most `rollback`. The next token is sampled from p.

  Attributes:
    rollback: maximum of -log p(x), in nats.
  """

  sampling: Sampling
  rollback: float = 5.0

  def __post_init__(self):
    object.__setattr__(self, "rollback", require_number("rollback", self.rollback, 0, math.inf))

  def acceptable(self, p: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
    """Return a mask of the tokens that are not rolled back."""
    return p >= math.exp(-self.rollback)

  def next_weights(
    self, p: Float[Array, "*batch V"], acceptable: Bool[Array, "*batch V"]
  ) -> Float[Array, "*batch V"]:
    return p
