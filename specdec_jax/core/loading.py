"""Types of loaded targets and drafts, and of the settings of decoding."""

import dataclasses
from typing import Any, NamedTuple, Protocol

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Draft, DraftOptions, Model


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
  """Settings of decoding that functions for measurement and calibration take.

  Attributes:
    sampling: sampling method of the target.
    batch_size: number of outputs that are decoded together.
    max_new_tokens: limit for each output, EOS included.
    seed: seed of all sampling.
    lenience: lenience of the verifier (Appendix A.5); 1 is exact.
  """

  sampling: Sampling
  batch_size: int = 1
  max_new_tokens: int = 128
  seed: int = 0
  lenience: float = 1.0


class LoadedTarget(NamedTuple):
  """Loaded target: the argument of functions that load drafts.

  Attributes:
    model: M_p.
    params: parameters of the model.
    vocabulary: vocabulary of target and draft.
  """

  model: Model
  params: Any
  vocabulary: Any


class BuildDraft(Protocol):
  """Function that returns a draft for a sampling method and a tree."""

  def __call__(
    self, sampling: Sampling, tree: AnyTree, options: DraftOptions = DraftOptions()
  ) -> Draft: ...


class DraftFactory(NamedTuple):
  """Draft that is loaded but not yet built for a sampling method and a tree.

  Attributes:
    name: name of the draft in records.
    build: function of (sampling, tree, options) that returns the draft; it has a default for
      `options`.
    params: parameters of the draft.
    path: path of the draft's checkpoint, for records; None if it has no checkpoint or several.
    feature_layers: decoder layers of the target whose outputs the draft reads as the target's
      hidden states; by default, it reads the states after the final norm, or none.
  """

  name: str
  build: BuildDraft
  params: Any = ()
  path: str | None = None
  feature_layers: tuple[int, ...] = ()
