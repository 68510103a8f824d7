"""Names of drafts, verifiers and kinds of draft heads.

A name stands for a function, which is imported when it is used, so that a new draft needs one file
and one line here. The parameters of the function are the settings of the draft, in Python and as
flags. `python -m specdec_jax.run` reads these tables, and docs/drafts.md and docs/verifiers.md show
them.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.core.types import LoadsDraft
from specdec_jax.errors import InputError


class Entry(NamedTuple):
  """A named draft or verifier.

  Attributes:
    path: the function that loads the draft, or the class of the verifier, as `module:name`.
    use: when to use it, in a few words.
    settings: values of its parameters that differ from their defaults, or of parameters of the
      drafts that it consists of.
  """

  path: str
  use: str
  settings: Mapping[str, Any] = {}

  @property
  def is_on_shelf(self) -> bool:
    """Return whether it is in `contrib`: complete and tested, and slower here than others."""
    return self.path.startswith(_SHELF)


_COMPOSED, _SHELF = "specdec_jax.drafts.composed", "specdec_jax.contrib"
_MODEL = "specdec_jax.load:checkpoint_draft"
_PROMPT_LOOKUP = "specdec_jax.drafts.prompt_lookup:prompt_lookup"
_STOP_AT_MISS = "specdec_jax.drafts.stop_at_miss:stop_at_miss_draft"

DRAFTS = {
  # Drafts by themselves.
  "model": Entry(_MODEL, "a smaller model of the same task exists"),
  "prompt_lookup": Entry(_PROMPT_LOOKUP, "outputs repeat their sources; nothing to train"),
  "prompt_lookup_to_the_end": Entry(
    _STOP_AT_MISS, "the same, and many rounds have no match", {"draft": "prompt_lookup"}
  ),
  "aggressive": Entry(
    _STOP_AT_MISS,
    "outputs are their sources with few edits (aggressive decoding)",
    {"draft": "prompt_lookup", "from_start": True},
  ),
  "suffix_decoding": Entry(
    _STOP_AT_MISS,
    "outputs repeat long parts of their sources (suffix decoding)",
    {"draft": "prompt_lookup", "max_ngram": 16, "tokens_per_match": 2},
  ),
  "ngrams": Entry(
    "specdec_jax.drafts.backoff:backoff_ngrams", "a text of the task's outputs exists"
  ),
  "ngram_tree": Entry(
    f"{_COMPOSED}:tree_draft", "the same, as a tree", {"draft": "ngrams", "widths": (2, 2)}
  ),
  "token_recycling": Entry(
    f"{_COMPOSED}:tree_draft",
    "nothing else is there: the target's own last guesses, as a tree",
    {"draft": "recycled_tokens", "widths": (4, 2, 1)},
  ),
  "recycled_tokens": Entry(
    "specdec_jax.drafts.token_recycling:token_recycling", "the same, as a chain"
  ),
  "layer_skip": Entry(
    "specdec_jax.drafts.layer_skip:layer_skip",
    "the target is deep; untrained, slower here than no draft",
    {"layers": (0, 1)},
  ),
  "frequent_tokens": Entry(
    "specdec_jax.load:frequent_tokens_draft", "the vocabulary is large (FR-Spec)"
  ),
  "other_vocabulary": Entry(
    "specdec_jax.load:other_vocabulary_draft",
    "the only small model has a vocabulary of its own (TLI)",
  ),
  # Made of other drafts.
  "tree": Entry(f"{_COMPOSED}:tree_draft", "a tree of another draft, of gamma levels"),
  "one_pass_tree": Entry(
    f"{_COMPOSED}:tree_draft",
    "a dynamic tree from a head that runs once per round (DDTree)",
    {"num_draft_tokens": 15},
  ),
  "hierarchical": Entry(
    f"{_COMPOSED}:hierarchical_draft",
    "the draft model is itself dear (Section 6)",
    {"draft": "model", "inner": "ngrams"},
  ),
  "staged": Entry(
    f"{_COMPOSED}:hierarchical_draft",
    "the same with trees (staged speculative decoding)",
    {"draft": "model", "inner": "ngram_tree", "width": 2},
  ),
  "forest": Entry(
    f"{_COMPOSED}:forest_draft",
    "two drafts that succeed on different texts (SpecInfer)",
    {"drafts": ("model", "prompt_lookup")},
  ),
  "draft_sampling": Entry(
    f"{_COMPOSED}:draft_sampling",
    "the draft model is better at another temperature (Section 6)",
    {"draft": "model"},
  ),
  # Baselines of the paper.
  "unigram": Entry("specdec_jax.drafts.ngram:unigram", "Table 3: the cheapest model"),
  "bigram": Entry("specdec_jax.drafts.ngram:bigram", "Table 3: the cheapest useful model"),
  "uniform": Entry("specdec_jax.drafts.uniform:uniform", "a lower bound (Section 3.6)"),
  # The shelf: complete and tested, and slower here than the ones above.
  "stopping": Entry(
    f"{_SHELF}.stopping:stopping_draft",
    "stops where the model is not confident",
    {"draft": "model", "threshold": 0.4},
  ),
  "adaptive_stopping": Entry(
    f"{_SHELF}.stopping:stopping_draft",
    "the same, for a constant rate of acceptance (Draft & Verify)",
    {"draft": "model", "threshold": 0.4, "goal": 0.7},
  ),
  "hand_over": Entry(
    f"{_SHELF}.bild:hand_over_draft",
    "BiLD's draft; with --verifier rollback",
    {"draft": "model"},
  ),
  "cascade": Entry(
    f"{_SHELF}.cascade:cascade_draft",
    "later tokens from a cheaper draft",
    {"drafts": ("model", "ngrams"), "first_gammas": (3,)},
  ),
  "fastest": Entry(
    f"{_SHELF}.fastest:fastest_draft",
    "the fastest draft of each round (Section 6)",
    {"drafts": ("model", "ngrams"), "alphas": (0.8, 0.4), "costs": (0.07, 0.02)},
  ),
  "prompt_lookup_or_ngrams": Entry(
    f"{_SHELF}.prompt_lookup_or_ngrams:prompt_lookup_or_ngrams",
    "n-grams where prompt lookup finds nothing",
  ),
  "realigned": Entry(
    f"{_SHELF}.realigned:realigned_draft",
    "rejected tokens proposed again (SpecASR)",
    {"draft": "model"},
  ),
  "retrieval": Entry(
    f"{_SHELF}.retrieval:retrieval", "continuations found in earlier outputs (REST)"
  ),
  "lookahead": Entry(f"{_SHELF}.lookahead:lookahead", "n-grams by Jacobi iteration"),
  "saturation": Entry(
    f"{_SHELF}.saturation:saturation",
    "early exit of each token (CALM)",
    {"layers": (0, 1), "threshold": 0.5},
  ),
}

_VERIFY = "specdec_jax.core.verify"
VERIFIERS = {
  "tokens": Entry(f"{_VERIFY}.tokens:TokenVerifier", "Algorithm 1, the default; trees too"),
  "blocks": Entry(f"{_VERIFY}.blocks:BlockVerifier", "joint test: more tokens when sampling"),
  "gumbel": Entry(f"{_VERIFY}.gumbel:GumbelVerifier", "coupled samples: they depend on seeds only"),
  "rejection": Entry(f"{_VERIFY}.rejection:RejectionVerifier", "Appendix A.2, to compare"),
  "typical": Entry(f"{_VERIFY}.lossy:TypicalVerifier", "Medusa's typical acceptance; not exact"),
  "k_seq": Entry(f"{_SHELF}.k_seq:KSeqVerifier", "SpecTr's K-SEQ, for independent siblings"),
  "merging": Entry(f"{_SHELF}.merging:MergingVerifier", "equal tokens of a forest as one"),
  "paths": Entry(f"{_SHELF}.paths:PathsVerifier", "the paths of a tree as a batch"),
  "top_beta": Entry(f"{_SHELF}.top_beta:TopBetaVerifier", "SpecDec's top-beta; not exact"),
  "rollback": Entry(f"{_SHELF}.bild:RollbackVerifier", "BiLD's rollback; not exact"),
}

# Kind of a learned draft head -> its class.
HEADS = {
  "heads": "specdec_jax.drafts.heads.medusa:MedusaHead",
  "eagle": "specdec_jax.drafts.heads.eagle:EagleHead",
  "parallel": "specdec_jax.drafts.heads.parallel:ParallelHead",
  "conditioned": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "features": "specdec_jax.drafts.heads.shared_encoder:SharedEncoderHead",
  "shared_encoder": f"{_SHELF}.eagle_text:PlainHead",
  "eagle_text": f"{_SHELF}.eagle_text:EagleTextHead",
  "pass": f"{_SHELF}.pass_embeddings:PassHead",
  "early_exit": f"{_SHELF}.early_exit:EarlyExitHead",
  "drafter": f"{_SHELF}.drafter:DrafterHead",
}


def entry(part: str, name: str) -> Entry | None:
  """Return the draft or verifier (`part`) of a name, or that of a user, named as `module:name`.

  Other names, such as those of checkpoints, give None.
  """
  names = {"draft": DRAFTS, "verifier": VERIFIERS}[part]
  is_path = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name)
  return names.get(name) or (Entry(name, "what you wrote it for") if is_path else None)


def imported(path: str) -> Any:
  """Return the object `module:name`, or raise InputError if there is none."""
  module, _, name = path.partition(":")
  try:
    return getattr(importlib.import_module(module), name)
  except ModuleNotFoundError as error:
    if error.name != module:
      raise
    raise InputError(f"There is no module {module} for {path!r} on the Python path.") from error
  except AttributeError as error:
    raise InputError(f"There is no {name} in the module {module}.") from error


def draft(name: str | LoadsDraft, **settings: Any) -> LoadsDraft:
  """Return the function that loads a draft for a target.

  Args:
    name: a name in `DRAFTS`, a function of yours as `module:name`, or a checkpoint; or such a
      function, which is returned.
    settings: parameters of the draft, or of the drafts that it consists of; each draft takes those
      that it has. Parameters that load a draft may be names, too.

  Raises:
    InputError: none of the drafts has one of the settings, or one is missing.
  """
  if not isinstance(name, str):
    return name
  known = draft_parameters(name, settings)
  _require_known(name, settings, known)
  if missing := [each for each, x in known.items() if x.default is inspect.Parameter.empty]:
    raise InputError(f"The draft {name!r} needs a value of {', '.join(missing)}.")
  return _draft(name, settings)


def draft_parameters(name: str, settings: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
  """Return the settings of a draft and of the drafts that it consists of, with their defaults."""
  own, inner = _values(name, settings)
  found: dict[str, inspect.Parameter] = {}
  for each, x in parameters(_entry(name).path).items():
    found[each] = x.replace(default=own[each]) if each in own else x
    for used in _names(x, own.get(each)):
      found = draft_parameters(used, inner) | found
  return found


def verifier(name: str | Callable[..., Any], **settings: Any) -> Callable[..., Any]:
  """Return a verifier by its name in `VERIFIERS`: a function from a sampling method.

  Such a function is returned as it is. One of yours is named as `module:name`.

  Raises:
    InputError: there is no such verifier, or it has none of the settings.
  """
  if not isinstance(name, str):
    return name
  if (found := entry("verifier", name)) is None:
    raise InputError(f"There is no verifier {name!r}; there are {', '.join(VERIFIERS)}.")
  _require_known(name, settings, parameters(found.path))
  return functools.partial(imported(found.path), **settings) if settings else imported(found.path)


def head(kind: str) -> type:
  """Return the class of a kind of draft head, or raise InputError if there is none."""
  if kind not in HEADS:
    raise InputError(f"kind is {kind!r}; it must be one of {', '.join(map(repr, HEADS))}.")
  return imported(HEADS[kind])


def parameters(path: str) -> dict[str, inspect.Parameter]:
  """Return the parameters of an entry's function or class that are settings.

  The first is not: it is the target of a draft, or the sampling method of a verifier. Nor are
  parameters that are given by name only, which take values of Python, such as functions.
  """
  _, *others = inspect.signature(imported(path)).parameters.values()
  return {x.name: x for x in others if x.kind is not inspect.Parameter.KEYWORD_ONLY}


def flag_of(parameter: str) -> str:
  """Return the name of the flag of a draft's or a verifier's parameter."""
  return "base_draft" if parameter == "draft" else parameter  # --draft names the whole


def _entry(name: str) -> Entry:
  return entry("draft", name) or Entry(_MODEL, "", {"model": name})


def _values(name: str, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """Return the values of a draft's parameters, and settings of the drafts that it consists of."""
  found = _entry(name)
  own = parameters(found.path)
  given = {**found.settings, **settings}
  values = {each: value for each, value in given.items() if each in own}
  inner = {each: x for each, x in given.items() if each not in own or not _loads_drafts(own[each])}
  return values, inner


def _draft(name: str, settings: Mapping[str, Any]) -> LoadsDraft:
  values, inner = _values(name, settings)
  for each, x in parameters(_entry(name).path).items():
    if each in values and _loads_drafts(x):
      value = values[each]
      loads = [_draft(v, inner) if isinstance(v, str) else v for v in _listed(value)]
      values[each] = loads if x.annotation == Sequence[LoadsDraft] else loads[0]
  return functools.partial(imported(_entry(name).path), **values)


def _loads_drafts(x: inspect.Parameter) -> bool:
  return x.annotation in (LoadsDraft, Sequence[LoadsDraft])


def _names(x: inspect.Parameter, value: Any) -> Iterator[str]:
  if _loads_drafts(x):
    yield from (each for each in _listed(value) if isinstance(each, str))


def _listed(value: Any) -> Sequence[Any]:
  return value if isinstance(value, (list, tuple)) else [value]


def _require_known(name: str, settings: Mapping[str, Any], known: Mapping[str, Any]) -> None:
  if unknown := settings.keys() - known.keys():
    raise InputError(
      f"{name!r} has no setting {', '.join(sorted(unknown))}; it has {', '.join(known) or 'none'}."
    )
