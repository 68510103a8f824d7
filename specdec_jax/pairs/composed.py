"""Drafts made of others, as `load_pair` takes them with their arguments bound.

Each `draft` among the arguments is a function of a vocabulary, as `load_pair`'s own may be: another
of these, or `checkpoint_draft` for a checkpoint.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import (
  AnyTree,
  DynamicTree,
  branching,
  chain,
  require_chain,
  require_static,
)
from specdec_jax.core.types import Draft
from specdec_jax.drafts.cascade import CascadeDraft
from specdec_jax.drafts.forest import ForestDraft
from specdec_jax.drafts.hierarchical import HierarchicalDraft
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.stop_at_miss import StopAtMissDraft
from specdec_jax.drafts.stopping import StoppingDraft
from specdec_jax.errors import InputError, require_count, require_types, shown
from specdec_jax.loading import DraftFactory, LoadedTarget, load_draft

LoadsDraft = Callable[[LoadedTarget], DraftFactory]


def hierarchical_draft(
  target: LoadedTarget, draft: LoadsDraft, inner: LoadsDraft, inner_gamma: int = 3
) -> DraftFactory:
  """A draft model whose guesses are drafted in turn (Section 6).

  Args:
    target: the target of the pair.
    draft: the model.
    inner: the cheaper draft; for more depth another of these.
    inner_gamma: guesses of the cheaper draft in each of its rounds.

  Raises:
    InputError: (when it is made for a sampling) the draft is no model.
  """
  require_types(hierarchical_draft, locals())
  model, cheaper = (load_draft(make, target) for make in (draft, inner))

  def make(sampling: Sampling, tree: AnyTree) -> HierarchicalDraft:
    guesses = cheaper.build(sampling, chain(inner_gamma))
    tree = require_static("a hierarchical draft", tree)
    return HierarchicalDraft(_of_model(model, sampling, tree).model, guesses, sampling, tree)

  return DraftFactory(f"{model.name} by {cheaper.name}", make, (model.params, cheaper.params))


def forest_draft(target: LoadedTarget, drafts: Sequence[LoadsDraft]) -> DraftFactory:
  """Several drafts at once, each a branch of one tree (SpecInfer); each is asked for all guesses.

  One named twice is drawn from twice.
  """
  require_types(forest_draft, locals())
  made = [load_draft(draft, target) for draft in drafts]

  def make(sampling: Sampling, tree: AnyTree) -> ForestDraft:
    return ForestDraft(tuple(one.build(sampling, tree) for one in made), len(target.vocabulary))

  name = " and ".join(one.name for one in made)
  return DraftFactory(name, make, tuple(one.params for one in made))


def cascade_draft(
  target: LoadedTarget, drafts: Sequence[LoadsDraft], gammas: Sequence[int]
) -> DraftFactory:
  """Several drafts in a row, cheaper and cheaper.

  Args:
    target: the target of the pair.
    drafts: the first guesses first.
    gammas: how many each of them guesses but the last, whose are the rest.

  Raises:
    InputError: gammas are not one fewer than drafts, or one is no whole number from 1.
  """
  require_types(cascade_draft, locals())
  if len(gammas) != len(drafts) - 1:
    raise InputError(
      f"There are {len(drafts)} drafts in a row and {len(gammas)} gammas; give one to each but the "
      "last, which guesses the rest."
    )
  for gamma in gammas:
    require_count("gamma", gamma)
  made = [load_draft(draft, target) for draft in drafts]

  def make(sampling: Sampling, tree: AnyTree) -> CascadeDraft:
    require_chain("a cascade", tree)
    row, left = [], tree.depth
    for one, gamma in zip(made, (*gammas, tree.depth)):
      if left:
        row.append(one.build(sampling, chain(min(gamma, left))))
        left -= min(gamma, left)
    return CascadeDraft(tuple(row), len(target.vocabulary))

  name = ", then ".join(one.name for one in made)
  return DraftFactory(name, make, tuple(one.params for one in made))


def tree_draft(
  target: LoadedTarget,
  draft: LoadsDraft,
  widths: Sequence[int] = (),
  num_guesses: int | None = None,
) -> DraftFactory:
  """A draft whose guesses are a tree, gamma deep, wherever a chain is asked for.

  Args:
    target: the target of the pair.
    draft: that proposes trees.
    widths: children of each node at depth 0, 1, ...; at greater depths each has one.
    num_guesses: instead of widths: of a tree whose shape changes.

  Raises:
    InputError: both are given, or neither.
  """
  require_types(tree_draft, locals())
  if bool(widths) == (num_guesses is not None):
    raise InputError("A tree has widths, or num_guesses if its shape is to change; give one.")

  def shape(depth: int) -> AnyTree:
    if num_guesses is not None:
      return DynamicTree(num_guesses if depth > 1 else 1, depth)  # one deep: its best guess
    return branching(*(*widths, *[1] * (depth - len(widths)))[:depth])

  def of_trees(made: DraftFactory) -> DraftFactory:
    told = f"tree of {num_guesses}" if num_guesses else f"tree {'x'.join(map(str, widths))}"
    make = lambda sampling, tree: made.build(sampling, shape(tree.depth))
    return DraftFactory(f"{made.name}, {told}", make, made.params)

  return of_trees(load_draft(draft, target))


def stopping_draft(target: LoadedTarget, draft: LoadsDraft, threshold: float) -> DraftFactory:
  """A draft model that stops where it is no longer sure; gamma is the most that it guesses.

  Args:
    target: the target of the pair.
    draft: the model.
    threshold: as in `StoppingDraft`.
  """
  require_types(stopping_draft, locals())
  model = load_draft(draft, target)

  def make(sampling: Sampling, tree: AnyTree) -> StoppingDraft:
    return StoppingDraft(_of_model(model, sampling, tree), threshold)

  return DraftFactory(f"{model.name} (stops below {threshold:g})", make, model.params)


def stop_at_miss_draft(target: LoadedTarget, draft: LoadsDraft) -> DraftFactory:
  """A draft's guesses as long as it knows any; gamma is the most (`drafts.known`)."""
  require_types(stop_at_miss_draft, locals())
  made = load_draft(draft, target)
  make = lambda sampling, tree: StopAtMissDraft(made.build(sampling, tree))
  return DraftFactory(f"{made.name}, as far as known", make, made.params)


