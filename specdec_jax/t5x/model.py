"""t5x's encoder-decoder model with speculative decoding.

Axis letters: B examples or decoded rows, S source tokens, T target tokens, A decoded rows per
example (`num_decodes`). K and V are those of `core.types`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import core
from flax import linen as nn
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Key
from t5x import decoding as t5x_decoding
from t5x import models

from specdec_jax.batching import decode_all
from specdec_jax.beams import BeamResult, BeamSearcher, ModelBeamDraft
from specdec_jax.core.arrays import gather, gather_token, repeat_rows
from specdec_jax.core.context import Context, Prefixes, node_prefixes
from specdec_jax.core.decode import Decoder
from specdec_jax.core.processors import ForcedPrefix, LogitsProcessor, Processors, process
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import (
  AnyArray,
  DecodeResult,
  DraftOptions,
  Keys,
  Params,
  Proposal,
  Verifier,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.data.vocabulary import PAD_ID
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import T5Model
from specdec_jax.t5x.checkpointer import DRAFT
from specdec_jax.t5x.networks import same_config


@dataclasses.dataclass(frozen=True)
class Decoding:
  """Settings of decoding. A call of `predict_batch_with_aux` may replace them by `decoder_params`.

  Attributes:
    gamma: length of the chain of draft tokens per round, if there is no tree; in a beam search, the
      number of steps that the draft searches ahead.
    tree: parents of the draft tokens, as in `core.trees.Tree`; None for a chain.
    verifier: `Verifier` class, or any function of a `Sampling` that returns a verifier. The
      verifier need not be exact.
    lenience: lenience of `TokenVerifier` (Appendix A.5); 1 is exact.
    temperature: as in t5x's `temperature_sample`; so are the next five.
    topk: number of most probable tokens to sample from; 0 for all.
    topp: probability mass to sample from; 0 for all.
    max_decode_steps: limit of new tokens; None for the length of the targets.
    rescale_log_probs: whether scores are log-probabilities after temperature, top-k and top-p.
    logit_callback_fn: function of (logits, state) that returns logits; see `SamplingCallback`.
    batch_size: number of outputs that are decoded at the same time by continuous batching
      (`batching.decode_all`); None to decode a batch of examples at once. It saves time if a batch
      has several times as many outputs. Not for a beam search or `prompt_with_targets`.
    beam_search: whether to search as t5x's `beam_search` does, with `num_decodes` beams. Of the
      settings above, only gamma and max_decode_steps apply.
    draft_beams: number of beams of the draft; defaults to that of the target.
    alpha: exponent of the length penalty of the beam search.
  """

  gamma: int = 5
  tree: Sequence[int] | None = None
  verifier: Callable[[Sampling], Verifier] = TokenVerifier
  lenience: float = 1.0
  temperature: float = 1.0
  topk: int = 0
  topp: float = 0.0
  max_decode_steps: int | None = None
  rescale_log_probs: bool = True
  logit_callback_fn: Callable[..., Array] | None = None
  batch_size: int | None = None
  beam_search: bool = False
  draft_beams: int | None = None
  alpha: float = 0.6

  def __post_init__(self):
    if self.batch_size is not None:
      require_count("batch_size", self.batch_size)
    if self.beam_search:
      require_count("gamma", self.gamma)
    elif self.topk and self.topp:
      raise InputError(
        f"topk is {self.topk} and topp is {self.topp}; as in t5x's temperature_sample one of them "
        "must be 0."
      )
    else:
      _ = self.tree_of_round, self.built_verifier  # raise before a checkpoint is read

  @property
  def sampling(self) -> Sampling:
    """Sampling method of target and draft."""
    return Sampling(self.temperature, self.topk, self.topp or 1.0)

  @property
  def tree_of_round(self) -> Tree:
    """Tree of draft tokens."""
    return chain(self.gamma) if self.tree is None else Tree(self.tree)

  @property
  def built_verifier(self) -> Verifier:
    """Verifier for the sampling method."""
    return self.verifier(self.sampling).with_lenience(self.lenience)


class _Draft(ModelDraft):
  """A draft whose q is sharded by t5x's rules for the draft's axes; by default only by batch.

  Otherwise q would be sharded by vocabulary like the target's logits, and devices would communicate
  in every draft step.
  """

  def propose(self, params: Any, state: Any, context: Context, rng: Keys) -> tuple[Proposal, Any]:
    proposal, state = super().propose(params, state, context, rng)
    if proposal.q is None:
      return proposal, state
    axes = "batch", f"{DRAFT}_draft_tokens", f"{DRAFT}_vocab"
    return proposal._replace(q=nn.with_logical_constraint(proposal.q, axes)), state


class SpeculativeModel(models.EncoderDecoderModel):
  """Encoder-decoder model of t5x that decodes speculatively.

  Its parameters are the tree of the target's parameters, with an additional entry 'draft' that
  holds those of the draft. Everything except decoding, such as scoring, is that of t5x and uses
  only the target.
  """

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary,
    output_vocabulary,
    optimizer_def,
    *,
    draft_module: nn.Module,
    decoding: Decoding = Decoding(),
    **kwargs,
  ):
    """Create a model from the arguments of `EncoderDecoderModel` and a draft.

    Args:
      draft_module: network of the draft; like `module`, from t5x.examples.t5.
      **kwargs: optional arguments of `EncoderDecoderModel`, except `decode_fn`.
    """
    if "decode_fn" in kwargs:
      raise InputError("decode_fn has no effect here; set t5x.Decoding, which has beam_search.")
    super().__init__(module, input_vocabulary, output_vocabulary, optimizer_def, **kwargs)
    self._draft = models.EncoderDecoderModel(
      draft_module, input_vocabulary, output_vocabulary, optimizer_def
    )
    self.decoding = decoding
    target_config, draft_config = same_config(module), same_config(draft_module)
    if target_config.vocab_size != draft_config.vocab_size:
      raise InputError(
        f"The target's network has vocab_size {target_config.vocab_size} and the draft's "
        f"{draft_config.vocab_size}; both must be trained with one vocabulary, padded to one size."
      )
    self._target_model, self._draft_model = T5Model(target_config), T5Model(draft_config)

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """Return initial variables of target and draft, with axis names for t5x's partitioner.

    Axes of the draft are named draft_vocab, draft_heads and so on. t5x has no rules for these
    names, so the draft is replicated unless `standard_logical_axis_rules.additional_rules` shards
    it. A small draft often cannot be sharded like the target: the 6 heads of T5 1.1 small, for
    example, cannot be sharded across 4 devices.
    """
    target = super().get_initial_variables(rng, input_shapes, input_types)
    draft = core.unfreeze(self._draft.get_initial_variables(rng, input_shapes, input_types))
    draft["params_axes"] = jax.tree.map(
      lambda axes: axes.replace(names=PartitionSpec(*(f"{DRAFT}_{name}" for name in axes.names))),
      draft["params_axes"],
      is_leaf=lambda x: isinstance(x, nn.partitioning.AxisMetadata),
    )
    return core.freeze({kind: {**target[kind], DRAFT: draft[kind]} for kind in target})

  def predict_batch_with_aux(
    self,
    params,
    batch: Mapping[str, Array],
    rng: Array | None = None,
    decoder_params: Mapping[str, Any] | None = None,
    return_all_decodes: bool | None = None,
    num_decodes: int | None = None,
    prompt_with_targets: bool = False,
  ) -> tuple[Array, dict[str, Any]]:
    """Decode speculatively.

    In a beam search, the texts, their order and their scores equal those of t5x's beam search with
    `num_decodes` beams. 'rounds' in the second result is then the result of `count_steps`, and the
    key is not used.

    Args:
      params: parameters of target and draft, in the structure of `get_initial_variables`.
      batch: encoder_input_tokens [B, S] and decoder_input_tokens [B, T]. Outputs are not longer
        than T. The decoder_input_tokens themselves are used only with `prompt_with_targets`.
      rng: key of the batch; alternatively, `decoder_params` has it as 'decode_rng'.
      decoder_params: settings of this call only: eos_id, and attributes of `Decoding`.
      return_all_decodes: whether to return A outputs per example, in order of increasing score,
        instead of only the best output. The default is that of `default_decoder_params`, as for A.
      num_decodes: A, the number of outputs that are decoded per example.
      prompt_with_targets: whether outputs begin with the decoder_input_tokens after the start
        token, up to the first EOS or padding. As in t5x, a beam search ignores it.

    Returns:
      Tokens [B, T], or [B, A, T] with `return_all_decodes`, and a dict of arrays with the same
      leading axes: 'scores', as in `temperature_sample`, and 'rounds', the result of
      `count_rounds`.
    """
    defaults = self._default_decoder_params
    num_decodes = defaults.num_decodes if num_decodes is None else num_decodes
    require_count("num_decodes", num_decodes)
    return_all = defaults.return_all_decodes if return_all_decodes is None else return_all_decodes
    of_call: dict[str, Any] = dict(decoder_params or {})
    eos_id = of_call.pop("eos_id", self.output_vocabulary.eos_id or 1)
    decode_rng = of_call.pop("decode_rng", None)
    known = [field.name for field in dataclasses.fields(Decoding)]
    if unknown := sorted(of_call.keys() - {*known}):
      raise InputError(
        f"decoder_params has {', '.join(unknown)}; SpeculativeModel knows {', '.join(known)}, "
        "eos_id and decode_rng."
      )
    settings = dataclasses.replace(self.decoding, **of_call)
    if rng is not None and decode_rng is not None:
      raise InputError("There are two keys, rng and decoder_params['decode_rng']; give one.")
    rng = decode_rng if rng is None else rng
    rng = jax.random.PRNGKey(0) if rng is None else rng
    length = batch["decoder_input_tokens"].shape[1]
    steps = length if settings.max_decode_steps is None else settings.max_decode_steps
    require_count("max_decode_steps", steps)
    if steps > length:
      raise InputError(
        f"max_decode_steps is {steps}, but the targets' length is {length}; make it {length} or "
        "less."
      )
    if DRAFT not in params:
      raise InputError(
        "The parameters have no 'draft', those of the draft; restore both with "
        "t5x.PairCheckpointer, or put the tree of the draft next to the target's under that name."
      )
    both = Params(*core.pop(params, DRAFT))
    source = jnp.asarray(batch["encoder_input_tokens"])
    if settings.beam_search:
      model = ModelDraft(self._draft_model, Sampling(temperature=0.0), chain(settings.gamma))
      draft = ModelBeamDraft(model, settings.draft_beams or num_decodes)
      searcher = BeamSearcher(self._target_model, draft, num_decodes, settings.alpha, eos_id)
      return _best_last(searcher.run(both, source, max_new_tokens=steps), return_all)
    prompt = None
    if prompt_with_targets:
      inputs = jnp.repeat(batch["decoder_input_tokens"], num_decodes, axis=0)
      inputs *= inputs != eos_id
      prompt = jnp.pad(inputs[:, 1:], ((0, 0), (0, 1)))  # the first input is the start token
    keys = jax.random.split(rng, len(source) * num_decodes)
    outputs, scores, rounds = self._sample(
      both, source, keys, settings, eos_id, steps, length, prompt
    )
    # As in t5x, outputs are sorted by increasing score.
    by_score = jnp.argsort(scores.reshape(-1, num_decodes), axis=1)
    rows = by_score + num_decodes * jnp.arange(len(by_score))[:, None]
    rows = rows if return_all else rows[:, -1]
    return outputs[rows], jax.tree.map(lambda x: x[rows], {"scores": scores, "rounds": rounds})

  def _sample(
    self,
    params: Params,
    source: Int[Array, "sources S"],
    keys: Key[Array, "*batch"] | Array,
    settings: Decoding,
    eos_id: int,
    steps: int,
    length: int,
    prompt: Int[Array, "B T"] | None,
  ) -> tuple[Int[Array, "B T"], Float[Array, " B"], dict[str, Any]]:
    """Return outputs of `length` tokens, at most `steps` of them new, their scores and counts."""
    num_rows = len(keys)
    verifier = settings.built_verifier
    processors: Processors = ()
    if settings.logit_callback_fn is not None:
      processors = (SamplingCallback(settings.logit_callback_fn),)
    options: dict[str, Any] = {"max_new_tokens": steps}
    num_forced = jnp.zeros(num_rows, int)
    if prompt is not None:
      num_forced = jnp.cumprod(prompt != 0, axis=1).sum(axis=1)
      is_forced = jnp.arange(length) < num_forced[:, None]
      processors += (ForcedPrefix(jnp.where(is_forced, prompt, -1)),)
      limit = jnp.minimum(num_forced + steps, length)
      options = {"max_new_tokens": length, "limit": limit, "num_forced": num_forced}
    coupled, independent = verifier.uses_position_keys, verifier.needs_independent_siblings
    draft = _Draft(
      self._draft_model,
      settings.sampling,
      settings.tree_of_round,
      DraftOptions(processors, coupled, independent),
    )
    decoder = Decoder(self._target_model, draft, verifier, eos_id, processors)
    count, batch_size = num_rows // len(source), settings.batch_size
    if batch_size is not None and prompt is None:
      sources = jnp.repeat(source, count, axis=0)
      decoded = decode_all(decoder, params, sources, keys, batch_size=batch_size, **options)
    else:
      decoded = decoder.run(params, source, keys, num_samples=count, **options)
    # An output is its prompt and the generated tokens.
    new = jnp.arange(length) - num_forced[:, None]
    generated = gather(decoded.tokens, jnp.clip(new, 0, decoded.tokens.shape[1] - 1))
    is_new = (new >= 0) & (new < decoded.lengths[:, None])
    outputs = jnp.where(is_new, generated, 0)
    if prompt is not None:
      outputs = jnp.where(new < 0, prompt, outputs)
    if settings.temperature == 0 and settings.rescale_log_probs:
      scores = jnp.zeros(num_rows)  # argmax has probability 1
    else:
      sampling = settings.sampling if settings.rescale_log_probs else Sampling()
      scores = self._scores(params.target, source, outputs, is_new, sampling, processors)
    return outputs, scores, count_rounds(decoded)

  def _scores(
    self,
    params: Any,
    source: Int[Array, "sources S"],
    outputs: Int[Array, "B T"],
    is_new: Bool[Array, "B T"],
    sampling: Sampling,
    processors: Processors,
  ) -> Float[Array, " B"]:
    """Return the log-probability of the generated tokens of each output, where `is_new` is true.

    This takes an additional target forward pass, which jit removes if the scores are not used.
    """
    batch, limit = outputs.shape
    inputs = jnp.pad(outputs[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID)
    _, cache = self._target_model.prefill(params, source, limit)
    source, cache = repeat_rows((source, cache), batch // len(source))
    logits, _, _ = self._target_model.extend(params, cache, inputs)
    if processors:
      one = jnp.ones(batch, jnp.int32)
      start = one + (~is_new).cumprod(axis=1).sum(axis=1)
      context = Context(source, inputs, one, None, inputs, start, one + limit)
      prefixes = node_prefixes(context, inputs[:, 1:], chain(limit - 1))
      logits = process(processors, logits, prefixes)
    p = distribution(logits, sampling)
    return jnp.where(is_new, jnp.log(gather_token(p, outputs)), 0.0).sum(axis=1)


@dataclasses.dataclass(frozen=True)
class SamplingCallback(LogitsProcessor):
  """Logits processor that calls a `logit_callback_fn` of t5x's `temperature_sample`.

  The function receives logits [B * K, V] and a `SamplingLoopState`, both with one row per node of
  the block. Only `cur_index`, `cur_token` and `sequences` up to `cur_index` have the values that
  they have in t5x, so the function must not use the other fields.
  """

  function: Callable[..., Array]

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    def flat(x: Array) -> Array:
      return x.reshape(-1, *x.shape[2:])

    index, sequences = flat(prefixes.length) - 1, flat(prefixes.tokens)
    state = t5x_decoding.SamplingLoopState(
      step=index.max(),
      cur_index=index,
      sequences=sequences,
      cache={},
      cur_token=gather(sequences, index[:, None]),
      ended=jnp.zeros((len(index), 1), bool),
      rng=jax.random.PRNGKey(0),
      log_prob=jnp.zeros(len(index)),
    )
    return self.function(flat(logits), state).reshape(logits.shape)


def _best_last(result: BeamResult, return_all: bool) -> tuple[Array, dict[str, Any]]:
  tokens, scores = jnp.flip(result.tokens, axis=1), jnp.flip(result.scores, axis=1)
  scores = jnp.maximum(scores, t5x_decoding.NEG_INF)  # the score of a missing text in t5x
  counts = count_steps(result)
  if not return_all:
    return tokens[:, -1], {"scores": scores[:, -1], "rounds": counts}
  num_decodes = tokens.shape[1]
  counts = {name: jnp.repeat(x[:, None], num_decodes, axis=1) for name, x in counts.items()}
  return tokens, {"scores": scores, "rounds": counts}


def count_steps(result: BeamResult) -> dict[str, Int[Array, " B"]]:
  """Return counts for each row of a beam search.

  `num_rounds` is the number of target forward passes. `not_finite` is that of `BeamResult`.
  """
  return {
    "num_steps": result.steps.sum(axis=0),
    "num_rounds": (result.steps > 0).sum(axis=0),
    "not_finite": result.not_finite,
  }


def count_rounds(decoded: DecodeResult) -> dict[str, Int[AnyArray, " B"]]:
  """Return counts for each decoded row.

  `num_tokens` includes EOS. `num_rounds` is the number of target forward passes that emitted
  tokens. num_accepted / (num_accepted + num_rejected) is the acceptance rate
  (`Rounds.acceptance_counts`). `not_finite` is that of `DecodeResult`.
  """
  accepted, rejected = decoded.rounds.acceptance_counts()
  return {
    "num_tokens": decoded.lengths,
    "num_rounds": (decoded.rounds.num_emitted > 0).sum(axis=0),
    "num_accepted": accepted,
    "num_rejected": rejected,
    "not_finite": decoded.not_finite,
  }
