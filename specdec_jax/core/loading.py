"""Settings of decoding."""

import dataclasses

from specdec_jax.core.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
  """Settings of decoding that functions for measurement and calibration take; see `generate`."""

  sampling: Sampling
  batch_size: int = 1
  max_new_tokens: int = 128
  seed: int = 0
  lenience: float = 1.0
