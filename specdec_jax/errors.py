"""What went wrong in words meant for the user."""

import numbers


class InputError(ValueError):
  """The user's input is at fault: the message says what was given, what was expected, what to do.

  `specdec_jax.run` prints it as one sentence; any other exception is a bug and keeps its traceback.
  """


def require_count(name: str, value: object) -> None:
  """Raise InputError unless `value`, which the user knows as `name`, is a whole number from 1."""
  if not isinstance(value, numbers.Integral) or value < 1:
    raise InputError(f"{name} is {value!r}; it must be a whole number, at least 1.")
