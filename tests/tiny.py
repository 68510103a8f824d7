"""Tiny models with random weights, scripted drafts, and tests of distributions.

Distribution tests compare counts with exact probabilities by Pearson's chi-square test at
significance level LEVEL. Their power is stated as the smallest effect
w = sqrt(sum_x (p'(x) - p(x))^2 / p(x)) that is detected with probability 0.99. The total variation
between p' and p is then at most w / 2.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize, stats

from specdec_jax.core.decode import Decoder, DecodeState, NullDraft
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import (
  DecodeResult,
  Draft,
  Loaded,
  Params,
  Proposal,
  WrappedDraft,
  WrappedModel,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.measure import speed
from specdec_jax.measure.costs import Looped, Parts, Starts, interleaved_seconds, timed
from specdec_jax.models.config import GPTConfig, T5Config
from specdec_jax.models.families import Config, init_params, module_of
from specdec_jax.models.kernels import gpu, skinny
from specdec_jax.models.quantization import quantize

LEVEL = 1e-6  # the probability that a correct program fails a distribution test
CAUGHT = 1e-12  # the p-value of a broken program must be below this
SHARED = pathlib.Path(os.environ.get("SPECDEC_SHARED", "../shared"))


# Options of `T5Config` for other families of encoder-decoders.
BART = dict(
  gated=False,
  activation="gelu_exact",
  norm_position="after",
  has_final_norm=False,
  embedding_norm=True,
  logits_bias=True,
  biases=True,
  num_positions=64,
)
WHISPER = dict(
  gated=False,
  activation="gelu_exact",
  biases=True,
  num_positions=64,
  num_mels=6,
  source_positions=8,
)
T5GEMMA = dict(
  num_heads=4,
  num_kv_heads=2,
  norm_position="both",
  logits_cap=6.0,
  attention_cap=3.0,
  rope_theta=100.0,
  window=3,
  encoder_sizes=(24, 2, 1, 8, 32),
  encoder_embeddings=True,
)


def config(vocab_size: int = 16, layers: int = 2, **overrides) -> T5Config:
  """Return a T5 configuration with `layers` layers in the encoder and in the decoder."""
  fields = dict(
    vocab_size=vocab_size,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_encoder_layers=layers,
    num_decoder_layers=layers,
  )
  return T5Config(**{**fields, **overrides})


def gpt_config(vocab_size: int = 16, layers: int = 2, **overrides) -> GPTConfig:
  """Return a GPT configuration with biases and learned positions, which T5 does not have."""
  fields = dict(
    vocab_size=vocab_size,
    emb_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=32,
    num_decoder_layers=layers,
    gated=False,
    biases=True,
    num_positions=64,
  )
  return GPTConfig(**{**fields, **overrides})


def quantized(params: dict, weights: str = "int8") -> dict:
  """Return parameters with int8 or int4 matrices; see `quantization.quantize`."""
  result = {
    name: quantized(value, weights) if isinstance(value, dict) else value
    for name, value in params.items()
  }
  if "kernel" in params:
    result["kernel"], result["kernel_scale"] = map(
      jnp.asarray, quantize(np.asarray(params["kernel"]), weights)
    )
  return result


def with_output_tokens(params: dict, tokens: np.ndarray) -> dict:
  """Return parameters of a model that has logits of the given tokens only."""
  kernel = params["decoder"]["logits_dense"]["kernel"][:, tokens]
  logits = dict(kernel=kernel, output_tokens=jnp.asarray(tokens))
  return {**params, "decoder": {**params["decoder"], "logits_dense": logits}}


def params(cfg: Config, seed: int, peak: float = 3.0):
  """Return random parameters whose outputs depend on the text; nothing is compiled.

  Logits are `peak` times as large as at initialization. Attention and position biases are also
  scaled up, so that the logits depend on earlier tokens.
  """
  rng = np.random.default_rng(seed)

  def sample(path, leaf):
    path = "/".join(key.key for key in path)
    if path.endswith("scale"):
      return jnp.ones(leaf.shape, leaf.dtype)
    std = 1 / np.sqrt(leaf.shape[0])
    if path.endswith("bias"):
      std = 0.1 if cfg.has_encoder else 0.5
    elif path.endswith(("embedder/embedding", "positions")):
      std = 1.0
    elif "rel_embedding" in path:
      std = 1.5
    elif "logits_dense" in path:
      std *= peak
    elif "attention/out" in path:
      std *= 2
    elif "attention/query" in path:
      std *= 2 / np.sqrt(cfg.head_dim)
    return jnp.asarray(rng.normal(0, std, leaf.shape), leaf.dtype)

  shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
  return jax.tree_util.tree_map_with_path(sample, shapes)


def packed(params, pairs=False):
  """Return the parameters packed for a model with `kernels='skinny'`; bfloat16 needs `pairs`."""

  def pack(path, x):
    return jnp.asarray(skinny.pack(np.asarray(x), pairs) if path[-1].key == "kernel" else x)

  return jax.tree_util.tree_map_with_path(pack, params)


def transposed(params):
  """Return the parameters of a model with `kernels='gpu'`."""

  def transpose(path, x):
    if path[-1].key == "kernel" and not gpu.is_transposed(x.shape, x.dtype.name):
      return x
    return x.T if path[-1].key in ("kernel", "kernel_scale") else x

  return jax.tree_util.tree_map_with_path(transpose, params)


def near(tree, seed: int, noise: float):
  """Return a good draft: `tree` plus noise of `noise` standard deviations of each array."""
  rng = np.random.default_rng(seed)

  def add_noise(x):
    x = np.asarray(x)
    return jnp.asarray(x + noise * x.std() * rng.normal(size=x.shape).astype(x.dtype))

  return jax.tree.map(add_noise, tree)


def sources(cfg: Config, seed: int, batch: int, length: int = 7) -> np.ndarray:
  """Return source tokens [batch, length] of different lengths, padded with 0."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, cfg.vocab_size, (batch, length))
  lengths = rng.integers(2, length + 1, batch)
  return np.where(np.arange(length) < lengths[:, None], tokens, 0).astype(np.int32)


