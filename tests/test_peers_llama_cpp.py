"""Test llama.cpp as a backend, with the weights of the bundled pair."""

import os
from typing import Any

import numpy as np
import pytest

from experiments.peers import comparison as comparisons
from experiments.peers import llama_cpp
from experiments.peers.comparison import OWN_BASELINE, Comparison, Workload
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.errors import InputError

LIMIT = 24
TEXTS = (
  "A man in a blue jacket is riding his bicycle through a busy street while it is raining.",
  "Two dogs are playing in the snow.",
)
ARGMAX = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Comparison:
  workload = Workload(TEXTS, temperatures=(0.0,), max_new_tokens=LIMIT)
  folder = str(tmp_path_factory.mktemp("weights"))
  return comparisons.trained(folder, workload, precisions=[("float32", "float")])


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
  """Use one thread: the threads of llama.cpp wait for each other, also for a core."""
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def own_outputs(comparison: Comparison) -> list[list[int]]:
  decode: Any = OWN_BASELINE.load(comparison)
  outputs = []
  for i, text in enumerate(TEXTS):
    prompt, rng = comparison.pair.prompt([text]), row_keys(0, i, 1)
    result = decode(prompt, rng, max_new_tokens=LIMIT, sampling=ARGMAX)
    outputs.append(np.asarray(result.tokens)[0, : int(result.lengths[0])].tolist())
  return outputs


def test_llama_cpp_gives_the_tokens_of_the_target(comparison):
  backend = llama_cpp.greedy()
  if missing := backend.missing_packages():
    pytest.skip(f"{', '.join(missing)} not installed")
  sources, want = [comparison.pair.encode(text) for text in TEXTS], own_outputs(comparison)
  generate: Any = backend.load(comparison)
  for _ in range(2):  # a call leaves nothing behind that changes the next one
    got = [generate(source, 0, LIMIT, 0.0) for source in sources]
    assert got == [(tokens, len(tokens)) for tokens in want]
  rounded: Any = llama_cpp.greedy("q8_0").load(comparison)
  tokens, _ = rounded(sources[1], 0, LIMIT, 0.0)
  assert tokens[:3] == want[1][:3]

  to_the_limit: Any = backend.load(comparison._replace(alpha=0.5))
  tokens, num_target_calls = to_the_limit(sources[1], 0, LIMIT, 0.0)
  assert len(want[1]) < LIMIT == len(tokens) == num_target_calls
  assert tokens[: len(want[1])] == want[1]


def test_unknown_compute_type_raises():
  with pytest.raises(InputError, match="compute_type is 'int8'"):
    llama_cpp.greedy("int8")  # type: ignore[arg-type]
