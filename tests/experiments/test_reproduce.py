"""Tables of the paper by one command: rows, models, plans, records that are not measured again."""

import contextlib
import dataclasses
import functools
import pathlib
import weakref

import jax
import pytest
import tiny
import tiny_pair

from experiments.paper import reproduce as module
from experiments.paper.reproduce import (
  Checkpoints,
  RandomStandIns,
  Task,
  TrainedStandIns,
  groups,
  reproduce,
  stand_ins,
)
from specdec_jax.checkpoints.checkpoint import Checkpoint
from specdec_jax.data.text import read_lines
from specdec_jax.errors import InputError
from specdec_jax.load import checkpoint_draft
from specdec_jax.measure.records import read
from specdec_jax.models.sizes import named_config

TEXTS = tiny_pair.SENTENCES[:2]


def tasks(tmp_path):
  path = tmp_path / "targets.txt"
  path.write_text("\n".join(tiny_pair.SENTENCES), encoding="utf-8")
  return {"EnDe": Task("wmt14_ende", lambda: TEXTS, lambda: str(path), 24, 8)}


def checkpoints(**drafts):
  folder, vocabulary = tiny_pair.folder(), str(tiny_pair.folder() / "vocabulary.model")
  paths = {"T5-XXL": "target", **(drafts or {"T5-small": "near", "T5-base": "random"})}
  paths = {name: str(folder / path) for name, path in paths.items()}
  return Checkpoints(paths, vocabulary, "float32")


def test_every_row_of_tables_2_and_4_has_stand_ins():
  both = dict.fromkeys(("EnDe", "CNNDM"), Task("", list, str))
  for number in (2, 4):
    found = groups(number, RandomStandIns(), both)
    assert sum(len(group.rows) for group in found) == 12
    assert [(group.task, group.draft, group.missing) for group in found] == [
      (task, draft, "")
      for task in ("EnDe", "CNNDM")
      for draft in ("T5-small", "T5-base", "T5-large")
    ]
    gammas = [[int(row["gamma"]) for row in group.rows] for group in found]
    assert gammas == [[7, 7], [7, 5], [7, 3], [5, 5], [5, 3], [3, 3]]


def test_rows_that_cannot_be_measured_are_named(tmp_path, capsys):
  found = groups(3, checkpoints(), tasks(tmp_path))
  assert sum(len(group.rows) for group in found) == 32
  assert {group.draft for group in found if not group.missing} == {
    *("Unigram", "Bigram", "T5-small", "T5-base")
  }
  reproduce(["table3"], checkpoints(), tasks(tmp_path), str(tmp_path), dry_run=True)
  said = " ".join(capsys.readouterr().out.split())
  for sentence in (
    "Not measured: GPT-like (97M) with Unigram, Bigram, GPT-like (6M): never published;",
    "Not measured: T5-XXL (EnDe) with T5-large: no model is given for T5-large.",
    "Not measured: T5-XXL (CNNDM) with Unigram, Bigram, T5-small, T5-base, T5-large: no texts are",
    "Not measured: LaMDA (137B) with LaMDA (100M), LaMDA (2B), LaMDA (8B): never published;",
  ):
    assert sentence in said
  table5 = groups(5, checkpoints(), tasks(tmp_path))
  assert {group.draft: len(group.rows) for group in table5 if not group.missing} == {
    **{"Unigram": 4, "Bigram": 4, "T5-small": 8, "T5-base": 4}
  }
  with pytest.raises(InputError, match="No row of table2 .*T5-XXL .EnDe.* with T5-small, T5-base"):
    reproduce(["table2"], Checkpoints(), tasks(tmp_path), str(tmp_path), dry_run=True)


