"""t5x's encoder-decoder model with speculative decoding.

Axis letters: B examples or decoded rows, S source tokens, T target tokens, A decoded rows per
example (`num_decodes`). K and V are those of `core.types`.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import core
from flax import linen as nn
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int, Key
from t5x import decoding, models

from specdec_jax.batching import decode_all
from specdec_jax.beams import BeamResult, BeamSearcher, ModelBeamDraft
from specdec_jax.core.arrays import gather, gather_token, repeat_rows
from specdec_jax.core.decode import Decoder
from specdec_jax.core.processors import (
  ForcedPrefix,
  LogitsProcessor,
  Prefixes,
  Processors,
  node_prefixes,
  process,
)
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import AnyArray, Context, DecodeResult, Params, Proposal, Verifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count
from specdec_jax.models.t5 import PAD_ID, T5Model
from specdec_jax.t5x.checkpointer import DRAFT
from specdec_jax.t5x.networks import same_config
from specdec_jax.t5x.settings import bound, decode_settings

# Optional arguments of t5x's constructor. If gin binds them for `EncoderDecoderModel`, the bindings
# apply to `SpeculativeModel` too.
INHERITED = tuple(
  name
  for name, parameter in inspect.signature(models.EncoderDecoderModel).parameters.items()
  if parameter.default is not inspect.Parameter.empty
)


class _Draft(ModelDraft):
  """A draft whose q is sharded by t5x's rules for the draft's axes; by default only by batch.

  Without the constraint, q would be sharded by vocabulary like the target's logits, and devices
  would communicate in every draft step. Outside of t5x's partitioner, the constraint has no effect.
  """

  def propose(
    self, params: Any, state: Any, context: Context, rng: Key[Array, " B"]
  ) -> tuple[Proposal, Any]:
    proposal, state = super().propose(params, state, context, rng)
    axes = "batch", f"{DRAFT}_guesses", f"{DRAFT}_vocab"
    return proposal._replace(q=nn.with_logical_constraint(proposal.q, axes)), state


class SpeculativeModel(models.EncoderDecoderModel):
  """Encoder-decoder model of t5x that decodes speculatively.

  Its parameters are the tree of the target's parameters, with an additional entry 'draft' that
  holds those of the draft. As in t5x, `decode_fn` and its bindings configure decoding. `decode_fn`
  is `temperature_sample` or `beam_search`. Everything except decoding, such as scoring, is that of
  t5x and uses only the target.
  """

  def __init__(
    self,
    module: nn.Module,
    input_vocabulary,
    output_vocabulary,
    optimizer_def,
    *,
    draft_module: nn.Module,
    gamma: int = 5,
    tree: Sequence[int] | None = None,
    verifier: Callable[[Sampling], Verifier] = TokenVerifier,
    lenience: float = 1.0,
    draft_beams: int | None = None,
    num_slots: int | None = None,
    **kwargs,
  ):
    """Create a model from the arguments of `EncoderDecoderModel` and a draft.

    Gin bindings of optional arguments of `EncoderDecoderModel` (`INHERITED`) apply here too.
    `decode_fn` defaults to `temperature_sample`.

    Args:
      module: network of the target, from t5x.examples.t5.
      input_vocabulary: vocabulary of the sources.
      output_vocabulary: vocabulary of the outputs.
      optimizer_def: t5x's optimizer, used for training only.
      draft_module: network of the draft, from t5x.examples.t5.
      gamma: length of the chain of draft tokens per round, if there is no tree; with `beam_search`,
        the number of steps that the draft searches ahead.
      tree: parents of the draft tokens, as in `core.trees.Tree`; None for a chain.
      verifier: class of `core.verify`, or any function of a `Sampling` that returns a verifier. The
        verifier need not be exact.
      lenience: lenience of `TokenVerifier` (Appendix A.5); 1 is exact.
      draft_beams: number of beams of the draft with `beam_search`; defaults to the number of beams
        of the target.
      num_slots: number of outputs of a batch that are decoded at the same time by continuous
        batching (`batching.decode_all`); None to decode the whole batch at once. It
        saves time if a batch has several times as many outputs. Not for
        `beam_search` or `prompt_with_targets`.
      **kwargs: optional arguments of `EncoderDecoderModel`.

    Raises:
      InputError: a network is not supported, the networks have different vocabularies, a setting is
        invalid for the draft, the verifier or `decode_fn`, or `decode_fn` or one of its bindings is
        not supported.
    """
    inherited = bound(models.EncoderDecoderModel, *INHERITED)
    kwargs = {"decode_fn": decoding.temperature_sample} | inherited | kwargs
    super().__init__(module, input_vocabulary, output_vocabulary, optimizer_def, **kwargs)
    self._draft = models.EncoderDecoderModel(
      draft_module, input_vocabulary, output_vocabulary, optimizer_def
    )
    configs = {"target": same_config(module), "draft": same_config(draft_module)}
    sizes = {role: config.vocab_size for role, config in configs.items()}
    if sizes["target"] != sizes["draft"]:
      raise InputError(
        f"The target's network has vocab_size {sizes['target']} and the draft's {sizes['draft']}; "
        "both must be trained with one vocabulary, padded to one size."
      )
    self._target_model, self._draft_model = map(T5Model, configs.values())
    function, settings = decode_settings(self.decode_fn)
    self._searches = function is decoding.beam_search
    round_settings = {"gamma": gamma, "tree": tree, "verifier": verifier, "lenience": lenience}
    if num_slots is not None:
      require_count("num_slots", num_slots)
    self._num_slots = num_slots
    if self._searches:
      # Gin passes a subclass of the verifier, whose instances are of the class itself. Therefore
      # instances are compared.
      default = TokenVerifier(Sampling())
      if tree is not None or verifier(Sampling()).with_lenience(lenience) != default:
        raise InputError(
          "decode_fn is beam_search, whose draft searches gamma steps ahead; a tree, a verifier "
          "and lenience are for temperature_sample."
        )
      require_count("gamma", gamma)
      round_settings = {"gamma": gamma, "draft_beams": draft_beams}
    self._settings = round_settings | settings
    if not self._searches:
      self._draft_and_verifier(self._settings)  # raises before a checkpoint is read

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

    With `beam_search`, the texts, their order and their scores equal those of t5x's beam search
    with `num_decodes` beams. 'rounds' in the second result is then the result of `count_steps`, and
    the key is not used.

    Gin bindings of `EncoderDecoderModel.predict_batch_with_aux` replace arguments that are not
    given.

    Args:
      params: parameters of target and draft, in the structure of `get_initial_variables`.
      batch: encoder_input_tokens [B, S] and decoder_input_tokens [B, T]. Outputs are not longer
        than T. The decoder_input_tokens themselves are used only with `prompt_with_targets`.
      rng: key of the batch; alternatively, `decoder_params` has it as 'decode_rng'.
      decoder_params: settings of this call only: eos_id, the parameters of `decode_fn` in
        `settings.SETTINGS`, and gamma, tree, verifier and lenience. With `beam_search`, gamma and
        draft_beams take the place of the last four.
      return_all_decodes: whether to return A outputs per example, in order of increasing score,
        instead of only the best output.
      num_decodes: A, the number of outputs that are decoded per example.
      prompt_with_targets: whether outputs begin with the decoder_input_tokens after the start
        token, up to the first EOS or padding. As in t5x, a beam search ignores it.

    Returns:
      Tokens [B, T], or [B, A, T] with `return_all_decodes`, and a dict of arrays with the same
      leading axes: 'scores', as in `temperature_sample`, and 'rounds', the result of
      `count_rounds`.

    Raises:
      InputError: a parameter is unknown, or has a value that is not supported; two keys are given;
        or `params` lacks the draft.
    """
    given = {
      "decoder_params": decoder_params,
      "return_all_decodes": return_all_decodes,
      "num_decodes": num_decodes,
      "prompt_with_targets": prompt_with_targets or None,
    }
    call: dict[str, Any] = {"decoder_params": {}, "prompt_with_targets": False}
    call |= dataclasses.asdict(self._default_decoder_params)
    call |= bound(models.EncoderDecoderModel.predict_batch_with_aux)
    call |= {name: value for name, value in given.items() if value is not None}
    num_decodes = call["num_decodes"]
    require_count("num_decodes", num_decodes)
    settings = self._settings | {"eos_id": self.output_vocabulary.eos_id or 1, "decode_rng": None}
    if unknown := sorted(call["decoder_params"].keys() - settings.keys()):
      raise InputError(
        f"decoder_params has {', '.join(unknown)}; SpeculativeModel knows {', '.join(settings)}."
      )
    settings |= call["decoder_params"]
    if rng is not None and settings["decode_rng"] is not None:
      raise InputError("There are two keys, rng and decoder_params['decode_rng']; give one.")
    rng = settings["decode_rng"] if rng is None else rng
    rng = jax.random.PRNGKey(0) if rng is None else rng
    length = batch["decoder_input_tokens"].shape[1]
    steps = length if settings.get("max_decode_steps") is None else settings["max_decode_steps"]
    require_count("max_decode_steps", steps)
    if steps > length:
      raise InputError(
        f"max_decode_steps is {steps}, but the targets' length is {length}; make it {length} or "
        "less."
      )
    if DRAFT not in params:
      raise InputError(
        "The parameters have no 'draft', those of the draft; restore both with t5x_model."
        "PairCheckpointer, or put the tree of the draft next to the target's under that name."
      )
    target_params, draft_params = core.pop(params, DRAFT)
    params = Params(target_params, draft_params)
    source = jnp.asarray(batch["encoder_input_tokens"])
    if self._searches:
      searcher = self._searcher(num_decodes, settings)
      result = searcher.run(params, source, max_new_tokens=steps)
      return _best_last(result, call["return_all_decodes"])

    draft, verifier = self._draft_and_verifier(settings)
    if settings["topk"] and settings["topp"]:
      raise InputError(
        f"topk is {settings['topk']} and topp is {settings['topp']}; as in t5x's "
        "temperature_sample one of them must be 0."
      )
    num_rows = len(source) * num_decodes
    processors: Processors = ()
    if settings["logit_callback_fn"] is not None:
      processors = (SamplingCallback(settings["logit_callback_fn"]),)
    options: dict[str, Any] = {"max_new_tokens": steps}
    prompt, num_forced = jnp.zeros((num_rows, length), jnp.int32), jnp.zeros(num_rows, int)
    if call["prompt_with_targets"]:
      inputs = jnp.repeat(batch["decoder_input_tokens"], num_decodes, axis=0)
      inputs *= inputs != settings["eos_id"]
      # The first input is the start token.
      prompt = jnp.pad(inputs[:, 1:], ((0, 0), (0, 1)))
      num_forced = jnp.cumprod(prompt != 0, axis=1).sum(axis=1)
      is_forced = jnp.arange(length) < num_forced[:, None]
      processors += (ForcedPrefix(jnp.where(is_forced, prompt, -1)),)
      limit = jnp.minimum(num_forced + steps, length)
      options = {"max_new_tokens": length, "limit": limit, "num_forced": num_forced}
    draft_with_processors = draft.with_processors(processors)
    decoder = Decoder(
      self._target_model, draft_with_processors, verifier, settings["eos_id"], processors
    )
    rng = jax.random.split(rng, num_rows)
    if self._num_slots is not None and not call["prompt_with_targets"]:
      sources, options["num_slots"] = jnp.repeat(source, num_decodes, axis=0), self._num_slots
      decoded = decode_all(decoder, params, sources, rng, **options)
    else:
      decoded = decoder.run(params, source, rng, num_samples=num_decodes, **options)
    # An output is its prompt and the generated tokens.
    new = jnp.arange(length) - num_forced[:, None]
    generated = gather(decoded.tokens, jnp.clip(new, 0, decoded.tokens.shape[1] - 1))
    is_new = (new >= 0) & (new < decoded.lengths[:, None])
    outputs = jnp.where(new < 0, prompt, jnp.where(is_new, generated, 0))
    if draft.sampling.temperature == 0 and settings["rescale_log_probs"]:
      scores = jnp.zeros(num_rows)  # argmax has probability 1
    else:
      scored = draft.sampling if settings["rescale_log_probs"] else Sampling()
      scores = self._scores(target_params, source, outputs, is_new, scored, processors)
    # As in t5x, outputs are sorted by increasing score.
    by_score = jnp.argsort(scores.reshape(-1, num_decodes), axis=1)
    rows = by_score + num_decodes * jnp.arange(len(by_score))[:, None]
    rows = rows if call["return_all_decodes"] else rows[:, -1]
    aux = {"scores": scores, "rounds": count_rounds(decoded)}
    return outputs[rows], jax.tree.map(lambda x: x[rows], aux)

  def _searcher(self, num_beams: int, settings: Mapping[str, Any]) -> BeamSearcher:
    """Return the beam search with the given settings, named as in `_settings`."""
    draft_beams = num_beams if settings["draft_beams"] is None else settings["draft_beams"]
    model_draft = ModelDraft(self._draft_model, Sampling(temperature=0.0), chain(settings["gamma"]))
    draft = ModelBeamDraft(model_draft, draft_beams)
    return BeamSearcher(self._target_model, draft, num_beams, settings["alpha"], settings["eos_id"])

  def _draft_and_verifier(self, settings: Mapping[str, Any]) -> tuple[ModelDraft, Verifier]:
    """Return the draft and the verifier with the given settings, named as in `_settings`."""
    sampling = Sampling(settings["temperature"], settings["topk"], settings["topp"] or 1.0)
    tree = chain(settings["gamma"]) if settings["tree"] is None else Tree(settings["tree"])
    verifier = settings["verifier"](sampling).with_lenience(settings["lenience"])
    draft = _Draft(self._draft_model, sampling, tree, verifier.needs_independent_siblings)
    return draft, verifier

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

  Attributes:
    function: function of (logits, state) that returns logits.
  """

  function: Callable[..., Array]

  def __call__(self, logits: Float[Array, "B K V"], prefixes: Prefixes) -> Float[Array, "B K V"]:
    def flat(x: Array) -> Array:
      return x.reshape(-1, *x.shape[2:])

    index, sequences = flat(prefixes.length) - 1, flat(prefixes.tokens)
    state = decoding.SamplingLoopState(
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
  """Return the result of a beam search in the form of `predict_batch_with_aux`.

  With `return_all`, it has all texts, the best one last; otherwise only the best text.
  """
  tokens, scores = jnp.flip(result.tokens, axis=1), jnp.flip(result.scores, axis=1)
  counts = count_steps(result)
  if not return_all:
    return tokens[:, -1], {"scores": scores[:, -1], "rounds": counts}
  num_decodes = tokens.shape[1]
  counts = {name: jnp.repeat(x[:, None], num_decodes, axis=1) for name, x in counts.items()}
  return tokens, {"scores": scores, "rounds": counts}


def count_steps(result: BeamResult) -> dict[str, Int[Array, " B"]]:
  """Return counts for each row of a beam search.

  Returns:
    num_steps: number of steps of the search.
    num_rounds: number of target forward passes that made these steps.
    not_finite: see `BeamResult`; -1 if no step failed.
  """
  return {
    "num_steps": result.steps.sum(axis=0),
    "num_rounds": (result.steps > 0).sum(axis=0),
    "not_finite": result.not_finite,
  }


def count_rounds(decoded: DecodeResult) -> dict[str, Int[AnyArray, " B"]]:
  """Return counts for each decoded row.

  Returns:
    num_tokens: number of new tokens, EOS included.
    num_rounds: number of target forward passes that emitted these tokens.
    num_accepted: number of accepted draft tokens, as in `Rounds.acceptance_counts`.
    num_rejected: number of rejected draft tokens. num_accepted / (num_accepted + num_rejected) is
      the acceptance rate.
    not_finite: see `DecodeResult`; -1 if all tokens could be decoded.
  """
  accepted, rejected = decoded.rounds.acceptance_counts()
  return {
    "num_tokens": decoded.lengths,
    "num_rounds": (decoded.rounds.num_emitted > 0).sum(axis=0),
    "num_accepted": accepted,
    "num_rejected": rejected,
    "not_finite": decoded.not_finite,
  }
