"""Run-time checks of types and shapes in signatures, for jaxtyping's import hook."""

from collections.abc import Callable

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintPep3119Exception

# Functions that check their arguments themselves, with error messages of the library.
SELF_CHECKED = {"__init__"}


def checked(function: Callable) -> Callable:
  """Wrap a function so that its arguments and its result are checked at every call."""
  is_kernel = function.__module__.startswith("specdec_jax.models.kernels")  # takes numpy arrays too
  if is_kernel or getattr(function, "__name__", None) in SELF_CHECKED:
    return function
  try:
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True))  # an int is a float
  except BeartypeDecorHintPep3119Exception:
    return function  # fields inherited from Flax modules have types that cannot be checked