def test_speeds_are_measured_once_with_the_gammas_of_the_paper(tmp_path, capsys, monkeypatch):
  tiny.know_costs(monkeypatch)  # test_measure.py times the parts of a round
  run = functools.partial(
    reproduce,
    ["table2"],
    checkpoints(**{"T5-base": "random"}),
    tasks(tmp_path),
    str(tmp_path / "runs"),
    repeats=1,
  )
  run()
  planned, _, said = capsys.readouterr().out.partition("Table 2, row by row")
  assert "rows to measure" in planned and said.count(" EnDe ") == 2
  # The paper's alpha and speed of T5-base at temperature 0 and 1.
  assert " 0.80 " in said and " 2.8 " in said and " 0.68 " in said and " 2.4 " in said
  (folder,) = (tmp_path / "runs" / "speeds").iterdir()
  records = read(folder / "results.jsonl")
  assert folder.name == "EnDe_T5-base"
  assert {(r.models.draft, r.settings.temperature, r.settings.gamma) for r in records} == {
    ("random", 0, 7),
    ("random", 1, 5),
  }
  assert all(
    r.settings.num_examples == 2 and r.settings.max_new_tokens == 8 and r.times.speedup > 0
    for r in records
  )
  run()
  assert read(folder / "results.jsonl") == records

  figures = functools.partial(
    reproduce,
    models=checkpoints(**{"T5-base": "random"}),
    tasks=tasks(tmp_path),
    output_dir=str(tmp_path / "runs"),
    repeats=1,
  )
  figures(["figure1", "figure2", "figure5"])  # Figure 5 needs no more measurements
  assert read(folder / "results.jsonl") == records
  said = capsys.readouterr().out
  for number in (1, 2, 5):
    path = tmp_path / "runs" / f"figure{number}.svg"
    assert str(path) in said and path.read_text(encoding="utf-8").startswith("<?xml")


def test_alphas_of_all_drafts_are_measured_on_the_same_text(tmp_path, monkeypatch):
  calls = []
  monkeypatch.setattr(module, "acceptance", lambda *args, **kwargs: calls.append((args, kwargs)))
  models = checkpoints()
  reproduce(["table5"], models, tasks(tmp_path), str(tmp_path / "runs"), min_tokens=8)
  (((pair, texts, folder, samplings, drafts), settings),) = calls
  assert pair.draft.name == "near" and texts == TEXTS and folder.endswith("runs/alphas5/EnDe")
  assert [sampling.temperature for sampling in samplings] == [0, 1]
  loaded = [draft(pair.target).name for draft in drafts]
  assert loaded == ["random", "unigram", "bigram"]
  assert settings == dict(max_new_tokens=8, min_tokens=8, leniences=[1, 0.5, 0.3, 0.1])


