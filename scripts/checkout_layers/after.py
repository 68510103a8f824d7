"""Names that the cases use, as they are today: those of `before.py`, some of them replaced."""
# mypy: ignore-errors

import before
from before import *  # noqa: F403

RENAMED = {"check_exactness.check_exactness": "check.check_exactness"}
before.TABULATE = "experiments.tables"


def untimed(values):
  """Return the fields of a line of JSON that are equal in two runs; those of records as before."""
  if "models" not in values:
    return before.untimed(values)
  setting, outputs = values["models"] | values["settings"] | values["machine"], values["outputs"]
  setting["acceptance"] = "simulated" if setting.pop("simulated") else "measured"
  del setting["repeats"]
  quality = {name: outputs.pop(name) for name in ("metric", "quality", "baseline_quality")}
  return {"schema": 3, "setting": setting, "outputs": outputs, "quality": quality}
