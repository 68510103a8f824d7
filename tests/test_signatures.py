"""Test that shapes in signatures are checked in these tests (`conftest.py`)."""

import jax.numpy as jnp
import jaxtyping
import pytest

from specdec_jax.beams.layout import slot_mask
from specdec_jax.core.arrays import gather_one
from specdec_jax.drafts.dynamic import _best_children
from specdec_jax.models.layout import matmul


@pytest.mark.parametrize(
  "function, arguments",
  [
    (gather_one, (jnp.zeros((2, 3)), jnp.zeros(3, int))),
    (matmul, (jnp.zeros((2, 3)), jnp.zeros((4, 5)))),
    (_best_children, (jnp.zeros((2, 3, 4)), jnp.zeros((2, 2)), 1)),
    (slot_mask, (jnp.zeros((2, 1), int), 1, 4)),
  ],
)
def test_wrong_shape_is_rejected(function, arguments):
  with pytest.raises(jaxtyping.TypeCheckError):
    function(*arguments)
