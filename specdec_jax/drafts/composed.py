"""Functions that load drafts composed of other drafts.

To give such a function to `load_pair`, bind all of its arguments except `target`. The arguments
`draft`, `drafts` and `inner` load drafts: they are functions from a `Loaded` to a `DraftSpec`, such
as `checkpoint_draft`, or functions of this module with bound arguments.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, DynamicTree, branching, chain, require_chain
from specdec_jax.core.types import BuildDraft, Draft, DraftOptions, DraftSpec, Loaded, LoadsDraft
from specdec_jax.drafts.hierarchical import HierarchicalDraft, chain_with_siblings
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.several import ForestDraft
from specdec_jax.errors import InputError, shown


def hierarchical_draft(
  target: Loaded, draft: LoadsDraft, inner: LoadsDraft, inner_gamma: int = 3, width: int = 1
) -> DraftSpec:
  """Return a draft whose model is itself decoded speculatively with a cheaper draft (Section 6).

  Args:
    draft: loads the draft model.
    inner: loads the cheaper draft, which may be hierarchical too, or a tree (`tree_draft`).
    inner_gamma: number of draft tokens that the cheaper draft proposes per round.
    width: number of tokens proposed for each position; all follow the first of the position before.
  """
  model, cheaper = (load(target) for load in (draft, inner))

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> HierarchicalDraft:
    options = DraftOptions(options.processors, reread=options.reread)
    tree = chain_with_siblings(require_chain("a hierarchical draft", tree).depth, width)
    outer = build_model(model, sampling, tree, options)
    inner_options = dataclasses.replace(options, reread=options.reread + 2)
    draft_tokens = cheaper.build(sampling, chain(inner_gamma), inner_options)
    return HierarchicalDraft(outer.model, draft_tokens, sampling, tree, options)

  name = f"{model.name} by {cheaper.name}" + (f", width {width}" if width > 1 else "")
  return joined_spec(name, build, [model, cheaper])


def forest_draft(target: Loaded, drafts: Sequence[LoadsDraft]) -> DraftSpec:
  """Return a draft that joins the proposals of several drafts in one tree (SpecInfer).

  Each draft proposes the whole requested tree. A draft that is given twice is sampled twice.
  """
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> ForestDraft:
    depth = max(spec.build(sampling, tree, options).tree.depth for spec in specs)
    options = rereading(options, depth + 1)
    drafts = tuple(spec.build(sampling, tree, options) for spec in specs)
    return ForestDraft(drafts, len(target.vocabulary))

  name = " and ".join(spec.name for spec in specs)
  return joined_spec(name, build, specs)


def tree_draft(
  target: Loaded,
  draft: LoadsDraft,
  widths: Sequence[int] = (),
  num_draft_tokens: int | None = None,
  greedy_siblings: bool = False,
) -> DraftSpec:
  """Return a draft that proposes a tree of depth gamma in place of a chain of length gamma.

  Args:
    widths: number of children of each node at depth 0, 1, ...; 1 at depths past the end.
    num_draft_tokens: that of a dynamic tree, instead of `widths`; 1 if gamma is 1.
    greedy_siblings: see `Tree`; not for dynamic trees.
  """
  if bool(widths) == (num_draft_tokens is not None):
    raise InputError("A tree has widths, or num_draft_tokens if it is dynamic; give one.")

  def shape(depth: int) -> AnyTree:
    if num_draft_tokens is not None:
      return DynamicTree(
        num_draft_tokens if depth > 1 else 1, depth
      )  # depth 1: the best token only
    tree = branching(*(*widths, *[1] * (depth - len(widths)))[:depth])
    return dataclasses.replace(tree, greedy_siblings=greedy_siblings)

  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> Draft:
    return spec.build(sampling, shape(tree.depth), options)

  size = f"tree of {num_draft_tokens}"
  if widths:
    size = f"{'greedy siblings, ' * greedy_siblings}tree {'x'.join(map(str, widths))}"
  return dataclasses.replace(spec, name=f"{spec.name}, {size}", build=build, path=None)


def build_model(
  spec: DraftSpec, sampling: Sampling, tree: AnyTree, options: DraftOptions
) -> ModelDraft:
  """Build a draft, or raise InputError if it is not a draft model."""
  draft = spec.build(sampling, tree, options)
  if not isinstance(draft, ModelDraft):
    raise InputError(f"{spec.name} is not a draft model; give one.")
  return draft


def rereading(options: DraftOptions, num_tokens: int) -> DraftOptions:
  """Return options of a draft whose rounds begin with up to `num_tokens` tokens new to it."""
  return dataclasses.replace(options, reread=options.reread - 2 + num_tokens)  # 2 by default


def joined_spec(name: str, build: BuildDraft, specs: Sequence[DraftSpec]) -> DraftSpec:
  """Return a draft made of several, or raise InputError if one cannot be joined with others."""
  for spec in specs:
    if spec.features:
      raise InputError(
        f"{spec.name} reads the outputs of several layers of the target and cannot be joined "
        "with another draft."
      )
  return DraftSpec(name, build, tuple(spec.params for spec in specs))


def draft_sampling(
  target: Loaded,
  draft: LoadsDraft,
  draft_temperature: float | None = None,
  draft_top_k: int | None = None,
  draft_top_p: float | None = None,
) -> DraftSpec:
  """Return a draft with a sampling method of its own (Section 6). Decoding is exact for any q.

  Settings that are None are the target's. If the target's temperature is 0, all of them are.
  """
  settings = {"temperature": draft_temperature, "top_k": draft_top_k, "top_p": draft_top_p}
  given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
  Sampling(**given)  # raises for invalid values before a model is loaded
  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> Draft:
    # At temperature 0 the most probable token is the best draft token for any q.
    draft_sampling = dataclasses.replace(sampling, **given) if not sampling.is_argmax else sampling
    return spec.build(draft_sampling, tree, options)

  words = ", ".join(
    f"{name} {value:g}" if isinstance(value, float) else f"{name} {shown(value)}"
    for name, value in given.items()
  )
  name = f"{spec.name} ({words})" if words else spec.name
  return dataclasses.replace(spec, name=name, build=build, path=None)
