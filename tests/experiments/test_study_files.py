"""Test that the gin files of studies parse, alone and with the files that may follow them."""

import inspect
import pathlib
import re

import gin
import pytest

from specdec_jax import run

ROOT = pathlib.Path(__file__).resolve().parents[2]
STUDIES = {
  str(path.relative_to(ROOT)): path.read_text() for path in sorted(ROOT.glob("experiments/*/*.gin"))
}
RUNS = [path for path, text in STUDIES.items() if not re.search(r"Read[\s#]+this file", text)]
AFTER = [
  ("experiments/table3/alpha.gin", "experiments/table3/lamda.gin"),
  ("experiments/table3/alpha.gin", "experiments/table3/dialog.gin", "experiments/table3/lamda.gin"),
  ("experiments/table3/table3.gin", "gin/tasks/articles.gin", "gin/models/random.gin"),
  ("experiments/table2/table2.gin", "gin/models/random.gin", "gin/models/sharded.gin"),
  ("experiments/table5/table5.gin", "gin/models/t5_1_1.gin"),
  ("experiments/drafts/drafts.gin", "experiments/gpt_like/gpt_like.gin", "gin/models/sharded.gin"),
  (
    "experiments/drafts/drafts.gin",
    "experiments/editing/editing.gin",
    "experiments/summaries/replay.gin",
  ),
  (
    "experiments/table4/cost.gin",
    "experiments/summaries/summaries.gin",
    "experiments/summaries/replay.gin",
  ),
  ("experiments/beams/beams.gin", "gin/models/gpt2.gin"),
  ("experiments/paper/reproduce.gin", "experiments/paper/t5_1_0.gin"),
  ("experiments/paper/reproduce.gin", "experiments/paper/fine_tuned.gin"),
]


def parse(*paths: str) -> None:
  """Parse the files as a run in the clone does."""
  try:
    run.parse_gin(paths, [], [])
    for reference in gin.config.iterate_references(gin.config._CONFIG):
      assert not inspect.isabstract(reference.configurable.wrapped), reference
  finally:
    gin.clear_config()


@pytest.fixture(autouse=True)
def in_the_clone(monkeypatch):
  monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", RUNS)
def test_study_parses(path):
  parse(path)


@pytest.mark.parametrize("paths", AFTER, ids=" ".join)
def test_study_parses_with_files_of_models_tasks_and_drafts(paths):
  parse(*paths)


@pytest.mark.parametrize(
  "path, function",
  [
    ("learned_drafts/train_divergence", "train.train_draft"),
    ("methods/train_boosted", "train.train_draft"),
    ("methods/train_on_policy", "on_policy.train_on_policy"),
  ],
)
def test_training_a_draft_further_does_not_overwrite_it(path, function):
  try:
    run.parse_gin([f"experiments/{path}.gin"], [], [])
    settings = gin.get_bindings(function, resolve_references=False)
    output, start = (settings[name].scoped_configurable_fn() for name in ("output", "start"))
    assert output != start == "runs/multi30k_ende/pair/draft"
  finally:
    gin.clear_config()


@pytest.mark.parametrize(
  "path",
  ["alpha", "beams", "cost", "drafts", "gamma", "learned_drafts", "methods", "table2", "trees"],
)
def test_studies_use_the_draft_of_the_existing_records(path):
  """The default draft of `load_pair` is not the one of these records."""
  (file,) = ROOT.glob(f"experiments/*/{path}.gin")
  try:
    run.parse_gin([str(file)], [], [])
    draft = gin.get_bindings("load.load_pair")["draft"]
    assert pathlib.Path(draft).parts[-2:] == ("multi30k_ende", "draft")
  finally:
    gin.clear_config()


def test_installed_files_name_no_study():
  """The package and its gin files are installed without `experiments`."""
  for path in [*ROOT.glob("specdec_jax/**/*.py"), *ROOT.glob("gin/**/*.gin")]:
    imports = re.findall(r"^(?:from|import|include) '?experiments\b.*", path.read_text(), re.M)
    assert not imports, path


def test_pages_name_existing_files_and_modules():
  changelog = ROOT / "CHANGELOG.md"  # names files that were moved or removed
  for page in [
    *{*ROOT.glob("*.md")} - {changelog},
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("experiments/**/*.md"),
  ]:
    text = page.read_text()
    paths = re.findall(
      r"\b(?:experiments|gin|scripts|tests)/[\w/]+\.(?:gin|py|sh|jsonl?|txt)", text
    )
    paths += [
      f"{module.replace('.', '/')}.py"
      for module in re.findall(r"python -m (experiments\.[\w.]+)", text)
    ]
    for path in paths:
      # Records are written into the folder in which a command runs.
      assert (ROOT / path).exists() or path.endswith(("jsonl", "json")), (page, path)
