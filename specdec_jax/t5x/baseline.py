"""Decoding of a target by t5x itself, as a speed baseline."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from t5x import decoding, models

from specdec_jax.checkpoints.checkpoint import path_of_record
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.errors import InputError
from specdec_jax.measure.speed import Baseline
from specdec_jax.models.config import T5Config
from specdec_jax.models.families import init_params
from specdec_jax.models.layout import Layout, named_dtype
from specdec_jax.models.simulated import SimulatedModel
from specdec_jax.pair import Pair
from specdec_jax.t5x.networks import t5x_network


@functools.partial(
  jax.jit, static_argnames=("config", "max_new_tokens", "sampling", "eos_id", "beams")
)
def t5x_decode(
  config: T5Config,
  params,
  prompt: Array,
  rng: Array,
  *,
  max_new_tokens: int,
  sampling: Sampling,
  eos_id: int = 1,
  beams: int | None = None,
) -> DecodeResult:
  """Decode with t5x's T5 and `temperature_sample` or, with `beams`, `beam_search`.

  Unlike this package, t5x can also emit tokens from the padding of a vocabulary. It does not report
  its forward passes, so one round per token is recorded.

  Args:
    config: configuration of the target, without `fused`.
    rng: one key per row; only the first key is used.
    max_new_tokens: maximum number of tokens of each row, including EOS.
    sampling: only temperature, top_k and top_p apply.
    eos_id: token that ends a text; -1 if none does.
  """
  decode_fn = decoding.beam_search if beams else decoding.temperature_sample
  model = models.EncoderDecoderModel(t5x_network(config), None, None, None, decode_fn=decode_fn)
  batch = {
    "encoder_input_tokens": prompt,
    "decoder_input_tokens": jnp.zeros((len(prompt), max_new_tokens), jnp.int32),
  }
  sampling_params = {
    "temperature": sampling.temperature,
    "topk": sampling.top_k,
    "topp": sampling.top_p if sampling.top_p < 1 else 0.0,
  }
  decoder_params = {"eos_id": eos_id} | ({} if beams else sampling_params)
  tokens, _ = model.predict_batch_with_aux(
    params, batch, rng=rng[0], decoder_params=decoder_params, num_decodes=beams or 1
  )
  ends = tokens == eos_id
  lengths = jnp.where(ends.any(axis=1), ends.argmax(axis=1) + 1, max_new_tokens)
  num_emitted = jnp.arange(max_new_tokens)[:, None] < lengths
  rounds = Rounds(
    draft_tokens=jnp.zeros((*tokens.T.shape, 0), jnp.int32),
    num_accepted=jnp.zeros(tokens.T.shape, jnp.int32),
    next_token=tokens.T,
    num_emitted=num_emitted.astype(jnp.int32),
  )
  return DecodeResult(tokens, lengths, rounds, lengths.max(), jnp.full(len(prompt), -1, jnp.int32))


def t5x_baseline(pair: Pair) -> Baseline:
  """Return the baseline that decodes a pair's target with t5x, for `speedup.speedup.baseline`.

  The target, which must be a T5 on one device, is loaded again, because t5x needs parameters that
  are not fused. A target with random weights gets other random weights. If its acceptance is
  simulated, no text of the pair or of the baseline ends before its limit.
  """
  devices = {x.sharding for x in jax.tree.leaves(pair.target.params)}
  if any(len(d.device_set) > 1 for d in devices):
    raise InputError(
      "t5x's decoding is timed on one device, and the target is sharded across several."
    )
  is_simulated = isinstance(pair.target.model, SimulatedModel)
  model: Any = pair.target.model
  if not is_simulated and pair.target.path is None:
    raise InputError("The target is a model in memory; t5x needs a checkpoint to load it from.")
  stored = None if is_simulated else open_checkpoint(path_of_record(pair.target.path or ""))
  config = model.model.config if stored is None else stored.config
  if not isinstance(config, T5Config):
    raise InputError(f"{pair.target.name} is no T5, which is what t5x is timed with here.")
  config = dataclasses.replace(config, layout=Layout(dtype=named_dtype(pair.dtype)))
  params = _random_params(config) if stored is None else stored.load(config)
  decode = functools.partial(t5x_decode, config, params, eos_id=-1 if is_simulated else 1)
  return Baseline("t5x", decode)


@functools.partial(jax.jit, static_argnames="config")
def _random_params(config: T5Config) -> Any:
  params = init_params(config, jax.random.key(0))
  return jax.tree.map(lambda x: x.astype(config.layout.dtype), params)
