"""The model class: t5x's encoder-decoder, which decodes by speculation.

Axes: B batch, N decodes of an example, P source tokens, T target tokens.
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
from jaxtyping import Int
from t5x import decoding, models

from specdec_jax.beam_search import BeamResult, BeamSearcher, ModelBeamDraft
from specdec_jax.core.decode import Decoder
from specdec_jax.core.sampling import Sampling, distribution
from specdec_jax.core.trees import Tree, chain
from specdec_jax.core.types import Context, DecodeResult, Params, Proposal, Verifier
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count, require_types
from specdec_jax.models.t5 import PAD_ID, T5Model
from specdec_jax.pairs import verifier_from
from specdec_jax.t5x_model.checkpointer import DRAFT
from specdec_jax.t5x_model.networks import same_config
from specdec_jax.t5x_model.settings import bound, decode_settings

# The optional arguments of t5x's constructor. What gin binds to them on `EncoderDecoderModel`
# applies to `SpeculativeModel` too.
INHERITED = tuple(
  name
  for name, parameter in inspect.signature(models.EncoderDecoderModel).parameters.items()
  if parameter.default is not inspect.Parameter.empty
)


class _Draft(ModelDraft):
  """A draft whose q is sharded as t5x's rules say of the draft's own axes; replicated by default.

  Without the constraint it would be sharded by vocabulary, as the target's logits are, and every
  draft step would exchange messages. Outside of t5x's partitioner it changes nothing.
  """

  def propose(self, params: Any, state: Any, context: Context, rng: Array) -> tuple[Proposal, Any]:
    proposal, state = super().propose(params, state, context, rng)
    axes = "batch", f"{DRAFT}_guesses", f"{DRAFT}_vocab"
    return proposal._replace(q=nn.with_logical_constraint(proposal.q, axes)), state


class SpeculativeModel(models.EncoderDecoderModel):
  """t5x's encoder-decoder with a draft: decodes by speculation and does all else as before.

  Parameters are the target's tree with the draft's in it, under 'draft'. How it decodes is said as
  in t5x: by `decode_fn`, which is `temperature_sample` or `beam_search`, and what it is bound to.
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
    **kwargs,
  ):
    """The target as for `EncoderDecoderModel`, and a draft.

    What gin binds to the optional arguments of `EncoderDecoderModel` (`INHERITED`) applies here
    too. `decode_fn` defaults to `temperature_sample`.

    Args:
      draft_module: network of the draft, of t5x.examples.t5 as the target's.
      gamma: guesses in a round, one after the other, if there is no tree.
      tree: parents of a round's guesses, as `trees.Tree` has them.
      verifier: how guesses are judged: a class of `rules`, or any (sampling) -> verifier. One that is not
        exact is taken as asked for.
      lenience: of `TokenVerifier`; 1 for exactness (Appendix A.5).
      draft_beams: of a draft's search, whose steps gamma is; as many as the target's unless told.

    Raises:
      InputError: a network is of another kind, the two have different vocabularies, guesses cannot
        be made or judged so, or `decode_fn` is, or is bound to, what speculation has not.
    """
    inherited = bound(models.EncoderDecoderModel, *INHERITED)
    kwargs = {"decode_fn": decoding.temperature_sample} | inherited | kwargs
    common = input_vocabulary, output_vocabulary, optimizer_def
    super().__init__(module, *common, **kwargs)
    self._draft = models.EncoderDecoderModel(draft_module, *common)
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
    of_round = {"gamma": gamma, "tree": tree, "verifier": verifier, "lenience": lenience}
    require_types(SpeculativeModel.__init__, of_round)
    if self._searches:
      # Gin passes a subclass of the verifier that makes instances of the verifier itself, so compare those.
      if tree is not None or verifier_from(verifier, Sampling(), lenience) != TokenVerifier(
        Sampling()
      ):
        raise InputError(
          "decode_fn is beam_search, whose draft searches gamma steps ahead; a tree, a verifier and "
          "lenience are for temperature_sample."
        )
      require_count("gamma", gamma)
      of_round = {"gamma": gamma, "draft_beams": draft_beams}
    self._settings = of_round | settings
    if not self._searches:
      self._draft_and_verifier(self._settings)  # what cannot be is told before a checkpoint is read

  def get_initial_variables(self, rng, input_shapes, input_types=None):
    """Random variables of both, and for t5x's partitioner the axes of their parameters.

    The draft's axes are called draft_vocab, draft_heads and so on: t5x has no rule for those, so
    each device has the whole draft, unless `standard_logical_axis_rules.additional_rules` says
    otherwise. T5 1.1 small has 6 heads, which no 4 devices can share.
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
    """Decode by speculation.

    By `beam_search` the texts, their order and scores are t5x's own, num_decodes of them; 'rounds'
    are `count_steps` of each example, and a `decode_rng` is of no use.

    What gin binds to `EncoderDecoderModel.predict_batch_with_aux` holds where this call says
    nothing.

    Args:
      params: of both, as `get_initial_variables` lays them out.
      batch: encoder_input_tokens [B, P], and decoder_input_tokens [B, T], of which only the
        length counts: no output is longer.
      rng: of the batch; `decoder_params` may hold it as 'decode_rng'.
      decoder_params: gamma, tree, verifier, lenience, eos_id and `settings.SETTINGS` that this call
        sets otherwise.
      return_all_decodes: N outputs of each example, by increasing score, instead of the best.
      num_decodes: N.
      prompt_with_targets: as t5x has it; must be False.

    Returns:
      Tokens [B, T], or [B, N, T] with `return_all_decodes`; and, with the same leading axes, their
      'scores' (as `temperature_sample` has them) and the 'rounds' behind each (`count_rounds`).

    Raises:
      InputError: a parameter is unknown, of no use, or not one that speculation knows; or the draft
        has none.
    """
    said = {
      "decoder_params": decoder_params,
      "return_all_decodes": return_all_decodes,
      "num_decodes": num_decodes,
      "prompt_with_targets": prompt_with_targets or None,
    }
    call: dict[str, Any] = {"decoder_params": {}, "prompt_with_targets": False}
    call |= dataclasses.asdict(self._default_decoder_params)
    call |= bound(models.EncoderDecoderModel.predict_batch_with_aux)
    call |= {name: value for name, value in said.items() if value is not None}
    num_decodes = call["num_decodes"]
    require_count("num_decodes", num_decodes)
    if call["prompt_with_targets"]:
      raise InputError(
        "prompt_with_targets is True, but SpeculativeModel begins with an empty output; decode "
        "from prompts with t5x's EncoderDecoderModel."
      )
    how = self._settings | {"eos_id": self.output_vocabulary.eos_id or 1, "decode_rng": None}
    if unknown := sorted(call["decoder_params"].keys() - how.keys()):
      raise InputError(
        f"decoder_params has {', '.join(unknown)}; SpeculativeModel knows {', '.join(how)}."
      )
    how |= call["decoder_params"]
    if rng is not None and how["decode_rng"] is not None:
      raise InputError("There are two keys, rng and decoder_params['decode_rng']; give one.")
    rng = how["decode_rng"] if rng is None else rng
    rng = jax.random.PRNGKey(0) if rng is None else rng
    width = batch["decoder_input_tokens"].shape[1]
    steps = width if how.get("max_decode_steps") is None else how["max_decode_steps"]
    require_count("max_decode_steps", steps)
    if steps > width:
      raise InputError(
        f"max_decode_steps is {steps}, but the targets' length is {width}; make it {width} or less."
      )
    if DRAFT not in params:
      raise InputError(
        "The parameters have no 'draft', the draft's own; restore both with t5x_model."
        "PairCheckpointer, or put the draft's tree beside the target's under that name."
      )
    target_params, draft_params = core.pop(params, DRAFT)
    if self._searches:
      guesses = ModelDraft(self._draft_model, Sampling(temperature=0.0), chain(how["gamma"]))
      draft = ModelBeamDraft(
        guesses, num_decodes if how["draft_beams"] is None else how["draft_beams"]
      )
      searcher = BeamSearcher(self._target_model, draft, num_decodes, how["alpha"], how["eos_id"])
      result = searcher.run(
        Params(target_params, draft_params), batch["encoder_input_tokens"], max_new_tokens=steps
      )
      return _best_last(result, call["return_all_decodes"])

    draft, verifier = self._draft_and_verifier(how)
    if how["topk"] and how["topp"]:
      raise InputError(
        f"topk is {how['topk']} and topp is {how['topp']}; as in t5x's temperature_sample one of "
        "them must be 0."
      )
    source = jnp.repeat(batch["encoder_input_tokens"], num_decodes, axis=0)
    decoder = Decoder(self._target_model, draft, verifier, how["eos_id"])
    params, rng = Params(target_params, draft_params), jax.random.split(rng, len(source))
    decoded = decoder.run(params, source, rng, max_new_tokens=steps)
    if draft.sampling.temperature == 0 and how["rescale_log_probs"]:
      scores = jnp.zeros(len(source))  # argmax leaves no other choice
    else:
      scored = draft.sampling if how["rescale_log_probs"] else Sampling()
      scores = self._scores(target_params, source, decoded, scored)
    # t5x sorts by score, the best last.
    by_score = jnp.argsort(scores.reshape(-1, num_decodes), axis=1)
    rows = by_score + num_decodes * jnp.arange(len(by_score))[:, None]
    rows = rows if call["return_all_decodes"] else rows[:, -1]
    tokens = jnp.pad(decoded.tokens, ((0, 0), (0, width - steps)))
    aux = {"scores": scores, "rounds": count_rounds(decoded)}
    return tokens[rows], jax.tree.map(lambda x: x[rows], aux)

  def _draft_and_verifier(self, how: Mapping[str, Any]) -> tuple[ModelDraft, Verifier]:
    """Who guesses and who judges, by values as `_settings` has them."""
    of_round = {name: how[name] for name in ("gamma", "tree", "verifier", "lenience")}
    require_types(SpeculativeModel.__init__, of_round)
    sampling = Sampling(how["temperature"], how["topk"], how["topp"] or 1.0)
    tree = chain(how["gamma"]) if how["tree"] is None else Tree(how["tree"])
    verifier = verifier_from(how["verifier"], sampling, how["lenience"])
    draft = _Draft(self._draft_model, sampling, tree, verifier.needs_independent_siblings)
    return draft, verifier

  def _scores(self, params, source: Array, decoded: DecodeResult, sampling: Sampling) -> Array:
    """Log-probability [B] of each output; one more pass of the target, if anyone reads it."""
    tokens, limit = decoded.tokens, decoded.tokens.shape[1]
    inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID)
    _, cache = self._target_model.prefill(params, source, limit)
    logits, _, _ = self._target_model.extend(params, cache, inputs)
    p = distribution(logits, sampling)
    of_tokens = jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
    is_text = jnp.arange(limit) < decoded.lengths[:, None]
    return jnp.where(is_text, jnp.log(of_tokens), 0.0).sum(axis=1)


def _best_last(result: BeamResult, return_all: bool) -> tuple[Array, dict[str, Any]]:
  """Return the result of a beam search in the form of `predict_batch_with_aux`, best text last."""
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
    num_rounds: number of target forward passes that made them.
    not_finite: as in `BeamResult`; -1 if all logits were finite.
  """
  return {
    "num_steps": result.steps.sum(axis=0),
    "num_rounds": (result.steps > 0).sum(axis=0),
    "not_finite": result.not_finite,
  }


def count_rounds(decoded: DecodeResult) -> dict[str, Array]:
  """Counts [B] of each row's rounds.

  num_tokens: emitted. num_rounds: passes of the target that emitted them. num_accepted and
  num_rejected: guesses judged, without those behind EOS or the limit, siblings as one (`judged`);
  acceptance_rate is accepted / (accepted + rejected). not_finite: as in `DecodeResult`; -1 is well.
  """
  accepted, rejected = decoded.rounds.acceptance_counts()
  return {
    "num_tokens": decoded.lengths,
    "num_rounds": (decoded.rounds.num_emitted > 0).sum(axis=0),
    "num_accepted": accepted,
    "num_rejected": rejected,
    "not_finite": decoded.not_finite,
  }
