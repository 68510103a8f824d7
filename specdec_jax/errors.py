"""What went wrong in words meant for the user."""


class InputError(ValueError):
  """The user's input is at fault: the message says what was given, what was expected, what to do.

  `specdec_jax.run` prints it as one sentence; any other exception is a bug and keeps its traceback.
  """