def test_dry_run_prints_memory_and_time_and_measures_nothing(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(module, "memory_bandwidth", lambda: 1e9)
  plan = functools.partial(
    reproduce, models=RandomStandIns(), output_dir=str(tmp_path), dry_run=True
  )
  plan(["table2"], tasks=tasks(tmp_path))
  said = " ".join(capsys.readouterr().out.split())
  assert "Stand-ins, not the paper's models: random weights and the paper's alpha" in said
  assert "T5 1.1 xxl for T5-XXL" in said
  # T5 1.1 XXL and small have 11,135,332,352 and 76,961,152 parameters.
  assert said.count(" 22.42 ") == 2 and said.count(" EnDe ") == 6
  plan(["figure1", "figure5"], tasks=tasks(tmp_path))  # Figure 5 needs a group of Table 2
  assert capsys.readouterr().out.count(" EnDe ") == 2
  plan(["table2"], models=checkpoints(), tasks=tasks(tmp_path))
  said = capsys.readouterr().out
  assert "Checkpoints, not the paper's models: T5-XXL: " in said and "Stand-ins" not in said
  assert not [*tmp_path.glob("*/*/results.jsonl")]


def test_each_draft_of_the_paper_has_a_trained_stand_in_for_captions(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(pathlib.Path(__file__).resolve().parents[2])
  captions = dataclasses.replace(tasks(tmp_path)["EnDe"], name="captions")
  both = {"EnDe": captions, "CNNDM": dataclasses.replace(captions, name="articles")}
  models = TrainedStandIns()
  reproduce(["table2", "table3"], models, both, str(tmp_path), dry_run=True)
  said = " ".join(capsys.readouterr().out.split())
  assert said.count(" EnDe ") == 6 + 10 and "drafts of 0.3, 0.9 and 2.4 million" in said
  for name in ("Unigram", "T5-small"):
    assert f"(CNNDM) with {name}" in said
  drafts = [models.pair(f"T5-{size}", captions, 0.5).draft for size in ("small", "base", "large")]
  assert [draft.name for draft in drafts] == ["300k", "900k", "draft"]
  assert models.pair("T5-small", captions, 0.5).simulated_alpha is None


@pytest.mark.parametrize("true_sizes", [None, True])
def test_stand_ins_of_the_papers_sizes(true_sizes, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  models = stand_ins(true_sizes)
  assert models == RandomStandIns() and stand_ins(False) == TrainedStandIns()
  assert models.sizes["T5-XXL"] == "xxl" and models.dtype == "bfloat16"
  both = dict.fromkeys(("EnDe", "CNNDM"), Task("", list, str))
  assert sum(len(group.rows) for group in groups(2, models, both) if not group.missing) == 12


def test_stand_ins_share_the_target_and_simulate_the_alpha_of_the_row(tmp_path):
  models = RandomStandIns(sizes={"T5-XXL": "tiny", "T5-small": "tiny"}, dtype="float32")
  task = tasks(tmp_path)["EnDe"]
  first, second = (models.pair("T5-small", task, alpha) for alpha in (0.5, 0.75))
  assert (first.simulated_alpha, second.simulated_alpha) == (0.5, 0.75)
  assert first.target.params is second.target.params and first.draft.name == "t5_1.1_tiny"


def test_the_target_is_loaded_once_for_all_drafts(tmp_path):
  models = checkpoints()
  task = tasks(tmp_path)["EnDe"]
  first, second = (models.pair(draft, task, 0.5) for draft in ("T5-small", "T5-base"))
  assert first.target.params is second.target.params and first.draft.name != second.draft.name
  assert (first.task, first.max_source_tokens) == ("wmt14_ende", 24)
  assert checkpoint_draft(first.target, models.paths["T5-small"]).name == first.draft.name


def test_each_task_has_its_own_target_and_one_is_in_memory(tmp_path, monkeypatch):
  loaded = []

  def load_pair(target, *args, **kwargs):
    assert all(array() is None for array in loaded), "the target before is still in memory"
    pair = module_load_pair(target, *args, **kwargs)
    loaded.append(weakref.ref(jax.tree.leaves(pair.target.params)[0]))
    return pair

  def at_one_temperature(pair, texts, folder, samplings, *args, **kwargs):
    module_acceptance(pair, texts, folder, samplings[:1], *args, **kwargs)

  module_load_pair, module_acceptance = module.load_pair, module.acceptance
  monkeypatch.setattr(module, "load_pair", load_pair)
  monkeypatch.setattr(module, "acceptance", at_one_temperature)
  monkeypatch.setattr(module, "_LOADED", {})
  first = tasks(tmp_path)["EnDe"]
  paths = {name: str(tiny_pair.folder() / "near") for name in ("T5-XXL", "T5-small")}
  other = dataclasses.replace(first, name="cnn_dm", paths=paths)
  models = dataclasses.replace(checkpoints(**{"T5-base": "near"}), papers_own=True)
  reproduce(
    ["table3"],
    models,
    dict(EnDe=first, CNNDM=other),
    str(tmp_path / "runs"),
    min_tokens=8,
  )
  assert len(loaded) == 2
  records = [read(tmp_path / f"runs/alphas3/{task}/results.jsonl") for task in ("EnDe", "CNNDM")]
  for of_task, path in zip(records, ("target", "near")):
    assert {r.models.target for r in of_task} == {"the paper's T5-XXL"}
    assert all(r.models.target_path.endswith(path) for r in of_task)
  assert {r.models.draft for r in records[0]} == {"the paper's T5-base", "unigram", "bigram"}
  assert "the paper's T5-small" in {r.models.draft for r in records[1]}


@pytest.mark.parametrize("absent", ["texts", "targets", "checkpoint"])
def test_what_is_missing_is_reported_before_weights_are_loaded(tmp_path, monkeypatch, absent):
  monkeypatch.setattr(
    module, "load_pair", lambda *args, **kwargs: pytest.fail("weights are loaded")
  )
  monkeypatch.setattr(module, "_LOADED", {})
  task, models = tasks(tmp_path)["EnDe"], checkpoints()
  if absent == "texts":
    task = dataclasses.replace(task, sources=lambda: read_lines("texts"))
  elif absent == "targets":
    task = dataclasses.replace(task, target_text=lambda: "targets")
  else:
    models = dataclasses.replace(
      models, paths=models.paths | {"T5-large": "checkpoint"}, version="1.1"
    )
  with pytest.raises(InputError, match=f"There is no .*{absent}"):
    reproduce(["table3"], models, {"EnDe": task}, str(tmp_path / "runs"), num_texts=1)


@pytest.mark.parametrize(
  "path, version", [("t5_11B", "1.0"), ("flan-t5-xxl", "1.1"), ("xxl", "1.1")]
)
def test_t5_1_0_and_flan_t5_cannot_be_declared_as_the_papers_own(
  tmp_path, monkeypatch, path, version
):
  opened = Checkpoint(path, named_config(version, "small"), {})
  monkeypatch.setattr(module, "open_checkpoint", lambda path: opened)
  models = Checkpoints({"T5-XXL": path}, papers_own=True)
  is_other = pytest.raises(InputError, match="is T5 1.0 or Flan-T5")
  with contextlib.nullcontext() if path == "xxl" else is_other:
    models.open("T5-XXL", tasks(tmp_path)["EnDe"])
