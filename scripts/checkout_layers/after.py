"""Names that the cases use, as they are today: those of `before.py`, some of them replaced."""
# mypy: ignore-errors

import json
import pathlib
import tempfile

import before
from before import *  # noqa: F403

RENAMED = {
  "check_exactness.check_exactness": "check.check_exactness",
  "heads.speculator_config.num_layers": "heads.new_head.num_decoder_layers",
  "heads.speculator_config": "heads.new_head",
  "num_guesses": "num_draft_tokens",
}
before.TABULATE = "experiments.tables"


def read_checkpoint(path):
  """Return the parts of `before.read_checkpoint`; the fields of a head have changed."""
  from specdec_jax.drafts.heads import HEADS

  file = pathlib.Path(path) / "config.json"
  fields = json.loads(file.read_text()) if file.exists() else {}
  if fields.get("family") != "speculator":
    return before.read_checkpoint(path)
  fields |= {"family": "head", "offsets": fields["gamma"], "layers": fields["layers"] or []}
  if fields["kind"] == "early_exit":
    fields["layers"] = fields["layers"] or [*range(fields["exit_layers"])]
  known = HEADS[fields["kind"]].__dataclass_fields__.keys() | {"family", "vocabulary"}
  fields = {name: value for name, value in fields.items() if name in known}
  with tempfile.TemporaryDirectory() as copied:
    shutil.copytree(path, copied, dirs_exist_ok=True)  # noqa: F405
    (pathlib.Path(copied) / "config.json").write_text(json.dumps(fields))
    return before.read_checkpoint(copied)


def untimed(values):
  """Return the fields of a line of JSON that are equal in two runs; those of records as before."""
  if "models" not in values:
    return before.untimed(values)
  setting, outputs = values["models"] | values["settings"] | values["machine"], values["outputs"]
  setting["acceptance"] = "simulated" if setting.pop("simulated") else "measured"
  del setting["repeats"]
  quality = {name: outputs.pop(name) for name in ("metric", "quality", "baseline_quality")}
  return {"schema": 3, "setting": setting, "outputs": outputs, "quality": quality}
