"""Pair of a target and a draft that share a vocabulary, ready to decode."""

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from specdec_jax.beams import BeamDraft, BeamSearcher, NullBeamDraft, beam_draft
from specdec_jax.core.decode import Decoder, NullDraft
from specdec_jax.core.generation_config import PROCESSORS, SETTINGS, GenerationConfig
from specdec_jax.core.loading import BuildDraft, DraftFactory, LoadedTarget
from specdec_jax.core.memory import require_memory
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.core.types import DecodeResult, DraftOptions, Model, Params, Verifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import Vocabulary, padded
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.families import feature_layers, with_feature_layers

MOST_STEPS = 32  # maximum gamma of a beam search; each step takes about a second to compile


class LoadedPair(NamedTuple):
  """Target, draft and vocabulary: everything that decoding a text needs.

  `specdec_jax.Pair` adds methods that take and return texts.

  Attributes:
    target: M_p.
    target_params: parameters of the target.
    target_name: name of the target in records.
    draft: function of (sampling, tree, options) that returns M_q as a draft.
    draft_params: parameters of the draft.
    draft_name: name of the draft in records.
    vocabulary: vocabulary of both models.
    task: name of the inputs, for records; None if it is not known.
    dtype: 'float32' or 'bfloat16', the `dtype` of the target's `TransformerConfig`.
    max_source_tokens: maximum number of tokens of a source. Longer sources are truncated, but keep
      the special tokens at their end, such as EOS.
    kernels: implementation of the target's matmuls (see `TransformerConfig`). It ends with
      '+bfloat16' if weights are read in bfloat16 although `dtype` is 'float32', and with '+int8' if
      they are int8.
    simulated_alpha: acceptance rate of a target with simulated acceptance; None for a real target.
    continues: whether the target is decoder-only and continues its prompt.
    verifier: verifier that accepts or rejects draft tokens: a class of `core.verify`, or a function
      from a sampling method to a verifier.
    target_path: checkpoint of the target, for records; None if it has none.
    draft_path: checkpoint of the draft, for records; None if it has none.
    generation: generation settings of the target's checkpoint, by field of `GenerationConfig`.
    tasks: `task_specific_params` of the target's checkpoint: for each task, its generation settings
      and the `prefix` of its sources.
  """

  target: Model
  target_params: Any
  target_name: str
  draft: BuildDraft
  draft_params: Any
  draft_name: str
  vocabulary: Vocabulary
  task: str | None
  dtype: str
  max_source_tokens: int
  kernels: str = "xla"
  simulated_alpha: float | None = None
  continues: bool = False
  verifier: Callable[[Sampling], Verifier] = TokenVerifier
  target_path: str | None = None
  draft_path: str | None = None
  generation: Mapping[str, Any] = types.MappingProxyType({})
  tasks: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({})

  def __repr__(self) -> str:
    models = (
      f"{role}={path or name!r} ({_size_text(params)})"
      for role, path, name, params in (
        ("target", self.target_path, self.target_name, self.target_params),
        ("draft", self.draft_path, self.draft_name, self.draft_params),
      )
    )
    return f"{type(self).__name__}({', '.join(models)}, task={self.task!r}, dtype={self.dtype!r})"

  @property
  def loaded_target(self) -> LoadedTarget:
    """The target as a `LoadedTarget`, the argument of functions that load drafts."""
    return LoadedTarget(self.target, self.target_params, self.vocabulary)

  @property
  def draft_factory(self) -> DraftFactory:
    """The draft of this pair as a `DraftFactory`."""
    layers = feature_layers(self.target)
    return DraftFactory(self.draft_name, self.draft, self.draft_params, self.draft_path, layers)

  def with_draft(self, factory: DraftFactory) -> "LoadedPair":
    """Return a pair with the same target and a different draft."""
    return self._replace(
      target=with_feature_layers(self.target, factory.feature_layers),
      draft=factory.build,
      draft_params=factory.params,
      draft_name=factory.name,
      draft_path=factory.path,
    )

  @property
  def params(self) -> Params:
    """Parameters of target and draft, as arguments of a decoder."""
    return Params(self.target_params, self.draft_params)

  def decoder(
    self,
    sampling: Sampling,
    tree: AnyTree,
    lenience: float = 1.0,
    eos_id: int | tuple[int, ...] | None = None,
    processors: Processors = (),
    logprobs: bool = False,
  ) -> Decoder:
    """Return the speculative decoder of this pair. Its methods take the `params` of this pair.

    Args:
      sampling: sampling method of target and draft.
      tree: tree of draft tokens; `chain(gamma)` for the paper's algorithm. If the tree has no draft
        tokens, decoding is autoregressive.
      lenience: lenience of the verifier (Appendix A.5); 1 is exact.
      eos_id: token that ends a text, or several; None for the vocabulary's.
      processors: logits processors; they apply to the target, and to a draft that has logits.
      logprobs: whether results have log-probabilities.

    Raises:
      InputError: the verifier does not support lenience, or cannot verify the draft's proposals.
    """
    eos_id = self.vocabulary.eos_id if eos_id is None else eos_id
    if not tree.num_guesses:
      verifier = self.verifier_for(sampling)
      if not verifier.uses_position_keys:  # whose samples are those of autoregressive decoding
        verifier = TokenVerifier(sampling)
      return Decoder(self.target, NullDraft(), verifier, eos_id, processors, logprobs)
    verifier = self.verifier_for(sampling, lenience)
    independent = verifier.needs_independent_siblings
    options = DraftOptions(processors, verifier.uses_position_keys, independent)
    draft = self.draft(sampling, tree, options)
    if independent and not (draft.independent_siblings or draft.tree.is_chain):
      raise InputError(
        f"{type(verifier).__name__} verifies siblings that are sampled independently, and "
        f"{self.draft_name} does not sample that way; give a model as draft, or another verifier."
      )
    if draft.tree.verify_lengths and not verifier.allows_short_proposals:
      raise InputError(
        f"{self.draft_name} stops early, and {type(verifier).__name__} cannot verify tokens that "
        "were not proposed; use TokenVerifier."
      )
    return Decoder(self.target, draft, verifier, eos_id, processors, logprobs)

  def decode_fn(
    self,
    sampling: Sampling,
    tree: AnyTree,
    lenience: float = 1.0,
    eos_id: int | None = None,
    processors: Processors = (),
  ) -> Callable[..., DecodeResult]:
    """Return a function that decodes with `decoder(...)` and the parameters of this pair.

    The arguments of the function are (prompt [B, P], rng [B], *, max_new_tokens).
    """
    decoder = self.decoder(sampling, tree, lenience, eos_id, processors)
    return functools.partial(decoder.run, self.params)

  def processors(self, generation: GenerationConfig) -> Processors:
    """Return the logits processors of `generation` for this pair.

    Raises:
      InputError: `generation` has settings other than those of logits processors.
    """
    others = [
      name for name in SETTINGS if name not in PROCESSORS and getattr(generation, name) is not None
    ]
    if others:
      raise InputError(
        f"generation has {', '.join(others)}, which a command does not take from it; give settings "
        "of logits processors there, and the others as settings of the command."
      )
    words = self.vocabulary
    return generation.processors(self.target.vocab_size, (words.eos_id,), words.pad_id)

  def beam_searcher(
    self,
    num_beams: int,
    gamma: int,
    draft_beams: int | None = None,
    length_penalty: float = 0.6,
    nodes: int | None = None,
    processors: Processors = (),
  ) -> BeamSearcher:
    """Return the beam searcher of this pair. Its methods take the `params` of this pair.

    Args:
      num_beams: number of live sequences, and of results per row.
      gamma: number of steps that the draft searches ahead in each round; 0 is plain beam search.
      draft_beams: number of beams of a draft that is a model; defaults to `num_beams`. Any other
        draft proposes a chain after each live sequence.
      length_penalty: see `BeamSearcher`.
      nodes: maximum number of nodes per target forward pass, if the draft is a model. By default
        there is no limit, except on a CPU, where each node takes time: there the default is 8, or
        the number of nodes that one step needs if that is larger.
      processors: logits processors; they apply to the target, and to a draft that has logits.

    Raises:
      InputError: the acceptance of the target is simulated, or gamma or draft_beams is out of
        range.
    """
    if self.simulated_alpha is not None:
      raise InputError("A target whose acceptance is simulated has no texts to search for.")
    require_count("gamma", gamma, 0)
    if gamma > MOST_STEPS:
      raise InputError(
        f"gamma is {gamma}, and each step that a beam search drafts is compiled separately, which "
        f"would take minutes; use at most {MOST_STEPS}."
      )
    if draft_beams is not None:
      require_count("draft_beams", draft_beams)
    searching: BeamDraft = NullBeamDraft()
    if gamma:
      draft_beams = num_beams if draft_beams is None else draft_beams
      if nodes is None and jax.default_backend() == "cpu":
        nodes = max(8, num_beams + draft_beams)
      draft = self.draft(Sampling(temperature=0.0), chain(gamma), DraftOptions(processors))
      searching = beam_draft(draft, draft_beams, nodes)
    eos_id = self.vocabulary.eos_id
    return BeamSearcher(
      self.target, searching, num_beams, length_penalty, eos_id, processors=processors
    )

  def guesses(self, sampling: Sampling, tree: AnyTree) -> AnyTree:
    """Return the tree that the draft proposes if `tree` is requested; usually `tree` itself."""
    return self.draft(sampling, tree).tree if tree.num_guesses else tree

  def verifier_for(self, sampling: Sampling, lenience: float = 1.0) -> Verifier:
    """Return the verifier for a sampling method; see `verifier_from`."""
    return verifier_from(self.verifier, sampling, lenience)

  def require_batch_size(self, batch_size: object) -> None:
    """Raise InputError unless `batch_size` is positive and a batch of logits fits in memory."""
    require_count("batch_size", batch_size)
    logits = jax.ShapeDtypeStruct((batch_size, self.target.vocab_size), jnp.float32)
    require_memory(f"batch_size {batch_size}", logits)

  def can_decode(self, text: str) -> bool:
    """Return whether a text can be decoded. Only a decoder-only target can decode a blank text."""
    return self.continues or bool(text.strip())

  def prompt(self, texts: Sequence[str], width: int | None = None) -> Array:
    """Return the source tokens [B, P] of texts, padded to a multiple of 8 or to `width`."""
    encoded = {text: self.encode(text) for text in set(texts)}  # batches are filled up with copies
    rows = [encoded[text] for text in texts]
    width = width or -(-max(map(len, rows)) // 8) * 8
    return jnp.asarray(padded(rows, width, self.vocabulary.pad_id))

  def encode(self, text: str) -> list[int]:
    """Return the token ids of a source, of which there are at most `max_source_tokens`.

    A truncated source keeps the special tokens at its end, which are EOS for most models.
    """
    ids, most = self.vocabulary.encode(text), self.max_source_tokens
    if len(ids) <= most:
      return ids
    num_end_tokens = min(self.vocabulary.num_end_tokens, most)
    return ids[: most - num_end_tokens] + ids[len(ids) - num_end_tokens :]

  def cut(self, text: str) -> str | None:
    """Return the text of a source truncated to `max_source_tokens`, or None if the source fits."""
    fits = len(self.vocabulary.encode(text)) <= self.max_source_tokens
    return None if fits else self.vocabulary.decode(self.encode(text))


def verifier_from(
  verifier: Callable[[Sampling], Verifier], sampling: Sampling, lenience: float = 1.0
) -> Verifier:
  """Return the verifier for a sampling method, with lenience (Appendix A.5) if it is below 1.

  Raises:
    InputError: lenience is below 1 and the verifier does not support it, or lenience is outside
      (0, 1].
  """
  return verifier(sampling).with_lenience(lenience)


def verifier_name(verifier: Callable[[Sampling], Verifier]) -> str:
  """Return the name that a verifier has in records: the name of its class."""
  return type(verifier(Sampling())).__name__


def _size_text(params: Any) -> str:
  return f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.1f}M parameters"
