"""Check outputs of several engines for the bundled target, as `specdec check --outputs` does:

python -m experiments.exactness.outputs >> outputs.jsonl

Each engine generates outputs for the bundled captions, and one line of JSON has the result of their
check. Needs the extra `peers`. If standard output is a file, engines in it do not run again.
"""

import argparse
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import specdec_jax
from experiments.lib import script
from experiments.lib.pages import ROOT
from experiments.lib.records import measured_on
from experiments.peers import ctranslate2, huggingface
from specdec_jax.checkpoints.load import open_checkpoint
from specdec_jax.checkpoints.save import save_huggingface
from specdec_jax.data.text import read_lines
from specdec_jax.exactness.checker import samples_row
from specdec_jax.exactness.outputs import OutputsChecker, groups_of
from specdec_jax.load import BUNDLED
from specdec_jax.measure.machine import provenance
from specdec_jax.measure.tables import Table

MAX_NEW_TOKENS, NUM_CAPTIONS, LEVEL = 40, 100, 1e-3
GREEDY, SAMPLED = dict(temperature=0), dict(temperature=1)
FILTERED = dict(temperature=0.7, top_k=40, top_p=0.9)
Engine = Callable[..., Sequence[Sequence[int]]]  # function of a source (tokens), count and settings


def transformers(folder: pathlib.Path, assistant: bool = False) -> Engine:
  """Return `generate` of transformers, with the draft as the assistant model or without it."""
  import torch

  def load(name: str) -> Any:
    checkpoint: Any = open_checkpoint(str(BUNDLED / name))
    save_huggingface(str(folder / name), checkpoint.config, checkpoint.load(checkpoint.config))
    model = huggingface.load_model(str(folder / name))
    model.config.num_layers = model.config.num_decoder_layers  # sizes of caches in transformers 5
    return model

  model = load("target")
  options = dict(assistant_model=load("draft")) if assistant else {}

  def generate(source, count, temperature, top_k=0, top_p=1.0):
    sampled = dict(temperature=temperature, top_k=top_k, top_p=top_p) if temperature else {}
    at_once = 1 if assistant else count
    rows = torch.tensor([source] * at_once)
    found = []
    for _ in range(count // at_once):
      with torch.inference_mode():
        found += model.generate(
          rows,
          attention_mask=torch.ones_like(rows),
          max_new_tokens=MAX_NEW_TOKENS,
          do_sample=bool(temperature),
          **sampled,
          **options,
        )[:, 1:].tolist()
    return [row[: row.index(1) + 1] if 1 in row else row for row in found]

  torch.manual_seed(0)
  return generate


def ctranslate2_of(folder: pathlib.Path, compute_type: str = "float32") -> Engine:
  """Return CTranslate2 without beams."""
  transformers(folder)  # writes the target in the format of transformers
  (folder / "converted").mkdir()
  ctranslate2._convert(str(folder / "target"), str(folder / "converted"))
  import ctranslate2 as library

  library.set_random_seed(1)
  translator = library.Translator(str(folder / "converted"), compute_type=compute_type)

  def generate(source, count, temperature, top_k=0, top_p=1.0):
    results = translator.translate_batch(
      [[str(token) for token in source]] * count,
      beam_size=1,
      sampling_topk=top_k if temperature else 1,
      sampling_topp=top_p,
      sampling_temperature=temperature or 1,
      max_decoding_length=MAX_NEW_TOKENS,
      return_end_token=True,
    )
    return [[int(token) for token in result.hypotheses[0]] for result in results]

  return generate


def own(folder: pathlib.Path, verifier: str, lenience: float = 1.0) -> Engine:
  """Return this package with gamma 5 and a verifier."""
  pair = specdec_jax.load_pair(verifier=verifier)
  settings = dict(gamma=5, max_new_tokens=MAX_NEW_TOKENS, batch_size=32, lenience=lenience)

  def generate(texts, **given):
    return [output.tokens.tolist() for output in pair.generate(texts, **settings, **given)]

  return generate


assisted = functools.partial(transformers, assistant=True)
# Name, engine, whether it is exact, settings, and outputs per caption.
ENGINES: Sequence[tuple[str, Callable[[pathlib.Path], Engine], bool, dict, int]] = (
  *(
    (f"this package, {name}", functools.partial(own, verifier=name), is_exact, SAMPLED, 20)
    for name, is_exact in (
      *(("tokens", True), ("blocks", True), ("gumbel", True)),
      *(("typical", False), ("top_beta", False)),
    )
  ),
  (
    "this package, tokens with lenience 0.8",
    functools.partial(own, verifier="tokens", lenience=0.8),
    *(False, SAMPLED, 20),
  ),
  ("CTranslate2", ctranslate2_of, True, GREEDY, 1),
  ("CTranslate2", ctranslate2_of, True, SAMPLED, 20),
  ("CTranslate2, int8", functools.partial(ctranslate2_of, compute_type="int8"), False, GREEDY, 1),
  ("transformers", transformers, True, GREEDY, 1),
  ("transformers", transformers, True, SAMPLED, 20),
  ("transformers", transformers, True, FILTERED, 20),
  ("transformers, assisted", assisted, True, GREEDY, 1),
  ("transformers, assisted", assisted, True, SAMPLED, 2),
)


def outputs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
  """Return a table of the checks that this program made."""
  cells = tuple(
    (
      row["engine"],
      row["setting"],
      "yes" if row["exact"] else "no",
      f"{row['tokens']:,}",
      row["found"],
      "holds" if row["holds"] else "fails",
    )
    for row in rows
  )
  columns = "engine", "settings", "exact", "tokens", "found", "check"
  note = f"A check fails below p = {rows[0]['fault']} or with a fault. {measured_on(rows)}"
  return Table("Outputs of engines", columns, cells, (note,))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.parse_args()
  done = set()
  if os.path.isfile(path := os.path.realpath("/dev/stdout")):
    done = {(row["engine"], row["setting"]) for row in map(json.loads, read_lines(path))}
  pair = specdec_jax.load_pair()
  captions = read_lines(ROOT / "gin/tasks/captions.en.txt", NUM_CAPTIONS)
  for name, load, is_exact, settings, count in ENGINES:
    setting = ", ".join(f"{key} {value}" for key, value in settings.items())
    if (name, setting) in done:
      continue
    texts = captions * count
    with tempfile.TemporaryDirectory() as folder:
      engine = load(pathlib.Path(folder))
      if name.startswith("this package"):
        outputs = engine(texts, **settings)
      else:
        of_captions = [engine(pair.encode(text), count, **settings) for text in captions]
        outputs = [row for of_each in zip(*of_captions) for row in of_each]
    (group,) = groups_of(pair, texts, [{"tokens": row} for row in outputs], settings)
    checker = OutputsChecker(pair, 32)
    if settings["temperature"]:
      row = samples_row([checker.samples(group, 0, 0)], group, LEVEL)
    else:
      row = checker.outputs(group)
    result = dict(engine=name, setting=setting, exact=is_exact, texts=len(texts))
    result |= dict(tokens=sum(map(len, outputs)), holds=row.holds, found=row.found)
    result |= dict(fault=f"{LEVEL:g}", details=row.details, lines=[*row.lines])
    print(json.dumps(result | provenance(), ensure_ascii=False), flush=True)


if __name__ == "__main__":
  script.run(main)
