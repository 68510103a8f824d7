"""Test the bytes that a step must read, the bandwidth from given times, and shares in tables."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_pair
from jax import lax
from test_record_tables import RECORD
from test_report import parsed

from specdec_jax.core.sampling import Sampling
from specdec_jax.core.types import DraftSpec
from specdec_jax.drafts.prompt_lookup import PromptLookupDraft
from specdec_jax.load import load_pair
from specdec_jax.measure import roofline
from specdec_jax.measure.roofline import memory_bandwidth, read_bytes, step_bytes
from specdec_jax.measure.tables import ROOFLINE, legend, records_table, terminal_text
from specdec_jax.models.families import for_decoding, init_params
from specdec_jax.models.layers import Embed
from specdec_jax.models.t5 import T5Model

SLOTS, SOURCE = 40, 8
MATRIX, ONES, ROWS = jnp.ones((6, 5)), jnp.ones(5), jnp.array([4, 1])


@pytest.mark.parametrize(
  "f, floats",
  [
    (lambda m: m @ m.T, 30),  # used twice, counted once
    (lambda m: 0.0, 0),
    (lambda m: jnp.take(m, ROWS, axis=0), 2 * 5),
    (lambda m: jax.vmap(lambda at: lax.dynamic_slice(m, (at, 0), (1, 2)))(ROWS), 2 * 2),
    (lambda m: m[:2], 2 * 5),
    (lambda m: m[jnp.arange(60) % 6], 30),  # each row ten times
    (lambda m: (jnp.take(m, ROWS, axis=0), m.sum()), 30),
    (lambda m: jax.jit(lambda m: (jnp.take(m, ROWS, axis=0), m[:1]))(m), 3 * 5),
    (lambda m: lax.cond(m[0, 0] > 0, lambda: m[1], lambda: m[2:4].sum(0)), 1 + 10),
    # In loops, including the values that are carried between iterations.
    (lambda m: lax.scan(lambda x, _: (x @ m.T @ m, None), ONES, length=3)[0] + m[0], 3 * 35 + 5),
    (lambda m: lax.scan(lambda s, row: (s + row.sum(), None), 0.0, m)[0], 6 * (5 + 1)),
    (lambda m: lax.while_loop(lambda x: x[0] > 1, lambda x: x @ m.T @ m, ONES), 1 + 35),
  ],
)
def test_bytes_that_are_read_of_an_argument(f, floats):
  assert read_bytes(f, MATRIX) == 4 * floats


def test_only_rows_of_an_embedding_table_are_read():
  """The cases include bfloat16 tables with float32 activations, as on a CPU."""
  table = jnp.ones((6, 5), jnp.bfloat16)
  embed = Embed(6, 5, dtype=jnp.float32)

  def read(table):
    return embed.apply({"params": {"embedding": table}}, ROWS)

  assert read_bytes(read, table) == 2 * 2 * 5 and read(table).dtype == jnp.float32


def by_hand(cfg, tied, block):
  """Return the bytes of a decoder's weights and caches, for one row of `block` tokens."""
  width = cfg.num_heads * cfg.head_dim
  attention = (4 + 2) * cfg.emb_dim * width  # keys and values of the source are cached
  layer = attention + 3 * cfg.emb_dim * cfg.mlp_dim + 3 * cfg.emb_dim
  caches = 2 * width * (SLOTS + SOURCE)
  position_bias = cfg.num_heads * 32  # all of it: more slots than buckets
  logits = cfg.emb_dim * cfg.table_size
  embedded = 0 if tied else block * cfg.emb_dim
  rest = cfg.emb_dim + SOURCE + 1 + block  # final norm, mask, length, tokens
  return 4 * (cfg.num_decoder_layers * (layer + caches) + position_bias + logits + embedded + rest)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("block", [1, 4])
def test_bytes_of_a_decoder_equal_those_counted_by_hand(fused, tied, block):
  """Exclude the encoder, projections of the source, and unused rows of an untied embedding
  table."""
  cfg = tiny.config(vocab_size=60, padded_vocab_size=64, tied_logits=tied)
  params = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
  if fused:
    cfg, params = for_decoding(cfg, jax.tree.map(lambda x: jnp.zeros(x.shape), params))
  model = T5Model(cfg)
  source = jnp.ones((1, SOURCE), jnp.int32)
  cache = jax.eval_shape(lambda params: model.prefill(params, source, SLOTS)[1], params)
  tokens = jnp.ones((1, block), jnp.int32)
  got = read_bytes(model.extend, params, cache, tokens)
  assert got == by_hand(cfg, tied and not fused, block)


GREEDY, LIMIT, GAMMA = Sampling(0.0), 10, 4


