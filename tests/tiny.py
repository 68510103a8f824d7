"""Tiny models with random weights, drafts that follow a script, and tests of distributions.

Distribution tests compare counts with exact probabilities by Pearson's chi-square at LEVEL, the
chance of a false alarm. Their power is stated as the smallest effect
w = sqrt(sum_x (p'(x) - p(x))^2 / p(x)) that is found 99 times in 100; the total variation
between p' and p is then at most w / 2.
"""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

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
  LoadedTarget,
  Model,
  Params,
  Proposal,
  WrappedDraft,
)
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.kernels import skinny
from specdec_jax.measurement import speed, timing
from specdec_jax.models.config import GPTConfig, T5Config
from specdec_jax.models.families import Config, init_params, module_of

LEVEL = 1e-6  # a correct program fails a distribution test this often
CAUGHT = 1e-12  # a broken one must be further out than this
SHARED = pathlib.Path(os.environ.get("SPECDEC_SHARED", "../shared"))


def config(vocab_size: int = 16, layers: int = 2, **overrides) -> T5Config:
  """`layers` in encoder and decoder."""
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
  """A decoder with all that T5's lacks: biases and learned positions."""
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


def params(cfg: Config, seed: int, peak: float = 3.0):
  """Random parameters whose outputs vary: logits `peak` times as large as freshly drawn ones,
  and attention and position strong enough for the text so far to matter."""
  rng = np.random.default_rng(seed)

  def louder(path, value):
    path = "/".join(key.key for key in path)
    if path.endswith("bias"):
      return value + jnp.asarray(rng.normal(0, 0.5, value.shape), value.dtype)
    if path.endswith(("token_embedder/embedding", "positions")):
      return value / cfg.embedding_std
    if "logits_dense" in path:
      return value * peak
    if "rel_embedding" in path:
      return value * 6
    if "attention/out" in path or "attention/query" in path:
      return value * 2
    return value

  drawn = init_params(cfg, jax.random.key(seed))
  return jax.tree_util.tree_map_with_path(louder, drawn)


def packed(params, pairs=False):
  """The parameters as a model with `kernels='skinny'` wants them; in `pairs` if in bfloat16."""
  pack = lambda path, x: skinny.pack(np.asarray(x), pairs) if path[-1].key == "kernel" else x
  return jax.tree_util.tree_map_with_path(pack, params)


def near(tree, seed: int, noise: float):
  """Parameters `noise` (relative to each array's own size) away from `tree`: a good draft."""
  leaves, structure = jax.tree.flatten(tree)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  keys = jax.tree.unflatten(structure, keys)
  return jax.tree.map(lambda x, k: x + noise * x.std() * jax.random.normal(k, x.shape), tree, keys)


def sources(cfg: Config, seed: int, batch: int, length: int = 7) -> np.ndarray:
  """Source tokens [batch, length] of different lengths, padded with 0."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(2, cfg.vocab_size, (batch, length))
  lengths = rng.integers(2, length + 1, batch)
  return np.where(np.arange(length) < lengths[:, None], tokens, 0).astype(np.int32)


def prompts(cfg: GPTConfig, seed: int, lengths, padding: int = 0, width: int = 8) -> np.ndarray:
  """Prompts [B, width] of so many tokens each: tokens, EOS, padding. Like the padding, these may be
  anything but EOS."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, cfg.vocab_size, (len(lengths), width))
  tokens = np.where(tokens == cfg.eos_id, 2, tokens)
  at = np.arange(width) - np.asarray(lengths)[:, None]
  return np.where(at < 0, tokens, np.where(at == 0, cfg.eos_id, padding)).astype(np.int32)


@functools.cache
def teacher_forced(cfg: Config):
  """(params, source [B, S], inputs [B, K]) -> logits [B, K, V]: one pass, no cache, no loop."""
  module = module_of(cfg)
  return jax.jit(lambda params, source, inputs: module.apply({"params": params}, source, inputs))


