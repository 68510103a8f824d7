"""Test decoder-only models: one block, several steps and one teacher-forced pass agree.

The reference for the arithmetic is the decoder in numpy below, in float64. The reference for
prompts is a list of the prompt's tokens followed by the text.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import special
from test_t5 import TREE_FAULTS, TREES, WRONG_PATHS, far_off, off_paths
from tiny import autoregressive_decode, speculative_decode

from specdec_jax.core import trees
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.drafts.model import ModelDraft
from specdec_jax.models.families import for_decoding
from specdec_jax.models.gpt import GPTModel
from specdec_jax.models.kernels import skinny
from specdec_jax.models.layout import Layout

pytestmark = pytest.mark.slow

V = 24
VARIANTS = {
  "gpt_like": tiny.gpt_config(V, emb_dim=32, head_dim=12),
  "gpt2": tiny.gpt_config(V, tied_logits=True, eos_id=V - 1, start_id=None),
  "lamda": tiny.gpt_config(V, gated=True, biases=False, num_positions=None),
  "bfloat16": tiny.gpt_config(V, layers=1, layout=Layout(dtype=jnp.bfloat16)),
}
# As in test_t5: float32 sums in another order, or bfloat16.
TOLERANCE = {jnp.float32: dict(rtol=1e-5, atol=2e-5), jnp.bfloat16: dict(rtol=0.05, atol=0.25)}
LENGTHS = [5, 0, 3, 7]  # lengths of the prompts in tokens
NEW = 12
SLOTS = 32
EVERY = pytest.mark.parametrize("variant", VARIANTS)


def begun(cfg, prompt):
  """Return the committed tokens of each prompt: the start token and the prompt without EOS."""
  rows = [row[: row.index(cfg.eos_id)] for row in prompt.tolist()]
  if cfg.start_id is None:
    return [row or [cfg.eos_id] for row in rows]
  return [[cfg.start_id, *row] for row in rows]


def take(rows, start, count):
  """Gather [B, count, ...]: `count` entries of rows [B, T, ...] from each row's own start [B]."""
  return np.stack([row[at : at + count] for row, at in zip(rows, start, strict=True)])


class Case:
  """A model, prompts of different lengths, texts that follow them, and teacher-forced logits of
  both."""

  def __init__(self, cfg):
    self.params, self.prompt = tiny.params(cfg, 0), jnp.asarray(tiny.prompts(cfg, 0, LENGTHS))
    self.model, self.tolerance = GPTModel(cfg), TOLERANCE[cfg.layout.dtype]
    rows, new = begun(cfg, self.prompt), np.random.default_rng(1).integers(0, V, (4, SLOTS))
    self.tokens = np.array([[*row, *more][:24] for row, more in zip(rows, new)], np.int32)
    self.begins = np.array([len(row) for row in rows])
    nothing = np.zeros((4, 1), np.int32)
    self.logits = np.asarray(tiny.teacher_forced(cfg)(self.params, nothing, self.tokens))
    prefill = jax.jit(self.model.prefill, static_argnums=2)
    extend = jax.jit(self.model.extend, static_argnums=(3, 4))
    self.prefill = lambda prompt: prefill(self.params, prompt, SLOTS)[1]
    self.extend = functools.partial(extend, self.params)
    self.commit = self.model.commit


@functools.cache
def case(variant):
  return Case(VARIANTS[variant])


# Prompts.


@EVERY
def test_text_begins_with_its_prompt_for_any_padding(variant):
  cfg, of = VARIANTS[variant], case(variant)
  for padding, width in (0, 8), (7, 8), (3, 13):
    prompt = np.pad(of.prompt, ((0, 0), (0, width - 8)))
    past = np.arange(width) > np.array(LENGTHS)[:, None]
    tokens, length = of.model.prompt_tokens(jnp.asarray(np.where(past, padding, prompt)))
    assert [row[:n].tolist() for row, n in zip(tokens, length)] == begun(cfg, of.prompt)


