"""Top-beta acceptance: draft tokens among the target's best are accepted (lossy).

Source: Xia et al., Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
Generation (2023).
"""

import dataclasses
import math

from jax import Array, lax
from jaxtyping import Bool, Float

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.verify.lossy import AcceptableSetVerifier
from specdec_jax.errors import require_count, require_number


@dataclasses.dataclass(frozen=True)
class TopBetaVerifier(AcceptableSetVerifier):
  """Verifier with top-beta acceptance (SpecDec; Xia et al., 2023).

  It accepts a token that is among the `beta` most probable tokens of the target, if its
  log-probability is within `tau` of that of the most probable token.

  Attributes:
    beta: maximum number of acceptable tokens, except for ties.
    tau: maximum difference of log-probabilities, in nats.
  """

  sampling: Sampling
  beta: int = 3
  tau: float = 1.0

  def __post_init__(self):
    require_count("beta", self.beta)
    object.__setattr__(self, "tau", require_number("tau", self.tau, 0, math.inf))

  def acceptable(self, p: Float[Array, "*batch V"]) -> Bool[Array, "*batch V"]:
    """Return a mask of the tokens that are among the most probable and close to the maximum."""
    best, _ = lax.top_k(p, min(self.beta, p.shape[-1]))
    return (p >= best[..., -1:]) & (p >= best[..., :1] * math.exp(-self.tau))
