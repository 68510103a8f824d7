"""Test the search for the layers of a draft by layer skipping."""

import dataclasses
import functools
import itertools

import pytest
import tiny_pair

from experiments.methods import search_layers as module
from experiments.methods.search_layers import search, search_layers
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import chain
from specdec_jax.measure import records
from specdec_jax.measure.costs import Costs
from specdec_jax.models.families import model_of
from specdec_jax.pair import Pair

TEXTS = tiny_pair.SENTENCES[:6]
SUBSETS = [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]
SAMPLING = Sampling(1.0, top_k=5)
LIMIT = 10


@functools.cache
def deep(of, num_layers: int = 3) -> Pair:
  """Return a tiny pair with a target that has several decoder layers."""
  pair = of()
  config = dataclasses.replace(pair.target.model.config, num_decoder_layers=num_layers)
  # Without kernels, so that parameters need no packing.
  config = config.with_layout(kernels="xla", fused=False)
  params = tiny_pair.random_params(config, 5)
  return tiny_pair.changed(pair, model=model_of(config), params=params)


def layer_costs(pairs, trees, *args) -> list[list[Costs]]:
  """Return costs with v = 1, and c = 0.02 per layer at gamma 10; at other gammas, c is noise."""

  def costs(pair, gamma) -> Costs:
    draft_step = 0.02 * len(pair.draft.build(SAMPLING, chain(1)).layers)
    return Costs(1.0, draft_step + (0 if gamma == 10 else 0.3), 1.0, 0.0, 0.0, 0.0)

  return [[costs(pair, tree.depth) for tree in trees] for pair in pairs]


def run(output, pair, **changes):
  settings = dict(sampling=SAMPLING, batch_size=2, max_new_tokens=LIMIT)
  search_layers(pair, TEXTS, str(output), **{**settings, **changes})
  return records.read(output / "results.jsonl")


def test_search_resumes_and_interpolates_costs(tmp_path, monkeypatch):
  timed = []

  def counted(pairs, *args):
    timed.append([pair.draft.name for pair in pairs])
    return layer_costs(pairs, *args)

  monkeypatch.setattr(module, "measure_costs", counted)
  pair = deep(tiny_pair.pair, num_layers=4)
  complete = run(tmp_path, pair, max_candidates=7)
  assert {len(record.models.draft.split(",")) for record in complete} == {1, 2, 3}
  assert len(complete) == 7 and timed == [["layers 0", "layers 0,1,2"]]
  for record in complete:
    assert record.times.c == pytest.approx(0.02 * len(record.models.draft.split(",")))
  assert run(tmp_path, pair, max_candidates=7) == complete and len(timed) == 1
  path = tmp_path / "results.jsonl"
  path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
  resumed = run(tmp_path, pair, max_candidates=7)
  assert len(timed) == 2
  for one, other in zip(resumed, complete, strict=True):
    assert one.models == other.models and one.outputs == other.outputs


def hidden_set(layers) -> float:
  """Return the number of layers on which a set agrees with a hidden set of 8 layers."""
  return 8.0 - len({*layers} ^ {0, 1, 4, 7})


@pytest.mark.parametrize("seed", range(2))
def test_local_search_keeps_to_its_budget_and_is_deterministic(seed):
  calls = []

  def speedup(layers):
    calls.append(layers)
    return hidden_set(layers)

  found = search(8, 60, speedup, seed)
  assert len(calls) == len({*calls}) == 60 and found == {each: hidden_set(each) for each in calls}
  assert all(0 < len(layers) < 8 and [*layers] == sorted({*layers}) for layers in calls)
  assert max(found, key=found.__getitem__) == (0, 1, 4, 7)  # one of 254 sets
  assert [*search(8, 60, hidden_set, seed)] == calls
  assert [*search(8, 60, hidden_set, seed + 1)] != calls
  for before, layers in itertools.pairwise(calls[:30]):
    if before == (0, 1, 4, 7):  # the best set is followed by one of its neighbors
      assert len({*layers} ^ {*before}) == 1
