"""Speculative decoding as a t5x model: the one module that imports t5x.

t5x's own `infer.py` runs it; `gin/t5x/` holds the bindings and `docs/t5x.md` the commands.

Axes: B batch, N decodes of an example, P source tokens, T target tokens, R rounds.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gin
import jax
import jax.numpy as jnp
from flax import core
from flax import linen as nn
from jax import Array
from jax.sharding import PartitionSpec
from t5x import checkpoints, decoding, models
from t5x.examples.t5 import network

from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.decoding import speculative_decode
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.errors import InputError, require_count
from specdec_jax.measurement.speed import Baseline
from specdec_jax.models.config import T5Config, named_dtype
from specdec_jax.models.t5 import PAD_ID, T5Model
from specdec_jax.pairs import EMBEDDED, Pair, checkpoint_name
from specdec_jax.protocols import Decoded, Rounds
from specdec_jax.rules.tokens import TokenRule
from specdec_jax.sampling import Sampling, distribution
from specdec_jax.trees import chain

DRAFT = "draft"  # name of the draft's tree, beside the target's encoder and decoder

# What binds how it is decoded, and has a meaning here: of `EncoderDecoderModel`,
INHERITED = "decode_fn", "default_decoder_params", "feature_converter_cls"
# and of `temperature_sample`.
SETTINGS = "temperature", "topk", "topp", "max_decode_steps", "rescale_log_probs"


class SpeculativeModel(models.EncoderDecoderModel):
  """t5x's encoder-decoder with a draft: decodes by speculation and does all else as before.

  Parameters are the target's tree with the draft's in it, under 'draft'. How it samples is said as
  in t5x: by `decode_fn`, which is `temperature_sample`, and what it is bound to.
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
    lenience: float = 1.0,
    **kwargs,
  ):
    """The target as for `EncoderDecoderModel`, and a draft.

    What gin binds to `EncoderDecoderModel`'s decode_fn, default_decoder_params and
    feature_converter_cls holds here too. Without a decode_fn it is `temperature_sample`.

    Args:
      draft_module: network of the draft, of t5x.examples.t5 as the target's.
      gamma: guesses in a round.
      lenience: 1 for exactness (Appendix A.5).

    Raises:
      InputError: a network is of another kind, the two have different vocabularies, or `decode_fn`
        is, or is bound to, what speculation has not.
    """
    inherited = _bound(models.EncoderDecoderModel, *INHERITED)
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
    self._settings = {"gamma": gamma, "lenience": lenience} | sampling_settings(self.decode_fn)

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
    """Decode by speculation (Algorithm 1).

    What gin binds to `EncoderDecoderModel.predict_batch_with_aux` holds where this call says
    nothing.

    Args:
      params: of both, as `get_initial_variables` lays them out.
      batch: encoder_input_tokens [B, P], and decoder_input_tokens [B, T], of which only the
        length counts: no output is longer.
      rng: of the batch; `decoder_params` may hold it as 'decode_rng'.
      decoder_params: gamma, lenience, eos_id and SETTINGS that this call sets otherwise.
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
    call |= _bound(models.EncoderDecoderModel.predict_batch_with_aux)
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
    if how["topk"] and how["topp"]:
      raise InputError(
        f"topk is {how['topk']} and topp is {how['topp']}; as in t5x's temperature_sample one of "
        "them must be 0."
      )
    sampling = Sampling(how["temperature"], how["topk"], how["topp"] or 1.0)
    width = batch["decoder_input_tokens"].shape[1]
    steps = width if how["max_decode_steps"] is None else how["max_decode_steps"]
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

    source = jnp.repeat(batch["encoder_input_tokens"], num_decodes, axis=0)
    decoded = speculative_decode(
      self._target_model,
      ModelDraft(self._draft_model, sampling, chain(how["gamma"])),
      target_params,
      draft_params,
      source,
      jax.random.split(rng, len(source)),
      max_new_tokens=steps,
      rule=TokenRule(sampling, how["lenience"]),
      eos_id=how["eos_id"],
    )
    if sampling.temperature == 0 and how["rescale_log_probs"]:
      scores = jnp.zeros(len(source))  # argmax leaves no other choice
    else:
      scored = sampling if how["rescale_log_probs"] else Sampling()
      scores = self._scores(target_params, source, decoded, scored)
    # t5x sorts by score, the best last.
    by_score = jnp.argsort(scores.reshape(-1, num_decodes), axis=1)
    rows = by_score + num_decodes * jnp.arange(len(by_score))[:, None]
    rows = rows if call["return_all_decodes"] else rows[:, -1]
    tokens = jnp.pad(decoded.tokens, ((0, 0), (0, width - steps)))
    aux = {"scores": scores, "rounds": count_rounds(decoded)}
    return tokens[rows], jax.tree.map(lambda x: x[rows], aux)

  def _scores(self, params, source: Array, decoded: Decoded, sampling: Sampling) -> Array:
    """Log-probability [B] of each output; one more pass of the target, if anyone reads it."""
    tokens, limit = decoded.tokens, decoded.tokens.shape[1]
    inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=PAD_ID)
    _, cache = self._target_model.prefill(params, source, limit)
    logits, _, _ = self._target_model.extend(params, cache, inputs)
    p = distribution(logits, sampling)
    of_tokens = jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
    is_text = jnp.arange(limit) < decoded.lengths[:, None]
    return jnp.where(is_text, jnp.log(of_tokens), 0.0).sum(axis=1)


def sampling_settings(decode_fn: Callable) -> dict[str, Any]:
  """Value of each of SETTINGS when t5x calls `decode_fn`, `temperature_sample` as gin or
  `functools.partial` binds it.

  Raises:
    InputError: it is another function, or bound to something else.
  """
  given = {}
  if isinstance(decode_fn, functools.partial):
    given, decode_fn = decode_fn.keywords, decode_fn.func
  # Gin wraps a function once, or twice if the reference has a scope, which we cannot see.
  if getattr(decode_fn, "__wrapped__", decode_fn) is not decoding.temperature_sample:
    raise InputError(
      f"decode_fn is {getattr(decode_fn, '__name__', decode_fn)}; SpeculativeModel samples, so "
      "bind models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample, without a scope, "
      "or decode with t5x's EncoderDecoderModel."
    )
  given = _bound(decoding.temperature_sample) | given
  if unknown := sorted(given.keys() - set(SETTINGS)):
    raise InputError(
      f"decoding.temperature_sample is bound to {', '.join(unknown)}; SpeculativeModel takes "
      f"{', '.join(SETTINGS)} from there, and num_decodes and return_all_decodes from "
      "models.EncoderDecoderModel.predict_batch_with_aux."
    )
  parameters = inspect.signature(decoding.temperature_sample).parameters
  return {name: parameters[name].default for name in SETTINGS} | given


def _bound(configurable: Callable, *names: str) -> dict[str, Any]:
  """What gin binds to a class or function of t5x, which subclasses and overrides do not see.

  Args:
    configurable: the class or function.
    names: of the parameters to look up; none for all.
  """
  try:
    bindings = gin.get_bindings(configurable, resolve_references=False)
  except ValueError:  # gin does not know it
    return {}
  return copy.deepcopy({name: bindings[name] for name in names or bindings if name in bindings})


def count_rounds(decoded: Decoded) -> dict[str, Array]:
  """Counts [B] of each row's rounds.

  num_tokens: emitted. num_rounds: passes of the target that emitted them. num_accepted and
  num_rejected: guesses judged, without those behind EOS or the limit; acceptance_rate is accepted
  / (accepted + rejected). not_finite: as in `Decoded`; -1 is well.
  """
  accepted, rejected = decoded.rounds.judged()
  return {
    "num_tokens": decoded.lengths,
    "num_rounds": (decoded.rounds.num_emitted > 0).sum(axis=0),
    "num_accepted": accepted,
    "num_rejected": rejected,
    "not_finite": decoded.not_finite,
  }


def same_config(module: nn.Module) -> T5Config:
  """The config with which our T5 takes the parameters of a t5x network as they are.

  Raises:
    InputError: the network is not one of t5x.examples.t5, or of a shape that we do not have.
  """
  if not isinstance(module, network.Transformer):
    raise InputError(
      f"The network is a {type(module).__module__}.{type(module).__name__}; speculative decoding "
      "knows t5x.examples.t5.network.Transformer."
    )
  config = module.config
  activation, *linear = config.mlp_activations
  if linear not in ([], ["linear"]) or config.float32_attention_logits:
    raise InputError(
      f"The network has mlp_activations {config.mlp_activations} and float32_attention_logits "
      f"{config.float32_attention_logits}; T5's are ('relu',) or ('gelu', 'linear'), and False."
    )
  return T5Config(
    vocab_size=config.vocab_size,
    emb_dim=config.emb_dim,
    num_heads=config.num_heads,
    head_dim=config.head_dim,
    mlp_dim=config.mlp_dim,
    num_encoder_layers=config.num_encoder_layers,
    num_decoder_layers=config.num_decoder_layers,
    gated=bool(linear),
    activation=activation,
    tied_logits=config.logits_via_embedding,
    dtype=jnp.dtype(config.dtype),
  )


def t5x_network(config: T5Config) -> network.Transformer:
  """The t5x network with the parameters of a config that is not fused: inverse of `same_config`."""
  return network.Transformer(
    network.T5Config(
      vocab_size=config.table_size,
      dtype=config.dtype,
      emb_dim=config.emb_dim,
      num_heads=config.num_heads,
      num_encoder_layers=config.num_encoder_layers,
      num_decoder_layers=config.num_decoder_layers,
      head_dim=config.head_dim,
      mlp_dim=config.mlp_dim,
      mlp_activations=(config.activation, "linear") if config.gated else (config.activation,),
      dropout_rate=config.dropout_rate,
      logits_via_embedding=config.tied_logits,
    )
  )


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens", "sampling", "eos_id"))
def t5x_decode(
  config: T5Config,
  params,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  eos_id: int = 1,
) -> Decoded:
  """Decode with t5x's own T5 and `temperature_sample`: the baseline that records call 't5x'.

  Arguments and result as in `autoregressive_decode`, but for the config of params that are not
  fused in place of a model; the first of the keys serves all rows. t5x draws from the padding of a
  vocabulary too.
  """
  model = models.EncoderDecoderModel(
    t5x_network(config), None, None, None, decode_fn=decoding.temperature_sample
  )
  batch = {
    "encoder_input_tokens": prompt,
    "decoder_input_tokens": jnp.zeros((len(prompt), max_new_tokens), jnp.int32),
  }
  decoder_params = {
    "eos_id": eos_id,
    "temperature": sampling.temperature,
    "topk": sampling.top_k,
    "topp": sampling.top_p if sampling.top_p < 1 else 0.0,
  }
  tokens, _ = model.predict_batch_with_aux(params, batch, rng[0], decoder_params)
  ends = tokens == eos_id
  lengths = jnp.where(ends.any(axis=1), ends.argmax(axis=1) + 1, max_new_tokens)
  one_each = jnp.arange(max_new_tokens)[:, None] < lengths
  rounds = Rounds(
    guesses=jnp.zeros((*tokens.T.shape, 0), jnp.int32),
    num_accepted=jnp.zeros(tokens.T.shape, jnp.int32),
    next_token=tokens.T,
    num_emitted=one_each.astype(jnp.int32),
  )
  return Decoded(tokens, lengths, rounds, lengths.max(), jnp.full(len(prompt), -1, jnp.int32))


def t5x_baseline(pair: Pair, checkpoint: str = str(EMBEDDED / "target")) -> Baseline:
  """t5x's decoding of a pair's target, to time beside ours: `speedup.speedup.baseline`.

  Args:
    pair: what is measured, on one device. Where acceptance is simulated no text ends before its
      limit, and here neither.
    checkpoint: its target's, read again, since t5x wants its parameters apart.

  Raises:
    InputError: the checkpoint is of another name than the pair's target, or there are more devices.
  """
  devices = {x.sharding for x in jax.tree.leaves(pair.target_params)}
  if any(len(d.device_set) > 1 for d in devices):
    raise InputError("t5x's decoding is timed on one device, and the target is shared by several.")
  if checkpoint_name(checkpoint) != pair.target_name:
    raise InputError(
      f"t5x_model.t5x_baseline.checkpoint is {checkpoint}, but the target is {pair.target_name}; "
      "bind it to the target's checkpoint."
    )
  stored = open_checkpoint(checkpoint)
  if not isinstance(stored.config, T5Config):
    raise InputError(f"{checkpoint} is no T5, which is what t5x is timed with here.")
  config = dataclasses.replace(stored.config, dtype=named_dtype(pair.dtype))
  eos_id = 1 if pair.simulated_alpha is None else -1
  decode = functools.partial(t5x_decode, config, stored.load(config), eos_id=eos_id)
  return Baseline("t5x", decode)


class PairCheckpointer:
  """Reads the target from where t5x says and the draft from `draft_path`.

  t5x makes it through `RestoreCheckpointConfig`: as `checkpoint_manager_cls`, or, with
  `use_orbax = False`, as `checkpointer_cls`. Either way both formats that T5X writes are read.
  """

  def __init__(self, *, train_state, partitioner, draft_path: str, restore_dtype=None, **_):
    """What t5x gives (all else concerns saving), and the folder of the draft's checkpoint."""
    self._train_state = train_state
    self._partitioner = partitioner
    self._draft_path = draft_path
    self._restore_dtype = restore_dtype

  def restore(self, path: str, **kwargs):
    """The train state with parameters of both; arguments are t5x's and concern the target.

    Raises:
      InputError: a checkpoint is not there, or not of its network's shape, which Orbax would cut
        and pad without a word. Not so with transformations, which may say what else it holds.
    """
    params, draft_params = core.pop(self._train_state.params, DRAFT)
    axes, draft_axes = core.pop(self._train_state.params_axes, DRAFT)
    if not kwargs.get("state_transformation_fns"):
      require_shapes("target", path, params)
    require_shapes(DRAFT, self._draft_path, draft_params)
    target = self._restore(path, params, axes, **kwargs)
    draft = self._restore(self._draft_path, draft_params, draft_axes)
    both = core.freeze({**target.params, DRAFT: draft.params})
    return target.replace(params=both, params_axes=self._train_state.params_axes)

  def _restore(self, path: str, params, params_axes, **kwargs):
    state = self._train_state.replace(params=params, params_axes=params_axes)
    # Knows both formats, whatever its name says.
    manager = checkpoints.OrbaxCheckpointManagerInterface(
      path, state, self._partitioner, restore_dtype=self._restore_dtype
    )
    return manager.restore(path=path, **kwargs)


def require_shapes(role: str, path: str, params) -> None:
  """Raise InputError unless a checkpoint holds just such parameters as those of a network."""
  try:
    open_checkpoint(path).require(core.unfreeze(params))
  except InputError as error:
    raise InputError(f"The {role} is not the one that its network is for: {error}") from error
