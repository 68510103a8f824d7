"""Pair of a target and a draft that share a vocabulary, ready to decode."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from specdec_jax import generate
from specdec_jax.beams import BeamDraft, BeamSearcher, NullBeamDraft, beam_draft
from specdec_jax.core.context import Prompt
from specdec_jax.core.decode import Decoder, NullDraft, num_positions
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.memory import require_memory
from specdec_jax.core.processors import Processors
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.settings import HashableArray
from specdec_jax.core.trees import AnyTree, chain
from specdec_jax.core.types import (
  DecodeResult,
  Draft,
  DraftOptions,
  DraftSpec,
  Loaded,
  Params,
  Verifier,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import Vocabulary, padded
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.families import Config, config_of, with_feature_layers
from specdec_jax.models.layout import Layout
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.speech.transcribe import clip_prompts

MAX_BEAM_GAMMA = 32  # maximum gamma of a beam search; each step takes about a second to compile


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
  """Target and draft, and everything else that decoding a text needs.

  Attributes:
    target: M_p, its parameters and its vocabulary.
    draft: M_q, not yet built for a sampling method and a tree.
    verifier: `Verifier` class that accepts or rejects draft tokens, or a function from a sampling
      method to a verifier.
    task: name of the inputs, for records; None if it is not known.
    max_source_tokens: maximum number of tokens of a source, at most the positions of the target.
      Longer sources are truncated, but keep the special tokens at their end, such as EOS. Of a
      prompt that a decoder-only target continues, the end is kept.
  """

  target: Loaded
  draft: DraftSpec
  verifier: Callable[[Sampling], Verifier] = TokenVerifier
  task: str | None = None
  max_source_tokens: int = 128

  def __post_init__(self):
    require_count("max_source_tokens", self.max_source_tokens)
    most = min(self.max_source_tokens, num_positions(self.target.model) or self.max_source_tokens)
    object.__setattr__(self, "max_source_tokens", most)
    model = with_feature_layers(self.target.model, self.draft.features)
    object.__setattr__(self, "target", dataclasses.replace(self.target, model=model))

  def __repr__(self) -> str:
    models = (
      f"{role}={model.path or model.name!r} ({_num_params(model.params) / 1e6:.1f}M parameters)"
      for role, model in (("target", self.target), ("draft", self.draft))
    )
    return f"Pair({', '.join(models)}, task={self.task!r}, dtype={self.dtype!r})"

  def generate(self, texts: Iterable[str], **arguments: Any) -> list[generate.Output]:
    """Return the outputs for texts; see `specdec_jax.generate.outputs` for the arguments."""
    return generate.generate(self, texts, **arguments)

  def stream(self, text: str, **arguments: Any) -> Iterator[str]:
    """Yield the output for a text in pieces; see `specdec_jax.generate.stream`."""
    return generate.stream(self, text, **arguments)

  @property
  def vocabulary(self) -> Vocabulary:
    """Vocabulary of the target; every draft proposes ids of this vocabulary."""
    return self.target.vocabulary

  @property
  def layout(self) -> Layout:
    """Layout of the target's parameters; the default one if the target has no configuration."""
    return Layout() if self.config is None else self.config.layout

  @property
  def dtype(self) -> str:
    """'float32' or 'bfloat16', the `dtype` of the target's layout."""
    return jnp.dtype(self.layout.dtype).name

  @property
  def kernels(self) -> str:
    """Implementation of the target's matmuls (`Layout.kernels`).

    It ends with '+int8' or '+int4' if weights are quantized, and with '+bfloat16' if they are read
    in bfloat16 although `dtype` is 'float32'.
    """
    kernels = self.layout.kernels
    if self.layout.is_quantized:
      return f"{kernels}+{self.layout.weights}"
    arrays = jax.tree.leaves(self.target.params)
    is_stored = self.dtype == "float32" and any(x.dtype == jnp.bfloat16 for x in arrays)
    return kernels + "+bfloat16" * is_stored

  @property
  def simulated_alpha(self) -> float | None:
    """Acceptance rate of a target with simulated acceptance; None for a real target."""
    model = self.target.model
    return model.alpha if isinstance(model, SimulatedModel) else None

  @property
  def continues(self) -> bool:
    """Return whether the target is decoder-only and continues its prompt."""
    return not getattr(self.config, "has_encoder", True)

  @property
  def verifier_name(self) -> str:
    """Name of the verifier in records: the name of its class."""
    return type(self.verifier(Sampling())).__name__

  @property
  def config(self) -> Config | None:
    """Configuration of the target; None if it is not a model of this package."""
    return config_of(self.target.model)

  def with_target(self, **changes: Any) -> "Pair":
    """Return a pair with changed fields of the target (`Loaded`)."""
    return dataclasses.replace(self, target=dataclasses.replace(self.target, **changes))

  def with_draft(self, draft: DraftSpec) -> "Pair":
    """Return a pair with the same target and a different draft."""
    return dataclasses.replace(self, draft=draft)

  @property
  def params(self) -> Params:
    """Parameters of target and draft, as arguments of a decoder."""
    return Params(self.target.params, self.draft.params)

  def decoder(
    self,
    sampling: Sampling,
    tree: AnyTree,
    lenience: float = 1.0,
    eos_id: int | HashableArray | None = None,
    processors: Processors = (),
    logprobs: bool = False,
    fixed_width: bool = False,
  ) -> Decoder:
    """Return the speculative decoder of this pair. Its methods take the `params` of this pair.

    Args:
      tree: tree of draft tokens; `chain(gamma)` for the paper's algorithm. If the tree has no draft
        tokens, decoding is autoregressive.
      lenience: lenience of the verifier (Appendix A.5); 1 is exact.
      eos_id: token that ends a text, or several; None for the vocabulary's.
      processors: logits processors; they apply to the target, and to a draft that has logits.
      fixed_width: whether to decode autoregressively, but in passes over as many nodes as the tree
        has, so that the target runs the same program as with the draft.

    Raises:
      InputError: the verifier does not support lenience, or cannot verify the draft's proposals.
    """
    eos_id = self.vocabulary.eos_id if eos_id is None else eos_id
    if fixed_width or not tree.num_draft_tokens:
      verifier = self.verifier_for(sampling)
      # Samples with position keys are those of autoregressive decoding.
      if not (verifier.uses_position_keys or isinstance(verifier, TokenVerifier)):
        verifier = TokenVerifier(sampling)
      draft: Draft = NullDraft(self.proposed_tree(sampling, tree), token=-1)
      return Decoder(self.target.model, draft, verifier, eos_id, processors, logprobs)
    verifier = self.verifier_for(sampling, lenience)
    independent = verifier.needs_independent_siblings
    may_stop = verifier.allows_short_proposals
    options = DraftOptions(processors, verifier.uses_position_keys, independent, may_stop=may_stop)
    draft = self.draft.build(sampling, tree, options)
    if independent and not (draft.independent_siblings or draft.tree.is_chain):
      raise InputError(
        f"{type(verifier).__name__} verifies siblings that are sampled independently, and "
        f"{self.draft.name} does not sample that way; give a model as draft, or another verifier."
      )
    if draft.tree.verify_lengths and not may_stop:
      raise InputError(
        f"{self.draft.name} stops early, and {type(verifier).__name__} cannot verify tokens that "
        "were not proposed; use TokenVerifier."
      )
    return Decoder(self.target.model, draft, verifier, eos_id, processors, logprobs)

  def decode_fn(
    self,
    sampling: Sampling,
    tree: AnyTree,
    lenience: float = 1.0,
    eos_id: int | None = None,
    processors: Processors = (),
    fixed_width: bool = False,
  ) -> Callable[..., DecodeResult]:
    """Return `decoder(...).run` with the parameters of this pair bound."""
    decoder = self.decoder(sampling, tree, lenience, eos_id, processors, fixed_width=fixed_width)
    return functools.partial(decoder.run, self.params)

  def processors_of(self, generation: GenerationConfig, eos_ids: tuple[int, ...]) -> Processors:
    """Return the logits processors of generation settings for this target."""
    pad_id = None if self.continues else self.vocabulary.pad_id
    return generation.processors(self.target.model.vocab_size, eos_ids, pad_id)

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
      gamma: number of steps that the draft searches ahead in each round; 0 is plain beam search.
      draft_beams: number of beams of a draft that is a model; defaults to `num_beams`. Any other
        draft proposes a chain after each live sequence.
      nodes: maximum number of nodes per target forward pass, if the draft is a model. By default
        8 on a CPU, where each node takes time, or what one step needs if that is more; elsewhere
        there is no limit.

    Raises:
      InputError: the acceptance of the target is simulated, or gamma or draft_beams is invalid.
    """
    if self.simulated_alpha is not None:
      raise InputError("A target whose acceptance is simulated has no texts to search for.")
    require_count("gamma", gamma, 0)
    if gamma > MAX_BEAM_GAMMA:
      raise InputError(
        f"gamma is {gamma}, and each step that a beam search drafts is compiled separately, which "
        f"would take minutes; use at most {MAX_BEAM_GAMMA}."
      )
    if draft_beams is not None:
      require_count("draft_beams", draft_beams)
    searching: BeamDraft = NullBeamDraft()
    if gamma:
      draft_beams = num_beams if draft_beams is None else draft_beams
      if nodes is None and jax.default_backend() == "cpu":
        nodes = max(8, num_beams + draft_beams)
      draft = self.draft.build(Sampling(0.0), chain(gamma), DraftOptions(processors))
      searching = beam_draft(draft, draft_beams, nodes)
    eos_id = self.vocabulary.eos_id
    model = self.target.model
    return BeamSearcher(model, searching, num_beams, length_penalty, eos_id, processors=processors)

  def proposed_tree(self, sampling: Sampling, tree: AnyTree) -> AnyTree:
    """Return the tree that the draft proposes if `tree` is requested; usually `tree` itself."""
    return self.draft.build(sampling, tree, DraftOptions()).tree if tree.num_draft_tokens else tree

  def verifier_for(self, sampling: Sampling, lenience: float = 1.0) -> Verifier:
    """Return the verifier for a sampling method, with lenience (Appendix A.5) if it is below 1."""
    return self.verifier(sampling).with_lenience(lenience)

  def require_batch_size(self, batch_size: object) -> None:
    """Raise InputError unless `batch_size` is positive and a batch of logits fits in memory."""
    require_count("batch_size", batch_size)
    logits = jax.ShapeDtypeStruct((batch_size, self.target.model.vocab_size), jnp.float32)
    require_memory(f"batch_size {batch_size}", logits)

  def can_decode(self, text: str) -> bool:
    """Return whether a text can be decoded. Only a decoder-only target can decode a blank text."""
    return self.continues or bool(text.strip())

  def prompt(self, texts: Sequence[str], width: int | None = None) -> Prompt:
    """Return the source tokens [B, P] of texts, padded to a multiple of 8 or to `width`.

    For a Whisper, the texts are paths of recordings of at most 30 seconds.
    """
    if self.target.speech is not None:
      return clip_prompts(self, texts)
    encoded = {text: self.encode(text) for text in set(texts)}  # batches are filled up with copies
    rows = [encoded[text] for text in texts]
    width = width or -(-max(map(len, rows)) // 8) * 8
    return jnp.asarray(padded(rows, width, self.vocabulary.pad_id))

  def encode(self, text: str) -> list[int]:
    """Return the token ids of a source, truncated as `max_source_tokens` says."""
    if self.target.speech is not None:
      raise InputError(f"{self.target.name} reads speech, not texts; call speech.transcribe.")
    return self.truncated(self.vocabulary.encode(text))

  def truncated(self, ids: list[int]) -> list[int]:
    """Return the token ids of a source without those that `max_source_tokens` excludes."""
    most = self.max_source_tokens
    if len(ids) <= most:
      return ids
    if self.continues:  # the end of a prompt is what the output continues
      return ids[-most:]
    num_end_tokens = min(self.vocabulary.num_end_tokens, most)
    return ids[: most - num_end_tokens] + ids[len(ids) - num_end_tokens :]

  def cut(self, text: str) -> str | None:
    """Return the text of a source truncated to `max_source_tokens`, or None if the source fits."""
    fits = len(self.vocabulary.encode(text)) <= self.max_source_tokens
    return None if fits else self.vocabulary.decode(self.encode(text))


def _num_params(params: Any) -> int:
  return sum(x.size for x in jax.tree.leaves(params))