@EVERY
def test_padding_of_a_prompt_is_not_attended_to(variant):
  of = case(variant)
  at = of.begins - 1
  past = np.arange(8) > np.array(LENGTHS)[:, None]
  for padding in (3, 9):
    cache = of.prefill(np.where(past, padding, of.prompt))
    logits = of.extend(cache, take(of.tokens, at, 5))[0]
    np.testing.assert_allclose(logits, take(of.logits, at, 5), **of.tolerance)


def test_logits_depend_on_the_prompt():
  of = case("gpt_like")
  other = np.where(of.prompt > 1, 2 + of.prompt % (V - 2), of.prompt)
  logits = of.extend(of.prefill(other), take(of.tokens, of.begins - 1, 5))[0]
  moved = np.abs(np.asarray(logits) - take(of.logits, of.begins - 1, 5)).max(axis=(1, 2))
  assert (moved[[0, 2, 3]] > 0.5).all() and moved[1] < 1e-4  # the second is empty


# Blocks.


@EVERY
@pytest.mark.parametrize("cuts", [[1] * 3, [5, 1, 5]], ids=str)
def test_blocks_after_ragged_prompts_equal_the_teacher_forced_pass(variant, cuts):
  of = case(variant)
  cache, at = of.prefill(of.prompt), of.begins - 1
  for block in cuts:
    np.testing.assert_array_equal(cache.length, at)
    logits, _, cache = of.extend(cache, take(of.tokens, at, block))
    np.testing.assert_allclose(logits, take(of.logits, at, block), **of.tolerance)
    at = at + block
    cache = of.commit(cache, jnp.asarray(at))


@EVERY
def test_every_number_of_accepted_tokens_is_rolled_back(variant):
  """Verify [last token, draft tokens], commit n of them, and continue; n differs between rows."""
  of, gamma = case(variant), 4
  at = of.begins - 1
  filled = of.prefill(of.prompt)
  for first in range(gamma + 1):
    n = (first + np.arange(4)) % (gamma + 1)
    block = take(of.tokens, at, gamma + 1)
    wrong = np.arange(gamma + 1) > n[:, None]
    verified, _, cache = of.extend(filled, np.where(wrong, (block + 7) % V, block))
    np.testing.assert_array_equal(cache.length, at)
    for row in range(4):  # the block equals the text up to the first wrong draft token
      kept = slice(0, n[row] + 1)
      np.testing.assert_allclose(
        verified[row, kept], of.logits[row, at[row] :][kept], **of.tolerance
      )
    cache = of.commit(cache, jnp.asarray(at + n + 1))
    np.testing.assert_array_equal(cache.length, at + n + 1)
    again = of.extend(cache, take(of.tokens, at + n + 1, gamma + 1))[0]
    np.testing.assert_allclose(again, take(of.logits, at + n + 1, gamma + 1), **of.tolerance)


@pytest.mark.parametrize("variant", ["gpt_like", "gpt2", "lamda"])
def test_decoding_layout_does_not_change_logits(variant):
  cfg, of = VARIANTS[variant], case(variant)
  fused, params = for_decoding(cfg, of.params)
  layouts = [(fused, params)]
  layouts.append((fused.with_layout(kernels="gpu"), tiny.transposed(params)))
  if skinny.is_available():
    layouts.append((fused.with_layout(kernels="skinny"), tiny.packed(params)))
  block = jnp.asarray(take(of.tokens, of.begins - 1, 5))
  for config, weights in layouts:
    assert config.layout.fused and "logits_dense" in weights["decoder"]
    model = GPTModel(config)

    def read(params, model=model):
      return model.extend(params, model.prefill(params, of.prompt, SLOTS)[1], block)[0]

    want = take(of.logits, of.begins - 1, 5)
    np.testing.assert_allclose(jax.jit(read)(weights), want, rtol=1e-4, atol=1e-4)


# Trees.


@pytest.mark.parametrize("variant, tree", [("gpt_like", "full"), ("lamda", "uneven")])
def test_tree_has_the_logits_of_its_paths(variant, tree):
  of = case(variant)
  cache = of.extend(of.prefill(of.prompt), of.tokens[:, :14])[2]  # with other tokens after it
  assert max(off_paths(of, cache, TREES[tree]).values()) < 1e-5
  for path in WRONG_PATHS:
    found = off_paths(of, cache, TREES[tree], path)
    assert far_off(found) == {"at once, then on", "by levels, then on"}