def test_steps_of_a_pair_whose_draft_is_its_target():
  path = tiny_pair.folder() / "target"
  words = str(tiny_pair.folder() / "vocabulary.model")
  pair = load_pair(str(path), str(path), words, max_source_tokens=24, weights="stored")
  prompt = pair.prompt(tiny_pair.SENTENCES[:2])
  got = step_bytes(pair, GAMMA, prompt, GREEDY, LIMIT)
  caches = 2 * 2 * 16 * 4  # bytes of a slot: keys and values, two rows, two heads of 8
  # GAMMA more slots, and GAMMA more rows of the table and of the position bias, for two rows.
  assert 0 < got.verify - got.target_step - GAMMA * caches < 2 * GAMMA * 4 * (16 + 1 + 2 * 32)
  # The same number of steps of the same model, the first over two tokens, and small arrays.
  assert got.draft_step == pytest.approx(got.target_step + GAMMA * caches, rel=0.05)


def test_prompt_lookup_reads_almost_nothing():
  pair = tiny_pair.pair()
  size = pair.target.model.vocab_size

  def build(sampling, tree, options=None):
    return PromptLookupDraft(size, tree)

  copying = pair.with_draft(DraftSpec("copying", build))
  prompt = pair.prompt(tiny_pair.SENTENCES[:1])
  tokens = prompt.size + 1 + LIMIT + GAMMA + 1
  got = step_bytes(copying, GAMMA, prompt, GREEDY, LIMIT)
  assert 0 < got.draft_step <= 4 * (tokens + 4) / GAMMA
  assert got.verify == step_bytes(pair, GAMMA, prompt, GREEDY, LIMIT).verify


def test_device_reads_its_share_of_sharded_parameters():
  def array(shape, ways):
    def shard_shape(shape):
      return (shape[0] // ways, *shape[1:])

    sharding = types.SimpleNamespace(shard_shape=shard_shape)
    dtype = np.dtype("float32")
    return types.SimpleNamespace(
      sharding=sharding, shape=shape, dtype=dtype, nbytes=4 * np.prod(shape)
    )

  cut, copied = array((8, 6), ways=4), array((16,), ways=1)
  assert roofline._shard_share({"cut": cut, "copied": copied}) == (12 + 16) / (48 + 16)
  assert roofline._shard_share(tiny_pair.pair().target.params) == roofline._shard_share(()) == 1


def test_bandwidth_is_that_of_the_faster_way_to_read_the_matrix(monkeypatch):
  results = []

  def in_given_times(calls, repeats):
    results.extend(call() for call in calls)
    return [0.25, 0.125], results

  monkeypatch.setattr(roofline, "CPU_SIDE", 64)
  monkeypatch.setattr(roofline, "interleaved_medians", in_given_times)
  assert memory_bandwidth() == roofline.READS * 64 * 64 * 4 / 0.125
  for product in results:
    np.testing.assert_allclose(product, np.ones(64), rtol=1e-5)


# Tables.

MEASURED = RECORD.replace(
  memory_gb_per_s=20.0,
  target_step_mb=40.0,
  target_step_ms=4.0,
  draft_step_mb=5.0,
  draft_step_ms=0.125,
  verify_mb=44.0,
  verify_ms=None,
)


def test_share_is_the_minimum_time_divided_by_the_measured_time():
  shown = records_table("a title", [MEASURED], ROOFLINE)
  cells = dict(zip(shown.columns, shown.rows[0]))
  shares = (cells[f"{part}, % of bandwidth"] for part in ("step", "draft"))
  assert (cells["step, MB"], cells["draft, MB"], cells["verify, MB"]) == ("40.0", "5.0", "44.0")
  assert (cells["GB/s"], *shares) == ("20.0", "50%", "200%")
  assert cells["verify, % of bandwidth"] == "-"  # its time was not measured
  text = terminal_text(shown)
  assert max(map(len, text.splitlines())) <= 100 and "…" not in text
  for word in ("GB/s", "MB", "step", "draft", "gamma + 1"):
    assert word in str(legend(ROOFLINE))


def test_page_has_the_shares_if_they_were_measured():
  heading = "Bytes over bandwidth"
  page = parsed([MEASURED, RECORD.replace(gamma=9)])
  assert heading in [h.text for h in page.all("h2")]
  assert all(meaning in page.text for meaning in legend(ROOFLINE).values())
  assert "200%" in [cell.text for cell in page.all("td")]
  assert heading not in parsed([RECORD]).text
  measured = MEASURED.replace(round_ms=7.25, unaccounted_ms=0.125)
  for page, is_shown in ((parsed([measured]), True), (parsed([MEASURED]), False)):
    assert ("Time of a round" in [h.text for h in page.all("h2")]) == is_shown
    assert ({"7.25", "0.12"} <= {cell.text for cell in page.all("td")}) == is_shown