@dataclasses.dataclass(frozen=True)
class ScriptedDraft(Draft):
  """Guesses what its parameters, tokens [B, T] by position in the text, say."""

  tree: Tree

  def propose(self, params, state, context, rng):
    at = context.length[:, None] - 1 + jnp.asarray(self.tree.depths[1:])
    return Proposal(jnp.take_along_axis(params, at, axis=1, mode="clip")), state


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedDraft(WrappedDraft):
  """A draft whose proposals `change`, (params, proposal) -> proposal, changes.

  Each is another, for which nothing is compiled yet.
  """

  change: Callable

  __eq__, __hash__ = object.__eq__, object.__hash__

  def propose(self, params, state, context, rng):
    proposal, state = self.draft.propose(params, state, context, rng)
    return self.change(params, proposal), state


@dataclasses.dataclass(frozen=True, eq=False)
class ChangedModel:
  """A model that reads by `change`, (model, params, cache, tokens, tree, first) -> as `extend`.

  Each is another, for which nothing is compiled yet.
  """

  model: Model
  change: Callable

  def __getattr__(self, name):
    return getattr(self.model, name)

  def extend(self, params, cache, tokens, tree=None, first=0):
    return self.change(self.model, params, cache, tokens, tree, first)


def adjusted(logits, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
  """What `sampling.distribution` must give, one row at a time in float64, argmax by loops."""
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
  """Bin of each outcome: those expected fewer than 20 times share one, so chi-square holds."""
  rare = probs * n < 20
  if (probs[rare].sum()) * n < 20:  # too small even together: join the rarest of the others
    rare |= probs == np.where(rare, np.inf, probs).min()
  bins = np.cumsum(~rare) - 1
  return np.where(rare, bins[-1] + 1, bins)


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
  """Chance of counts at least this far from probs; 0 if something impossible was counted."""
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
  """The smallest effect w that a test of n draws at LEVEL finds 99 times in 100."""
  probs = np.ravel(probs)[np.ravel(probs) > 0]
  df = _merged(probs, n).max()
  critical = stats.chi2.isf(LEVEL, df)

  def missed(strength):  # n w^2
    return stats.ncx2.cdf(critical, df, strength) - 0.01

  return float(np.sqrt(optimize.brentq(missed, 1e-3, 1e5) / n))


def loaded(vocabulary, model=None, params=None) -> LoadedTarget:
  """Return a target as the functions that load drafts take it."""
  return LoadedTarget(model, params, vocabulary)


def speculative_decode(
  target, draft, target_params, draft_params, prompt, rng, *, max_new_tokens, verifier, eos_id=None
) -> DecodeResult:
  """Decode with the parts of a `Decoder` given one by one."""
  decoder = Decoder(target, draft, verifier, eos_id)
  params = Params(target_params, draft_params)
  return decoder.run(params, prompt, rng, max_new_tokens=max_new_tokens)


def autoregressive_decode(
  target, params, prompt, rng, *, max_new_tokens, sampling, eos_id=None
) -> DecodeResult:
  """Decode without a draft."""
  decoder = Decoder(target, NullDraft(), TokenVerifier(sampling), eos_id)
  return decoder.run(Params(params), prompt, rng, max_new_tokens=max_new_tokens)


# One program: one by one its operations take longer to compile.
@functools.partial(jax.jit, static_argnames=("target", "draft", "limit"))
def start(target, draft, target_params, draft_params, prompt, limit) -> DecodeState:
  """Return the state before the first round."""
  decoder = Decoder(target, draft, TokenVerifier(Sampling()))
  return decoder.init(Params(target_params, draft_params), prompt, jax.random.key(0), limit)


class Known(NamedTuple):
  """A call that takes so many seconds, as `know_costs` has it."""

  seconds: float


def know_costs(monkeypatch) -> None:
  """Have `measure_speed` take the parts of a round for known, of one gamma."""
  # With no links and with CHAIN, as `round_costs` has them.
  calls = [Known(1e-3 * milliseconds) for milliseconds in (1, 5, 1, 7, 1, 9, 1, 3)]
  timed = lambda call: (call.seconds, None) if isinstance(call, Known) else timing.timed(call)
  monkeypatch.setattr(speed, "round_calls", lambda *args: calls)
  monkeypatch.setattr(speed, "timed", timed)
