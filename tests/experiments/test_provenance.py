"""Test that each record of `experiments` says with which commit it was measured."""

import functools
import json
import pathlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = {"config.json", "dialogs.jsonl"}  # not records
# Records of changed files, with a "+" after the commit; see experiments/README.md.
UNCOMMITTED = {
  "gpu/compiled_gpu.jsonl",
  "learned_drafts/alpha.jsonl",
  "learned_drafts/features_alpha.jsonl",
  "methods/alpha.jsonl",
  "methods/earlier_outputs.jsonl",
  "trees/coupled.jsonl",
}
NOT_RECORDED = "not recorded"


def records() -> Iterator[tuple[str, dict[str, Any]]]:
  """Yield the file of each record, relative to `experiments`, and its content."""
  for path in sorted((ROOT / "experiments").glob("**/*.json*")):
    if path.name not in DATA:
      text, name = path.read_text(), path.relative_to(ROOT / "experiments").as_posix()
      lines = text.splitlines() if path.suffix == ".jsonl" else [text]
      yield from ((name, json.loads(line)) for line in lines)


def commit_of(record: dict[str, Any]) -> str:
  return record.get("origin", record)["commit"]


@functools.cache
def history() -> list[str]:
  def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout

  if git("rev-parse", "--show-toplevel").strip() != str(ROOT):
    pytest.skip("there is no history: this is not a git clone")
  if git("rev-parse", "--is-shallow-repository").strip() != "false":
    pytest.skip("the clone is shallow, or git cannot read it")
  return git("rev-list", "HEAD").split()


def test_each_record_names_a_commit_or_says_that_it_was_not_recorded():
  assert not [name for name, record in records() if not commit_of(record)]


def test_records_of_uncommitted_code_are_the_known_ones():
  assert {name for name, record in records() if commit_of(record).endswith("+")} == UNCOMMITTED


def test_files_of_uncommitted_code_are_listed_on_the_page():
  page = (ROOT / "experiments/README.md").read_text()
  assert not [name for name in UNCOMMITTED if f"]({name})" not in page]


def test_commits_of_records_are_in_the_history():
  named = {commit_of(record).removesuffix("+"): name for name, record in records()}
  named.pop(NOT_RECORDED, None)
  found = {commit for commit in named if any(each.startswith(commit) for each in history())}
  assert not named.keys() - found, {x: named[x] for x in named.keys() - found}


def test_records_of_batches_have_the_number_of_distinct_texts():
  for name, record in records():
    settings = record.get("settings", record)
    is_decoded = "num_examples" in settings or "texts" in settings or "tokens_per_s" in settings
    if is_decoded and settings.get("batch_size", 1) > 1:
      assert settings["distinct_texts"] >= 1, name
