"""Names that the cases use, as they are today: those of `before.py`, some of them replaced."""
# mypy: ignore-errors

import before
from before import *  # noqa: F403

RENAMED = {"check_exactness.check_exactness": "check.check_exactness"}
before.TABULATE = "experiments.tables"