@pytest.mark.parametrize("fault", [*TREE_FAULTS][:1])  # other cases are in the tests of T5
def test_wrong_attention_in_a_tree_is_detected(monkeypatch, fault):
  monkeypatch.setattr(trees, "_place_tree", functools.partial(fault, trees._place_tree))
  of = Case(VARIANTS["gpt_like"])
  assert far_off(off_paths(of, of.prefill(of.prompt), TREES["full"])) == TREE_FAULTS[fault]


# The arithmetic.


def numpy_gpt(params, cfg, tokens):
  """Compute the logits [K, V] of one row in float64, with every formula written out."""
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

  def norm(p, x):
    if not cfg.biases:
      return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * p["scale"]
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

  def dense(p, x):
    return x @ p["kernel"] + (p["bias"] if cfg.biases else 0)

  def attend(p, x, bias):
    mixed = []
    for h in range(cfg.num_heads):
      own = slice(h * cfg.head_dim, (h + 1) * cfg.head_dim)
      query, key, value = (dense(p[name], x)[:, own] for name in ("query", "key", "value"))
      mixed.append(special.softmax(query @ key.T + bias[h], axis=-1) @ value)
    return dense(p["out"], np.concatenate(mixed, axis=-1))

  def feed_forward(p, x):
    def gelu(z):
      return z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))

    if cfg.gated:
      return dense(p["wo"], gelu(dense(p["wi_0"], x)) * dense(p["wi_1"], x))
    return dense(p["wo"], gelu(dense(p["wi"], x)))

  table, p, size = params["token_embedder"]["embedding"], params["decoder"], len(tokens)
  x, past = table[tokens], np.arange(size)[:, None] - np.arange(size)
  if cfg.num_positions is None:  # buckets of a distance below 19; 16 to 18 share one
    bias = p["relpos_bias"]["rel_embedding"][:, np.clip(past, 0, 16)]
  else:
    x, bias = x + p["positions"][:size], np.zeros((cfg.num_heads, 1, 1))
  bias = np.where(past >= 0, bias, -1e10)
  for i in range(cfg.num_decoder_layers):
    layer = p[f"layers_{i}"]
    h = norm(layer["pre_self_attention_layer_norm"], x)
    x = x + attend(layer["self_attention"], h, bias)
    x = x + feed_forward(layer["mlp"], norm(layer["pre_mlp_layer_norm"], x))
  x = norm(p["decoder_norm"], x)
  return x @ (table.T if cfg.tied_logits else p["logits_dense"]["kernel"])


@pytest.mark.parametrize("variant", ["gpt_like", "gpt2", "lamda"])
def test_logits_equal_those_of_numpy(variant):
  cfg, of = VARIANTS[variant], case(variant)
  for row in range(4):
    want = numpy_gpt(of.params, cfg, of.tokens[row, :19])
    np.testing.assert_allclose(of.logits[row, :19], want, rtol=1e-4, atol=1e-4)


# Shapes.


# Decoding.

TARGET = tiny.gpt_config(V, layers=1)
LIMIT = 16
GREEDY = Sampling(temperature=0.0)
KEYS = jax.random.split(jax.random.key(0), 4)


@functools.cache
def target_params():
  return tiny.params(TARGET, 13)


@functools.cache
def prompts():
  return tiny.prompts(TARGET, 5, LENGTHS)


@functools.cache
def endless():
  """Return the greedy text [4, LIMIT] of each row, by one teacher-forced pass per token."""
  begins = [len(row) for row in begun(TARGET, prompts())]
  tokens = np.array([[*row, *[0] * 24][:24] for row in begun(TARGET, prompts())], np.int32)
  for i in range(LIMIT):
    logits = tiny.teacher_forced(TARGET)(target_params(), np.zeros((4, 1), np.int32), tokens)
    for row, begin in enumerate(begins):
      tokens[row, begin + i] = logits[row, begin + i - 1].argmax()
  return take(tokens, begins, LIMIT)