def prompts(cfg: GPTConfig, seed: int, lengths, padding: int = 0, width: int = 8) -> np.ndarray:
  """Return prompts [B, width]: `lengths[i]` tokens, EOS, then padding.

  Tokens and padding may be any token except EOS.
  """
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, cfg.vocab_size, (len(lengths), width))
  tokens = np.where(tokens == cfg.eos_id, 2, tokens)
  offset = np.arange(width) - np.asarray(lengths)[:, None]  # of each position from EOS
  return np.where(offset < 0, tokens, np.where(offset == 0, cfg.eos_id, padding)).astype(np.int32)


@functools.cache
def teacher_forced(cfg: Config):
  """Return a function (params, source [B, S], inputs [B, K]) -> logits [B, K, V].

  It runs one forward pass without a cache.
  """
  module = module_of(cfg)
  return jax.jit(lambda params, source, inputs: module.apply({"params": params}, source, inputs))


@dataclasses.dataclass(frozen=True)
class ScriptedDraft(Draft):
  """A draft that proposes its parameters: tokens [B, T], indexed by position in the text."""

  tree: Tree

  def propose(self, params, state, context, rng):
    positions = context.length[:, None] - 1 + jnp.asarray(self.tree.depths[1:])
    return Proposal(jnp.take_along_axis(params, positions, axis=1, mode="clip")), state


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedDraft(WrappedDraft):
  """A draft whose proposals are changed by `change`, a function (params, proposal) -> proposal.

  Instances compare by identity, so each one compiles its own programs.
  """

  change: Callable

  __eq__, __hash__ = object.__eq__, object.__hash__

  def propose(self, params, state, context, rng):
    proposal, state = self.draft.propose(params, state, context, rng)
    return self.change(params, proposal), state


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedModel(WrappedModel):
  """A model whose `extend` is `change`, a function (model, params, cache, tokens, tree, first).

  Instances compare by identity, so each one compiles its own programs.
  """

  change: Callable

  def __getattr__(self, name):  # methods and attributes beyond the contract
    return getattr(self.model, name)

  def extend(self, params, cache, tokens, tree=None, first=0):
    return self.change(self.model, params, cache, tokens, tree, first)


