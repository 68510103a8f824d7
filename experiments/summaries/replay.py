"""Targets of published sizes that write given texts, to time real acceptance at any size.

Such a target has random weights and does all of its computation. Its logits are then changed so
that at temperature 0 it writes the outputs of another target. Drafts that copy from the source, or
draft models of the other target, are thus accepted as often as with that target, and the times are
those of the published size.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specdec_jax.core.arrays import gather
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.core.trees import AnyTree, NodeLayout, chain, place_chain
from specdec_jax.core.types import WrappedModel
from specdec_jax.data.vocabulary import padded
from specdec_jax.errors import InputError
from specdec_jax.models.families import model_of
from specdec_jax.models.layout import for_device
from specdec_jax.models.simulated import CERTAIN
from specdec_jax.models.sizes import version_name
from specdec_jax.pair import Pair
from specdec_jax.random_models import random_model, size_name


class ReplayParams(NamedTuple):
  """Parameters of a `ReplayModel`.

  Attributes:
    model: parameters of the wrapped model.
    prompts: padded prompts of the M texts.
    texts: tokens of the texts.
  """

  model: Any
  prompts: Int[Array, "M P"]
  texts: Int[Array, "M T"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReplayCache:
  """Cache of a `ReplayModel`: the cache of its model, and the text of each row.

  Attributes:
    model: cache of the wrapped model.
    text: tokens of the text of each row.
  """

  model: Any
  text: Int[Array, "B T"]

  @property
  def length(self) -> Int[Array, " B"]:
    """Number of cached tokens of each row."""
    return self.model.length


@dataclasses.dataclass(frozen=True)
class ReplayModel(WrappedModel):
  """Target that runs `model` and whose argmax is the next token of the text of a row's prompt.

  Attributes:
    model: the wrapped model.
    num_tokens: size of the vocabulary of the texts, V. The logits of all other tokens are computed,
      and then left out.
  """

  num_tokens: int

  @property
  def vocab_size(self) -> int:
    return self.num_tokens

  def prefill(
    self, params: ReplayParams, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], ReplayCache]:
    hidden, cache = self.model.prefill(params.model, prompt, num_slots)
    width = params.prompts.shape[1]
    wide = jnp.pad(prompt, ((0, 0), (0, max(0, width - prompt.shape[1]))))[:, :width]
    row = (params.prompts == wide[:, None]).all(axis=-1).argmax(axis=1)
    return hidden, ReplayCache(cache, params.texts[row])

  def extend(
    self,
    params: ReplayParams,
    cache: ReplayCache,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], ReplayCache]:
    logits, hidden, inner = self.model.extend(params.model, cache.model, tokens, tree, first)
    # Slot 0 holds the start token, so token i of the text follows position i.
    place = place_chain if tree is None else tree.place
    positions = place(cache.length, first, tokens.shape[1], num_slots=0).positions
    next_tokens = gather(cache.text, jnp.clip(positions, 0, cache.text.shape[1] - 1))
    # Added to the logits, so that the compiler cannot drop the model's computation.
    bonus = CERTAIN * jax.nn.one_hot(next_tokens, self.num_tokens)
    logits = logits[..., : self.num_tokens].astype(jnp.float32) + bonus
    return logits, hidden, ReplayCache(inner, cache.text)

  def commit(
    self,
    cache: ReplayCache,
    length: Int[Array, " B"],
    tree: AnyTree | None = None,
    path: Int[Array, "B D"] | None = None,
  ) -> ReplayCache:
    return ReplayCache(self.model.commit(cache.model, length, tree, path), cache.text)


def replayed_pair(
  pair: Pair,
  texts: Sequence[str],
  size: str = "base",
  version: str | float = "1.1",
  dtype: str = "float32",
  max_new_tokens: int = 64,
  kernels: str = "auto",
) -> Pair:
  """Return a pair whose target has a published size and writes the outputs of the given pair.

  Measure it at temperature 0, on the same texts and with the same `max_new_tokens`. The draft is
  that of the given pair; it must not use the target's hidden states.

  Args:
    pair: pair whose argmax outputs are written.
    texts: sources.
    size: size of the target with random weights; see `named_config`.
    version: version of T5; see `named_config`.
    dtype: 'float32' or 'bfloat16'.
    max_new_tokens: maximum number of tokens of each output.
    kernels: see `load_pair`.
  """
  if pair.continues:
    raise InputError("Replaying needs an encoder-decoder.")
  decode = pair.decode_fn(Sampling(0.0), chain(0))
  prompts = np.asarray(pair.prompt(texts))
  outputs = [
    np.asarray(
      decode(prompts[i : i + 1], row_keys(0, i, 1), max_new_tokens=max_new_tokens).tokens[0]
    )
    for i in range(len(texts))
  ]
  version = version_name(version)
  config, params = random_model(size, version, for_device(dtype, kernels), pair.vocabulary)
  rows = jnp.asarray(padded([row.tolist() for row in outputs], max_new_tokens))
  replayed = pair.with_target(
    model=ReplayModel(model_of(config), len(pair.vocabulary)),
    params=ReplayParams(params, jnp.asarray(prompts), rows),
    name=size_name(version, size),
    path=None,
  )
  return dataclasses.replace(replayed, task=f"{pair.task}, replayed")
