"""Test that every gin file of a run parses, alone and with the files documented to follow it."""

import copy
import inspect
import pathlib
import re

import gin
import pytest

from specdec_jax import run
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.verify.tokens import TokenVerifier
from specdec_jax.errors import InputError
from specdec_jax.pairs import verifier_from

GIN = pathlib.Path(__file__).resolve().parents[1] / "gin"
RUNS = sorted(path.stem for path in (GIN / "runs").glob("*.gin"))
KINDS = ("runs", "models", "tasks", "drafts", "recipes")
# Runs that take no pair of models.
WITHOUT_PAIR = {
  "data",
  "find_draft",
  *(name for name in RUNS if name.startswith("train_")),
}
WITH_PAIR = [name for name in RUNS if name not in WITHOUT_PAIR]
# test_tasks.py tests the tasks of seqio, whose module reads the environment when it is imported.
AFTER = [
  ("models/gpt_like",),
  ("models/gpt2",),
  ("models/random",),
  ("tasks/articles", "models/random"),
  ("models/t5_1_1",),
  ("tasks/editing", "drafts/aggressive"),
  ("tasks/summaries",),
  ("models/random", "models/sharded"),
  ("verifiers/blocks",),
  ("verifiers/gumbel",),
  ("drafts/cascade",),
  ("drafts/prompt_lookup",),
  ("drafts/prompt_lookup_and_model",),
  ("drafts/prompt_lookup_to_the_end",),
  ("drafts/hierarchical",),
  ("drafts/layer_skip", "verifiers/blocks"),
  ("drafts/lookahead",),
  ("drafts/ngrams",),
  ("drafts/draft_sampling",),
  ("models/random", "drafts/random_hierarchical"),
  ("models/random", "drafts/layer_skip"),
  ("models/random", "drafts/random_speculator"),
  ("drafts/speculator",),
  ("drafts/recycling",),
  ("drafts/retrieval",),
  ("drafts/stopping",),
  ("drafts/prompt_lookup_or_ngrams",),
  ("drafts/uniform", "verifiers/blocks"),
  ("models/gpt_like", "verifiers/blocks"),
]


def parse(*names: str) -> None:
  """Parse the files as a run does and check that no reference names an abstract class."""
  try:
    run.parse_gin([str(GIN / f"{name}.gin") for name in names], [], [])
    for reference in gin.config.iterate_references(gin.config._CONFIG):
      assert not inspect.isabstract(reference.configurable.wrapped), reference
  finally:
    gin.clear_config()


@pytest.mark.parametrize("name", ["quickstart", *(f"runs/{name}" for name in RUNS)])
def test_run_parses(name):
  parse(name)


@pytest.mark.parametrize(
  "step, task",
  [*((step, "editing") for step in ("vocabulary", "target", "draft")), ("target", "summaries")],
)
def test_training_runs_parse_with_the_tasks_of_english(step, task):
  files = f"runs/train_{step}", f"tasks/train_{task}"
  parse(*files)
  values = [value_of(name, *files) for name in ("DATA", "PAIR_TARGET")]
  assert values == [f"runs/{task}/data", f"runs/{task}/pair/target"]


@pytest.mark.parametrize("after", AFTER, ids="+".join)
def test_runs_parse_with_files_of_models_tasks_and_drafts(after):
  for name in WITH_PAIR:
    # These read their own texts, not those of a task.
    if name in ("translate", "generate", "serve") and any(
      other.startswith("tasks/") for other in after
    ):
      continue
    parse(f"runs/{name}", *after)


@pytest.mark.parametrize(
  "after",
  [
    ("drafts/prompt_lookup_and_model", "verifiers/merging"),
    ("drafts/suffix_decoding", "verifiers/k_seq"),
    ("verifiers/typical",),
    ("verifiers/top_beta",),
  ],
  ids="+".join,
)
def test_a_run_parses_with_each_verifier(after):
  parse("runs/speedup", *after)


def macros(path: pathlib.Path) -> dict[str, str]:
  """Return the values of the macros that a gin file and its included files bind, by name."""
  text = path.read_text()
  values = {}
  for name in re.findall(r"^include '(.*)'", text, re.MULTILINE):
    values |= macros(GIN.parent / name)
  return values | dict(re.findall(r"^([A-Z]\w*) = (.*)", text, re.MULTILINE))


@pytest.mark.parametrize(
  "path",
  [
    GIN / "quickstart.gin",
    *(path for kind in KINDS for path in sorted((GIN / kind).glob("*.gin"))),
  ],
  ids=lambda path: path.stem,
)
def test_header_names_existing_macros(path):
  header = path.read_text().partition("\nfrom ")[0].partition("\ninclude ")[0]
  values = macros(path)

  def listed(heading):
    return re.findall(r"\b[A-Z]\w+", "".join(re.findall(rf"# {heading}: ([^.]*)\.", header)))

  required = [name for name, value in values.items() if value == "%gin.REQUIRED"]
  assert sorted(listed("Required to be set")) == sorted(required)
  assert {*listed("Commonly overridden")} <= values.keys()
  assert listed("Commonly overridden") or {"WORK_DIR", "DATA"} & values.keys() or not values


def value_of(macro: str, *names: str, bindings: tuple[str, ...] = ()):
  """Return the value of a macro in a run that reads the given gin files."""
  try:
    run.parse_gin([str(GIN / f"{name}.gin") for name in names], bindings, [])
    return copy.deepcopy(gin.query_parameter(f"%{macro}"))
  finally:
    gin.clear_config()