def adjusted(logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
  """Return what `sampling.distribution` must return, computed row by row in float64."""
  logits = np.asarray(logits, np.float64)
  rows = logits.reshape(-1, logits.shape[-1])
  rows = [_adjusted_row(row, temperature, top_k, top_p) for row in rows]
  return np.stack(rows).reshape(logits.shape)


def _adjusted_row(logits, temperature, top_k, top_p):
  order = sorted(range(len(logits)), key=lambda x: -logits[x])  # most probable first
  if temperature == 0:
    return np.eye(len(logits))[order[0]]
  weights = np.exp((logits - logits.max()) / temperature)
  if top_k:
    weights[order[top_k:]] = 0
  weights /= weights.sum()
  mass = 0.0
  for x in order:
    if top_p < 1 and mass >= top_p:
      weights[x] = 0
    mass += weights[x]
  return weights / weights.sum()


def _merged(probs: np.ndarray, n: int) -> np.ndarray:
  """Return the bin of each outcome.

  Outcomes expected fewer than 20 times share one bin, so that the chi-square approximation holds.
  """
  rare = probs * n < 20
  if (probs[rare].sum()) * n < 20:  # the shared bin is too small: add the rarest other outcome
    rare |= probs == np.where(rare, np.inf, probs).min()
  bins = np.cumsum(~rare) - 1
  return np.where(rare, bins[-1] + 1, bins)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
  """Return the p-value of counts given probs; 0 if an outcome of probability 0 was counted."""
  counts, probs = np.ravel(counts), np.ravel(probs).astype(np.float64)
  assert abs(probs.sum() - 1) < 1e-5, "the expected probabilities do not sum to one"
  if counts[probs == 0].any():
    return 0.0
  counts, probs = counts[probs > 0], probs[probs > 0] / probs.sum()
  if len(probs) == 1:
    return 1.0
  n = counts.sum()
  bins = _merged(probs, n)
  observed, expected = np.bincount(bins, counts), np.bincount(bins, probs) * n
  statistic = ((observed - expected) ** 2 / expected).sum()
  return float(stats.chi2.sf(statistic, len(expected) - 1))


def detectable(n: int, probs: np.ndarray) -> float:
  """Return the smallest effect w that a test of n samples at LEVEL detects 99 times in 100."""
  probs = np.ravel(probs)[np.ravel(probs) > 0]
  df = _merged(probs, n).max()
  critical = stats.chi2.isf(LEVEL, df)

  def missed(strength):  # n w^2
    return stats.ncx2.cdf(critical, df, strength) - 0.01

  return float(np.sqrt(optimize.brentq(missed, 1e-3, 1e5) / n))


def loaded(vocabulary, model=None, params=None) -> Loaded:
  """Return the target in the form that the functions that load drafts take."""
  return Loaded("target", model, params, vocabulary)


def speculative_decode(
  target, draft, target_params, draft_params, prompt, rng, *, max_new_tokens, verifier, eos_id=None
) -> DecodeResult:
  """Decode with a `Decoder` of the given parts."""
  decoder = Decoder(target, draft, verifier, eos_id)
  params = Params(target_params, draft_params)
  return decoder.run(params, prompt, rng, max_new_tokens=max_new_tokens)


def autoregressive_decode(
  target, params, prompt, rng, *, max_new_tokens, sampling, eos_id=None
) -> DecodeResult:
  """Decode without a draft."""
  decoder = Decoder(target, NullDraft(), TokenVerifier(sampling), eos_id)
  return decoder.run(Params(params), prompt, rng, max_new_tokens=max_new_tokens)


# Jitted as one program, which compiles faster than its operations one by one.
@functools.partial(jax.jit, static_argnames=("target", "draft", "limit"))
def start(target, draft, target_params, draft_params, prompt, limit) -> DecodeState:
  """Return the state before the first round."""
  decoder = Decoder(target, draft, TokenVerifier(Sampling()))
  return decoder.init(Params(target_params, draft_params), prompt, jax.random.key(0), limit)


@dataclasses.dataclass(frozen=True)
class FixedCost:
  """Call to which `know_costs` assigns a duration."""

  seconds: float


def know_costs(monkeypatch) -> None:
  """Make `measure_speed` use fixed costs of the start and the parts of a round, for one gamma.

  They are less than the time of any round, which is measured.
  """

  def looped(microseconds):
    return Looped(FixedCost(1e-6), FixedCost(1e-6 * microseconds))

  def run(call):
    return (call.seconds, None) if isinstance(call, FixedCost) else timed(call)

  parts = Parts(looped(5), [looped(7)], [looped(9)], [looped(3)])
  monkeypatch.setattr(speed, "round_calls", lambda *args: parts)
  starts = Starts(FixedCost(2e-6), FixedCost(3e-6))
  monkeypatch.setattr(speed, "start_calls", lambda *args: starts)
  monkeypatch.setattr(speed, "interleaved_seconds", functools.partial(interleaved_seconds, run=run))
