"""Functions that load drafts composed of other drafts.

To give such a function to `load_pair`, bind all of its arguments except `target`. The arguments
`draft`, `drafts` and `inner` load drafts: they are functions from a `Loaded` to a `DraftSpec`, such
as `checkpoint_draft`, or functions of this module with bound arguments.
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
)
from specdec_jax.core.types import BuildDraft, Draft, DraftOptions, DraftSpec, Loaded
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.hierarchical import HierarchicalDraft, chain_with_siblings
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.drafts.realigned import RealignedDraft
from specdec_jax.drafts.several import CascadeDraft, FallbackDraft, FastestDraft, ForestDraft
from specdec_jax.drafts.stopping import (
  AdaptiveStoppingDraft,
  HandOverDraft,
  StopAtMissDraft,
  StoppingDraft,
)
from specdec_jax.errors import InputError, require_count, shown

LoadsDraft = Callable[[Loaded], DraftSpec]


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
    outer = _build_model(model, sampling, tree, options)
    inner_options = dataclasses.replace(options, reread=options.reread + 2)
    draft_tokens = cheaper.build(sampling, chain(inner_gamma), inner_options)
    return HierarchicalDraft(outer.model, draft_tokens, sampling, tree, options)

  name = f"{model.name} by {cheaper.name}" + (f", width {width}" if width > 1 else "")
  return _joined(name, build, [model, cheaper])


def forest_draft(target: Loaded, drafts: Sequence[LoadsDraft]) -> DraftSpec:
  """Return a draft that joins the proposals of several drafts in one tree (SpecInfer).

  Each draft proposes the whole requested tree. A draft that is given twice is sampled twice.
  """
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> ForestDraft:
    depth = max(spec.build(sampling, tree, options).tree.depth for spec in specs)
    options = _rereading(options, depth + 1)
    drafts = tuple(spec.build(sampling, tree, options) for spec in specs)
    return ForestDraft(drafts, len(target.vocabulary))

  name = " and ".join(spec.name for spec in specs)
  return _joined(name, build, specs)


def cascade_draft(target: Loaded, drafts: Sequence[LoadsDraft], gammas: Sequence[int]) -> DraftSpec:
  """Return a draft that runs several drafts in sequence, usually from expensive to cheap.

  Args:
    drafts: drafts in the order in which they propose.
    gammas: number of draft tokens of each draft except the last one, which proposes the rest.
  """
  if len(gammas) != len(drafts) - 1:
    raise InputError(
      f"There are {len(drafts)} drafts in a row and {len(gammas)} gammas; give one gamma for each "
      "draft except the last, which proposes the rest."
    )
  for gamma in gammas:
    require_count("gamma", gamma)
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> CascadeDraft:
    require_chain("a cascade", tree)
    built, missing = [], tree.depth
    for spec, gamma in zip(specs, (*gammas, tree.depth)):
      if missing:
        # A draft has not processed what a round commits, nor the tokens of the drafts before it.
        reread = tree.depth + 1 + tree.depth - missing
        part = chain(min(gamma, missing))
        built.append(spec.build(sampling, part, _rereading(options, reread)))
        missing -= part.depth
    return CascadeDraft(tuple(built), len(target.vocabulary))

  name = ", then ".join(spec.name for spec in specs)
  return _joined(name, build, specs)


def fastest_draft(
  target: Loaded,
  drafts: Sequence[LoadsDraft],
  alphas: Sequence[float],
  costs: Sequence[float],
) -> DraftSpec:
  """Return a draft that uses, in each round, the draft with the highest expected speed (Section 6).

  Args:
    drafts: drafts to choose from.
    alphas: estimate of alpha of each draft at the start of a text.
    costs: cost ratio c of each draft, as `specdec speedup` measures it.
  """
  specs = [draft(target) for draft in drafts]

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> FastestDraft:
    def built(num_rounds: int) -> tuple[Draft, ...]:
      count = num_rounds * (tree.depth + 1)
      return tuple(spec.build(sampling, tree, _rereading(options, count)) for spec in specs)

    draft = FastestDraft(built(1), built(1), tuple(alphas), tuple(costs), len(target.vocabulary))
    return dataclasses.replace(draft, late_drafts=built(draft.most_idle + 1))

  name = "fastest of " + ", ".join(spec.name for spec in specs)
  return _joined(name, build, specs)


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


def prompt_lookup_or_ngrams(
  target: Loaded, path: str, max_ngram: int = 3, order: int = 4
) -> DraftSpec:
  """Return a draft that uses `prompt_lookup` and falls back to `backoff_ngrams`."""
  specs = prompt_lookup(target, max_ngram), backoff_ngrams(target, path, order)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> FallbackDraft:
    return FallbackDraft(tuple(spec.build(sampling, tree, options) for spec in specs))

  name = "-or-".join(spec.name for spec in specs)
  return DraftSpec(name, build, tuple(spec.params for spec in specs))


def stopping_draft(
  target: Loaded, draft: LoadsDraft, threshold: float, goal: float | None = None
) -> DraftSpec:
  """Return a draft model that proposes up to gamma tokens, and stops early if it is not confident.

  Args:
    threshold: see `StoppingDraft`.
    goal: acceptance rate to keep (`AdaptiveStoppingDraft`); None for a constant threshold.
  """
  model = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> StoppingDraft:
    built = _build_model(model, sampling, tree, options)
    if goal is None:
      return StoppingDraft(built, threshold)
    return AdaptiveStoppingDraft(built, threshold, goal)

  rule = f"stops below {threshold:g}"
  if goal is not None:
    rule = f"stops for a rate of {goal:g}"
  return dataclasses.replace(model, name=f"{model.name} ({rule})", build=build, path=None)


def hand_over_draft(target: Loaded, draft: LoadsDraft, threshold: float = 0.6) -> DraftSpec:
  """Return a draft model that proposes tokens while it is confident (`HandOverDraft`; BiLD)."""
  model = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> HandOverDraft:
    return HandOverDraft(_build_model(model, sampling, tree, options), threshold)

  name = f"{model.name} (hands over below {threshold:g})"
  return dataclasses.replace(model, name=name, build=build, path=None)


def stop_at_miss_draft(target: Loaded, draft: LoadsDraft) -> DraftSpec:
  """Return a draft that ends its proposal where `draft` has no token (`StopAtMissDraft`).

  gamma is the maximum number of draft tokens. `draft` selects its tokens deterministically.
  """
  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> StopAtMissDraft:
    return StopAtMissDraft(spec.build(sampling, tree, options))

  return dataclasses.replace(spec, name=f"{spec.name}, as far as known", build=build, path=None)


def realigned_draft(
  target: Loaded, draft: LoadsDraft, num_realigned: int | None = None
) -> DraftSpec:
  """Return a draft that also proposes the rest of the rejected proposal before it (SpecASR).

  `num_realigned` is at most, and by default, gamma - 1: the tokens that may follow a rejected one.
  """
  if num_realigned is not None:
    require_count("num_realigned", num_realigned)
  spec = draft(target)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> RealignedDraft:
    rest = tree.depth - 1
    count = rest if num_realigned is None else min(num_realigned, rest)
    draft = spec.build(sampling, tree, _rereading(options, tree.depth + 1))
    return RealignedDraft(draft, count, len(target.vocabulary))

  return dataclasses.replace(spec, name=f"{spec.name}, realigned", build=build, path=None)


def _build_model(
  spec: DraftSpec, sampling: Sampling, tree: AnyTree, options: DraftOptions
) -> ModelDraft:
  draft = spec.build(sampling, tree, options)
  if not isinstance(draft, ModelDraft):
    raise InputError(f"{spec.name} is not a draft model; give one.")
  return draft


def _rereading(options: DraftOptions, num_tokens: int) -> DraftOptions:
  return dataclasses.replace(options, reread=options.reread - 2 + num_tokens)  # 2 by default


def _joined(name: str, build: BuildDraft, specs: Sequence[DraftSpec]) -> DraftSpec:
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
  temperature: float | None = None,
  top_k: int | None = None,
  top_p: float | None = None,
) -> DraftSpec:
  """Return a draft with a sampling method of its own (Section 6). Decoding is exact for any q.

  Settings that are None are the target's. If the target's temperature is 0, all of them are.
  """
  settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
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
