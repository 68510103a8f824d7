"""Decoding of a target by t5x itself, as a speed baseline."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from t5x import decoding, models

from specdec_jax.checkpoints.load import checkpoint_name, open_checkpoint
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DecodeResult, Rounds
from specdec_jax.errors import InputError
from specdec_jax.measurement.speed import Baseline
from specdec_jax.models.config import T5Config, named_dtype
from specdec_jax.pairs import EMBEDDED, LoadedPair
from specdec_jax.t5x_model.networks import t5x_network


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
  """Decode with t5x's T5 and `temperature_sample` or `beam_search`.

  Records name this baseline 't5x'. Unlike this package, t5x can also emit tokens from the padding
  of a vocabulary.

  Args:
    config: configuration of the target, without `fused`.
    params: parameters of the target.
    prompt: padded prompts.
    rng: one key per row; only the first key is used.
    max_new_tokens: maximum number of tokens of each row, including EOS.
    sampling: sampling method, of which only temperature, top_k and top_p apply; not used with
      beams.
    eos_id: token that ends a text; -1 if none does.
    beams: number of beams of t5x's `beam_search`, whose best text is returned; None for sampling.

  Returns:
    The texts. t5x does not report its forward passes, so one round per token is recorded.
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
    guesses=jnp.zeros((*tokens.T.shape, 0), jnp.int32),
    num_accepted=jnp.zeros(tokens.T.shape, jnp.int32),
    next_token=tokens.T,
    num_emitted=num_emitted.astype(jnp.int32),
  )
  return DecodeResult(tokens, lengths, rounds, lengths.max(), jnp.full(len(prompt), -1, jnp.int32))


def t5x_baseline(pair: LoadedPair, checkpoint: str = str(EMBEDDED / "target")) -> Baseline:
  """Return the baseline that decodes a pair's target with t5x, for `speedup.speedup.baseline`.

  Args:
    pair: pair whose speed is measured, on one device. If its acceptance is simulated, no text of
      the pair or of the baseline ends before its limit.
    checkpoint: checkpoint of the target. It is loaded again, because t5x needs parameters that are
      not fused.

  Raises:
    InputError: the checkpoint belongs to a different model than the pair's target, it is not a T5,
      or the target is sharded.
  """
  devices = {x.sharding for x in jax.tree.leaves(pair.target_params)}
  if any(len(d.device_set) > 1 for d in devices):
    raise InputError(
      "t5x's decoding is timed on one device, and the target is sharded across several."
    )
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
