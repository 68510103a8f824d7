"""Base classes of models and drafts that wrap another one and change some of its methods.

Axis letters are those of `core.types`.
"""

import dataclasses
from typing import Any

from jax import Array
from jaxtyping import Float, Int, Key

from specdec_jax.core.trees import AnyTree, NodeLayout
from specdec_jax.core.types import Context, Draft, Model, Outcome, Proposal


@dataclasses.dataclass(frozen=True)
class WrappedModel:
  """Base class of a model that wraps another model and changes some of its methods.

  Attributes:
    model: the wrapped model.
  """

  model: Model

  @property
  def vocab_size(self) -> int:
    return self.model.vocab_size

  @property
  def eos_id(self) -> int:
    return self.model.eos_id

  def prompt_tokens(self, prompt: Int[Array, "B P"]) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    return self.model.prompt_tokens(prompt)

  def prefill(
    self, params: Any, prompt: Int[Array, "B P"], num_slots: int
  ) -> tuple[Float[Array, "B C E"], Any]:
    return self.model.prefill(params, prompt, num_slots)

  def extend(
    self,
    params: Any,
    cache: Any,
    tokens: Int[Array, "B K"],
    tree: NodeLayout | None = None,
    first: Int[Array, ""] | int = 0,
  ) -> tuple[Float[Array, "B K V"], Float[Array, "B K E"], Any]:
    return self.model.extend(params, cache, tokens, tree, first)

  def commit(
    self,
    cache: Any,
    length: Int[Array, " B"],
    tree: AnyTree | None = None,
    path: Int[Array, "B D"] | None = None,
  ) -> Any:
    return self.model.commit(cache, length, tree, path)


@dataclasses.dataclass(frozen=True)
class WrappedDraft(Draft):
  """Base class of a draft that wraps another draft, uses its state and changes some methods.

  Attributes:
    draft: the wrapped draft.
  """

  draft: Draft

  @property
  def tree(self) -> AnyTree:  # type: ignore[override]
    return self.draft.tree

  @property
  def depends_on_outcomes(self) -> bool:  # type: ignore[override]
    return self.draft.depends_on_outcomes

  @property
  def independent_siblings(self) -> bool:  # type: ignore[override]
    return self.draft.independent_siblings

  def init(self, params: Any, context: Context, hidden: Float[Array, "B C E"]) -> Any:
    return self.draft.init(params, context, hidden)

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    return self.draft.propose(params, state, context, rng)

  def observe(self, params: Any, state: Any, outcome: Outcome) -> Any:
    return self.draft.observe(params, state, outcome)