def _of_model(drafter: DraftFactory, sampling: Sampling, tree: AnyTree) -> ModelDraft:
  made = drafter.build(sampling, tree)
  if not isinstance(made, ModelDraft):
    raise InputError(f"{drafter.name} is no model with a tree of one shape, and here it must be.")
  return made


def draft_sampling(
  target: LoadedTarget,
  draft: LoadsDraft,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
) -> DraftFactory:
  """A draft that samples in its own way, whatever the target does (Section 6): any q is exact.

  Args:
    target: the target of the pair.
    draft: that draws its guesses.
    temperature: of q, where the target's is above 0; None for the target's.
    top_k: of q; None for the target's.
    top_p: of q; None for the target's.
  """
  require_types(draft_sampling, locals())
  asked = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
  given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
  Sampling(**given)  # raises what is wrong with them, before a model is loaded
  made = load_draft(draft, target)

  def make(sampling: Sampling, tree: AnyTree) -> Draft:
    # What is most probable is argmax's best guess, however q is adjusted.
    own = dataclasses.replace(sampling, **given) if sampling.temperature > 0 else sampling
    return made.build(own, tree)

  number = lambda value: f"{value:g}" if isinstance(value, float) else shown(value)
  words = ", ".join(f"{name} {number(value)}" for name, value in given.items())
  return DraftFactory(f"{made.name} ({words})" if words else made.name, make, made.params)
