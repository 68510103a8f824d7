"""Loaded targets and drafts, and the settings that functions of them share."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import Draft, Model
from specdec_jax.errors import InputError, shown


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
  """Settings of decoding that measuring and calibrating functions share.

  Attributes:
    sampling: sampling method of the target.
    batch_size: texts decoded together.
    max_new_tokens: limit for each text, EOS included.
    seed: seed of all sampling.
    lenience: lenience of the verifier (Appendix A.5); 1 is exact.
  """

  sampling: Sampling
  batch_size: int = 1
  max_new_tokens: int = 128
  seed: int = 0
  lenience: float = 1.0


class LoadedTarget(NamedTuple):
  """Target that is loaded, as the functions that load drafts take it.

  Attributes:
    model: M_p.
    params: its parameters.
    vocabulary: vocabulary of target and draft.
  """

  model: Model
  params: Any
  vocabulary: Any


class DraftFactory(NamedTuple):
  """Draft that is loaded but not yet built for a sampling method and a tree.

  Attributes:
    name: name in records.
    build: function of (sampling, tree) that returns the draft.
    params: parameters of the draft.
    path: its checkpoint, for records; None if it has none or consists of several.
  """

  name: str
  build: Callable[[Sampling, AnyTree], Draft]
  params: Any = ()
  path: str | None = None


def load_draft(load: Callable[[LoadedTarget], DraftFactory], target: LoadedTarget) -> DraftFactory:
  """Call a function that loads a draft for a target.

  Raises:
    InputError: the function returns something else than a `DraftFactory`.
  """
  factory = load(target)
  if not isinstance(factory, DraftFactory):
    raise InputError(
      f"The function given as draft returns {shown(factory)} for a target; it must return a "
      "DraftFactory (specdec_jax.loading)."
    )
  return factory