def eos():
  """Return a token that occurs in some of these texts, to use as EOS."""
  return int(endless()[0, 5])


def oracle():
  """Return the texts as lists, up to EOS."""
  rows = endless().tolist()
  return [row[: row.index(eos()) + 1] if eos() in row else row for row in rows]


@functools.cache
def draft(name):
  """Return a function that builds the draft of a tree, and its parameters."""

  def of_model(cfg):
    return functools.partial(ModelDraft, GPTModel(cfg), GREEDY)

  other = tiny.gpt_config(V, layers=1, gated=True, biases=False, num_positions=None)
  return {
    "target": lambda: (of_model(TARGET), target_params()),
    "near": lambda: (of_model(TARGET), tiny.near(target_params(), 1, 0.2)),
    "random": lambda: (of_model(other), tiny.params(other, 2)),
  }[name]()


def texts_of(out):
  return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), np.asarray(out.lengths))]


def speculate(name, rows=slice(0, 4), gamma=3):
  make, params = draft(name)
  return speculative_decode(
    *(GPTModel(TARGET), make(chain(gamma)), target_params(), params, prompts()[rows], KEYS[rows]),
    max_new_tokens=LIMIT,
    verifier=TokenVerifier(GREEDY),
    eos_id=eos(),
  )


def test_autoregressive_decoding_equals_the_oracle():
  model, common = GPTModel(TARGET), dict(max_new_tokens=LIMIT, sampling=GREEDY, eos_id=eos())
  out = autoregressive_decode(model, target_params(), prompts(), KEYS, **common)
  assert texts_of(out) == oracle()
  assert len({tuple(text) for text in oracle()}) == 4
  assert {text[-1] == eos() for text in oracle()} == {True, False}


@pytest.mark.parametrize("name", ["target", "near", "random"])  # others are in test_contract.py
def test_speculative_decoding_equals_the_oracle(name):
  out = speculate(name)
  assert texts_of(out) == oracle()
  if name == "target":
    assert int(out.num_rounds) == max(-(-len(text) // 4) for text in oracle())
  elif name != "random":
    assert int(out.num_rounds) < LIMIT  # some draft tokens were accepted


def test_single_row_equals_the_oracle():
  for row in range(4):
    assert texts_of(speculate("near", slice(row, row + 1))) == oracle()[row : row + 1]


def test_samples_have_the_targets_joint_distribution():
  """2,000 texts are sampled after each of two prompts, one of them empty; swapped prompts are
  detected."""
  n, two = 2000, prompts()[:2]
  draft = ModelDraft(GPTModel(TARGET), Sampling(), chain(2))
  out = speculative_decode(
    *(GPTModel(TARGET), draft, target_params(), tiny.near(target_params(), 1, 0.5)),
    *(np.tile(two, (n, 1)), jax.random.split(jax.random.key(1), 2 * n)),
    max_new_tokens=2,
    verifier=TokenVerifier(Sampling()),
    eos_id=-1,
  )
  assert (np.asarray(out.rounds.num_accepted)[0] < 2).any()
  first, second = np.asarray(out.tokens).reshape(n, 2, 2).transpose(2, 1, 0)  # [2, n] each
  joints = [joint_of_two(row) for row in begun(TARGET, two)]
  for row in range(2):
    counts = np.bincount(first[row] * V + second[row], minlength=V * V)
    assert tiny.p_value(counts, joints[row]) > tiny.LEVEL
    assert tiny.p_value(counts, joints[1 - row]) < tiny.CAUGHT
    assert tiny.detectable(n, joints[row]) < 0.3


def joint_of_two(text):
  """Return the exact probabilities [V * V] of the first two tokens after a given text."""
  after = np.zeros((V, 24), np.int32)
  after[:, : len(text)], after[:, len(text)] = text, np.arange(V)
  logits = tiny.teacher_forced(TARGET)(target_params(), np.zeros((V, 1), np.int32), after)
  p = special.softmax(np.asarray(logits, np.float64), axis=-1)
  return (p[0, len(text) - 1][:, None] * p[:, len(text)]).ravel()
