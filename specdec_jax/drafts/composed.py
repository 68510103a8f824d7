"""Functions that load drafts composed of other drafts.

To give such a function to `load_pair`, bind all of its arguments except `target`. An argument that
loads a draft is a function from a `Loaded` to a `DraftSpec`, for example
`checkpoint_draft`, or a function of this module with its other arguments bound.
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
from specdec_jax.core.types import Draft, DraftSpec, Loaded
from specdec_jax.drafts.cascade import CascadeDraft
from specdec_jax.drafts.forest import ForestDraft
from specdec_jax.drafts.hierarchical import HierarchicalDraft
from specdec_jax.drafts.recycling import RecyclingDraft
from specdec_jax.drafts.stop_at_miss import StopAtMissDraft
from specdec_jax.drafts.stopping import AdaptiveStoppingDraft, StoppingDraft
from specdec_jax.errors import InputError, require_count, shown

LoadsDraft = Callable[[Loaded], DraftSpec]


def hierarchical_draft(
  target: Loaded, draft: LoadsDraft, inner: LoadsDraft, inner_gamma: int = 3
) -> DraftSpec:
  """Return a draft whose model is itself decoded speculatively with a cheaper draft (Section 6).

  Args:
    target: target of the pair.
    draft: function that loads the draft model.
    inner: function that loads the cheaper draft, which may be hierarchical too.
    inner_gamma: number of draft tokens that the cheaper draft proposes per round.

  Raises:
    InputError: (when the draft is built) a tree is not a chain.
  """
  model, cheaper = (load(target) for load in (draft, inner))

  def build(sampling: Sampling, tree: AnyTree) -> HierarchicalDraft:
    guesses = cheaper.build(sampling, chain(inner_gamma))
    tree = require_static("a hierarchical draft", tree)
    outer: Any = model.build(sampling, tree)  # a `ModelDraft`
    return HierarchicalDraft(outer.model, guesses, sampling, tree)

  return _joined(f"{model.name} by {cheaper.name}", build, [model, cheaper])


def forest_draft(target: Loaded, drafts: Sequence[LoadsDraft]) -> DraftSpec:
  """Return a draft that joins the proposals of several drafts in one tree (SpecInfer).

  Each draft proposes the whole tree or chain that is requested. If a draft is given twice, it is
  sampled twice.

  Args:
    target: target of the pair.
    drafts: functions that load the drafts.
  """
  factories = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree) -> ForestDraft:
    return ForestDraft(
      tuple(factory.build(sampling, tree) for factory in factories), len(target.vocabulary)
    )

  name = " and ".join(factory.name for factory in factories)
  return _joined(name, build, factories)


def cascade_draft(target: Loaded, drafts: Sequence[LoadsDraft], gammas: Sequence[int]) -> DraftSpec:
  """Return a draft that runs several drafts in sequence, usually from expensive to cheap.

  Args:
    target: target of the pair.
    drafts: functions that load the drafts, in the order in which they propose.
    gammas: number of draft tokens of each draft except the last one, which proposes the rest.

  Raises:
    InputError: `len(gammas)` is not `len(drafts) - 1`, a gamma is not a positive integer, or (when
      the draft is built) the tree is not a chain.
  """
  if len(gammas) != len(drafts) - 1:
    raise InputError(
      f"There are {len(drafts)} drafts in a row and {len(gammas)} gammas; give one gamma for each "
      "draft except the last, which proposes the rest."
    )
  for gamma in gammas:
    require_count("gamma", gamma)
  factories = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree) -> CascadeDraft:
    require_chain("a cascade", tree)
    built, missing = [], tree.depth
    for factory, gamma in zip(factories, (*gammas, tree.depth)):
      if missing:
        built.append(factory.build(sampling, chain(min(gamma, missing))))
        missing -= min(gamma, missing)
    return CascadeDraft(tuple(built), len(target.vocabulary))

  name = ", then ".join(factory.name for factory in factories)
  return _joined(name, build, factories)


def tree_draft(
  target: Loaded,
  draft: LoadsDraft,
  widths: Sequence[int] = (),
  num_guesses: int | None = None,
) -> DraftSpec:
  """Return a draft that proposes a tree of depth gamma in place of a chain of length gamma.

  Args:
    target: target of the pair.
    draft: function that loads a draft that proposes trees.
    widths: number of children of each node at depth 0, 1, ...; nodes at depths past the end of
      `widths` have one child.
    num_guesses: number of draft tokens of a dynamic tree, to be given instead of `widths`. For
      gamma 1, the tree has one draft token.

  Raises:
    InputError: both `widths` and `num_guesses` are given, or neither of them.
  """
  if bool(widths) == (num_guesses is not None):
    raise InputError("A tree has widths, or num_guesses if it is dynamic; give one.")

  def shape(depth: int) -> AnyTree:
    if num_guesses is not None:
      return DynamicTree(num_guesses if depth > 1 else 1, depth)  # depth 1: the best token only
    return branching(*(*widths, *[1] * (depth - len(widths)))[:depth])

  factory = draft(target)

  def build(sampling: Sampling, tree: AnyTree) -> Draft:
    return factory.build(sampling, shape(tree.depth))

  size = f"tree of {num_guesses}" if num_guesses else f"tree {'x'.join(map(str, widths))}"
  return dataclasses.replace(factory, name=f"{factory.name}, {size}", build=build, path=None)


def stopping_draft(
  target: Loaded, draft: LoadsDraft, threshold: float, goal: float | None = None
) -> DraftSpec:
  """Return a draft model that proposes up to gamma tokens, and stops early if it is not confident.

  Args:
    target: target of the pair.
    draft: function that loads the draft model.
    threshold: see `StoppingDraft`.
    goal: acceptance rate that the threshold is adapted to (`AdaptiveStoppingDraft`); None for a
      constant threshold.
  """
  model = draft(target)

  def build(sampling: Sampling, tree: AnyTree) -> StoppingDraft:
    built: Any = model.build(sampling, tree)  # a `ModelDraft`
    if goal is None:
      return StoppingDraft(built, threshold)
    return AdaptiveStoppingDraft(built, threshold, goal)

  rule = f"stops below {threshold:g}"
  if goal is not None:
    rule = f"stops for a rate of {goal:g}"
  return dataclasses.replace(model, name=f"{model.name} ({rule})", build=build, path=None)


def stop_at_miss_draft(target: Loaded, draft: LoadsDraft) -> DraftSpec:
  """Return a draft that ends its proposal where `draft` has no token (`drafts.stop_at_miss`).

  gamma is the maximum number of draft tokens.

  Args:
    target: target of the pair.
    draft: function that loads a draft that selects its tokens deterministically.
  """
  factory = draft(target)

  def build(sampling: Sampling, tree: AnyTree) -> StopAtMissDraft:
    return StopAtMissDraft(factory.build(sampling, tree))

  return dataclasses.replace(
    factory, name=f"{factory.name}, as far as known", build=build, path=None
  )


def recycling_draft(
  target: Loaded, draft: LoadsDraft, num_recycled: int | None = None
) -> DraftSpec:
  """Return a draft that also proposes the rest of the rejected proposal before it (SpecASR).

  Args:
    target: target of the pair.
    draft: function that loads a draft that proposes chains.
    num_recycled: maximum number of recycled tokens. By default, and at most, it is gamma - 1, the
      number of tokens that may follow a rejected one.
  """
  if num_recycled is not None:
    require_count("num_recycled", num_recycled)
  factory = draft(target)

  def build(sampling: Sampling, tree: AnyTree) -> RecyclingDraft:
    rest = tree.depth - 1
    count = rest if num_recycled is None else min(num_recycled, rest)
    return RecyclingDraft(factory.build(sampling, tree), count, len(target.vocabulary))

  return dataclasses.replace(factory, name=f"{factory.name}, recycled", build=build, path=None)


def _joined(
  name: str, build: Callable[[Sampling, AnyTree], Draft], factories: Sequence[DraftSpec]
) -> DraftSpec:
  """Return the draft factory of several drafts.

  Raises:
    InputError: a draft reads outputs of layers of the target.
  """
  for factory in factories:
    if factory.features:
      raise InputError(
        f"{factory.name} reads the outputs of several layers of the target and cannot be joined "
        "with another draft."
      )
  return DraftSpec(name, build, tuple(factory.params for factory in factories))


def draft_sampling(
  target: Loaded,
  draft: LoadsDraft,
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
) -> DraftSpec:
  """Return a draft with a sampling method of its own (Section 6). Decoding is exact for any q.

  If the target's temperature is 0, the draft uses the target's sampling method.

  Args:
    target: target of the pair.
    draft: function that loads a draft that samples its tokens.
    temperature: temperature of the draft; None to use the target's temperature.
    top_k: top_k of the draft; None to use the target's top_k.
    top_p: top_p of the draft; None to use the target's top_p.
  """
  settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
  given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
  Sampling(**given)  # raises for invalid values before a model is loaded
  factory = draft(target)

  def build(sampling: Sampling, tree: AnyTree) -> Draft:
    # At temperature 0 the most probable token is the best guess for any q.
    draft_sampling = dataclasses.replace(sampling, **given) if not sampling.is_argmax else sampling
    return factory.build(draft_sampling, tree)

  words = ", ".join(
    f"{name} {value:g}" if isinstance(value, float) else f"{name} {shown(value)}"
    for name, value in given.items()
  )
  name = f"{factory.name} ({words})" if words else factory.name
  return dataclasses.replace(factory, name=name, build=build, path=None)
