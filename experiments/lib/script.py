"""Entry point of the scripts of studies."""

import sys
from collections.abc import Callable

from specdec_jax.errors import InputError


def run(main: Callable[[], object]) -> None:
  """Call `main`. An InputError or OSError is printed as one line, and the exit status is 2."""
  try:
    main()
  except (InputError, OSError) as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)
