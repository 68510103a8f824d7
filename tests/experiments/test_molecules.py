"""Test that ANNalog's outputs, read from our checkpoint, equal those of its own code."""

import pathlib

import pytest
from test_docs import blocks

from experiments.molecules import molecules
from specdec_jax.drafts.prompt_lookup import prompt_lookup
from specdec_jax.load import load_pair

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_guide_of_small_models(tmp_path, monkeypatch, capsys):
  pytest.importorskip("annalog", reason="the extra molecules is not installed")
  monkeypatch.chdir(tmp_path)
  (guide,) = blocks(ROOT / "experiments" / "molecules" / "README.md")
  exec(guide, {})
  lines = capsys.readouterr().out.splitlines()
  lengths = [float(line.split()[-5]) for line in lines]
  assert len(lengths) == 3 and min(lengths) > 2


def test_first_outputs_are_those_of_the_package(tmp_path):
  pytest.importorskip("annalog", reason="the extra molecules is not installed")
  handler = molecules.open_annalog()
  molecules.write_checkpoint(handler, tmp_path)
  pair = load_pair(str(tmp_path), prompt_lookup)
  drugs = [line.split()[0] for line in molecules.DRUGS.read_text().splitlines()]
  for drug in [*drugs, "Brc1[nH]c(Cl)c%11", "C[Ti]C"]:  # titanium is <unk>
    tokens = ["<sos>", *handler.SRC.tokenize(drug), "<eos>"]
    assert pair.vocabulary.encode(drug) == [handler.SRC.vocab.lookup(token) for token in tokens]
  outputs = [*map(str, pair.generate(drugs[:4], gamma=5, max_new_tokens=molecules.MAX_NEW_TOKENS))]
  assert outputs == molecules.package_outputs(handler, drugs[:4])
  assert outputs != drugs[:4]
