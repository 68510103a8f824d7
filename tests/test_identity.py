"""Test that descriptions of values are equal if and only if the values are."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.core.identity import described, require_same
from specdec_jax.core.settings import HashableArray
from specdec_jax.errors import InputError

ARRAY = np.linspace(0, 1, 3000)
CHANGED = np.where(np.arange(3000) == 1500, ARRAY + 1e-12, ARRAY)  # not at an end


@pytest.mark.parametrize(
  "value, other",
  [
    (5, 6),
    (None, 0),
    ("a" * 200 + "b", "a" * 200 + "c"),
    ([1, 2], [1, 3]),
    (ARRAY, CHANGED),
    ([ARRAY], [CHANGED]),
    (jnp.arange(3000), jnp.arange(3000).at[1500].set(0)),
    (HashableArray(ARRAY), HashableArray(CHANGED)),
  ],
  ids=lambda value: type(value).__name__,
)
def test_a_difference_is_named(value, other):
  before = json.loads(json.dumps(described({"same": 1, "changed": value})))
  require_same(before, described({"same": 1, "changed": value}), "It is of a run", "stop")
  with pytest.raises(
    InputError, match="^It is of a run with changed .*, and this run has .*; stop"
  ):
    require_same(before, described({"same": 1, "changed": other}), "It is of a run", "stop")
  with pytest.raises(InputError, match="^It is of a run with other None, and this run has 1; stop"):
    require_same(
      before, described({"same": 1, "changed": value, "other": 1}), "It is of a run", "stop"
    )


@pytest.mark.parametrize("value", [lambda: 0, [object()]])
def test_value_without_identity_equals_nothing(value):
  described_value = described({"same": 1, "it": value})
  with pytest.raises(
    InputError, match="with another it, or with the same one: .* cannot be compared"
  ):
    require_same(described_value, described_value, "It is of a run", "stop")