DEFAULTS = [
  (macro, name)
  for name in RUNS
  for macro, value in re.findall(r"^(\w+) = (.*)", (GIN / f"runs/{name}.gin").read_text(), re.M)
  if value.endswith("gin_files.default()")
]


@pytest.mark.parametrize("macro, name", DEFAULTS)
def test_missing_default_text_falls_back_to_a_bundled_text(
  macro, name, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  path = pathlib.Path(value_of(macro, f"runs/{name}"))
  texts = path.read_text(encoding="utf-8").splitlines()
  assert path.parent == GIN / "tasks" and len(texts) == 300
  note = capsys.readouterr().err
  assert note.count("\n") == 1 and str(path) in note and f"--gin.{macro}=" in note
  assert "or run specdec data multi30k" in note


@pytest.mark.parametrize("name, count", [("check", 200), ("speedup", 300)])
def test_runs_read_the_bundled_captions(name, count, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  texts = (GIN / "tasks/captions.en.txt").read_text(encoding="utf-8").splitlines()
  assert value_of("TEXTS", f"runs/{name}") == texts[:count]


def test_given_file_that_is_missing_is_an_error():
  with pytest.raises(InputError, match="There is no text file at gone.txt"):
    value_of("TEXTS", "runs/speedup", bindings=("INPUT = 'gone.txt'",))


def test_bundled_captions_have_a_translation_each():
  sources, targets = (
    (GIN / f"tasks/captions.{side}.txt").read_text(encoding="utf-8").splitlines()
    for side in ("en", "de")
  )
  assert len(sources) == len(targets) == len({*sources}) == len({*targets}) == 300


@pytest.mark.parametrize("macro, name", [("DATA", "train_target")])
def test_missing_default_is_reported_with_the_name_of_its_macro(macro, name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(InputError, match=f"the default of {macro}, does not exist; set {macro} to "):
    value_of(macro, f"runs/{name}")


def test_data_folder_of_the_environment_is_used(tmp_path, monkeypatch):
  monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "texts"))
  path = tmp_path / "texts" / "multi30k" / "test_2016_flickr.en.gz"
  with pytest.raises(
    InputError, match=f"{path.parent}, the default of DATA, .* specdec data multi"
  ):
    value_of("DATA", "runs/train_target")
  path.parent.mkdir(parents=True)
  path.touch()
  assert value_of("INPUT", "runs/speedup") == str(path)


@pytest.mark.parametrize(
  "names, task",
  [
    (("runs/speedup", "tasks/articles", "drafts/ngrams"), "articles"),
    (("runs/speedup", "drafts/retrieval", "tasks/articles"), "articles"),
  ],
  ids=str,
)
def test_text_of_another_task_is_rejected_for_ngrams(names, task, tmp_path, monkeypatch):
  text = tmp_path / "data" / "multi30k" / "train.de.gz"
  text.parent.mkdir(parents=True)
  text.touch()
  monkeypatch.chdir(tmp_path)
  with pytest.raises(InputError, match=f"TARGET_TEXT is .* of this run is {task}; set TARGET_TEXT"):
    value_of("TARGET_TEXT", *names)
  assert value_of("TARGET_TEXT", *names, bindings=("TARGET_TEXT = 'own.txt'",)) == "own.txt"
  assert value_of("TARGET_TEXT", names[0], "drafts/ngrams", "tasks/multi30k")[-11:] == "train.de.gz"


def test_exactness_checker_samples_at_a_temperature_other_than_1():
  """At temperature 1, a q that ignores the temperature would pass."""
  try:
    run.parse_gin([str(GIN / "runs/check.gin")], [], [])
    samplings = [
      reference.scoped_configurable_fn() for reference in gin.query_parameter("%SAMPLINGS")
    ]
  finally:
    gin.clear_config()
  assert not {sampling.temperature for sampling in samplings} <= {0, 1}


def test_verifier_bound_by_gin_creates_an_instance_of_the_original_class():
  """Gin binds a subclass in place of a class, as for VERIFIER of gin/t5x/infer.gin."""
  text = "from __gin__ import dynamic_registration\nfrom specdec_jax.core.verify import tokens\n"
  try:
    gin.parse_config(text + "VERIFIER = @tokens.TokenVerifier")
    verifier = gin.query_parameter("%VERIFIER").scoped_configurable_fn
  finally:
    gin.clear_config()
  assert verifier is not TokenVerifier
  assert (
    verifier_from(verifier, Sampling())
    == TokenVerifier(Sampling())
    != verifier_from(verifier, Sampling(), 0.5)
  )


def test_parse_raises_for_an_invalid_file(tmp_path):
  path = tmp_path / "bad.gin"
  path.write_text(
    "from __gin__ import dynamic_registration\ninclude 'gin/runs/speedup.gin'\n"
    "SAMPLINGS = [@argmax/sampling.Sampling()]\n"
  )
  with pytest.raises(Exception, match="not provided by an import"):
    parse(str(path.with_suffix("")))


@pytest.mark.parametrize("name", ["check", "speedup"])
def test_measuring_runs_use_the_draft_of_the_existing_records(name):
  """The default draft of `load_pair` is that of the quickstart, not the one of these records."""
  try:
    run.parse_gin([str(GIN / "runs" / f"{name}.gin")], [], [])
    draft = gin.query_parameter("pairs.load_pair.draft")
    assert pathlib.Path(draft.scoped_configurable_fn()).parts[-2:] == ("multi30k_ende", "draft")
  finally:
    gin.clear_config()
