"""Prompt lookup where the text has a match, otherwise n-grams with back-off."""

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree
from specdec_jax.core.types import DraftOptions, DraftSpec, Loaded
from specdec_jax.drafts.backoff import backoff_ngrams
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.drafts.several import FallbackDraft


def prompt_lookup_or_ngrams(
  target: Loaded, target_text: str, max_ngram: int = 3, order: int = 4
) -> DraftSpec:
  """Return a draft that uses `prompt_lookup` and falls back to `backoff_ngrams`."""
  specs = prompt_lookup(target, max_ngram), backoff_ngrams(target, target_text, order)

  def build(sampling: Sampling, tree: AnyTree, options=DraftOptions()) -> FallbackDraft:
    return FallbackDraft(tuple(spec.build(sampling, tree, options) for spec in specs))

  name = "-or-".join(spec.name for spec in specs)
  return DraftSpec(name, build, tuple(spec.params for spec in specs))
