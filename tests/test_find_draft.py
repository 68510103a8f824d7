"""Test the table of draft models for targets on the Hugging Face Hub."""

import gin
import pytest

from specdec_jax import run
from specdec_jax.commands.find_draft import FAMILIES, drafts_of
from specdec_jax.errors import InputError


@pytest.fixture
def command(capsys):
  """Return a function that runs the command with names, and returns its output."""

  def output(*names):
    assert run.main(["specdec", "find_draft", *names]) == 0
    gin.clear_config()
    return capsys.readouterr().out

  yield output
  gin.clear_config()


def test_models_are_in_order_of_size_and_in_one_family():
  names = [name for models in FAMILIES.values() for name in models]
  assert len({*names}) == len(names)
  for models in FAMILIES.values():
    assert [*models.values()] == sorted(models.values())


@pytest.mark.parametrize(
  "target, drafts",
  [
    ("google/t5gemma-l-l-ul2-it", ["google/t5gemma-s-s-ul2-it", "google/t5gemma-b-b-ul2-it"]),
    ("facebook/m2m100_1.2B", ["facebook/m2m100_418M"]),
    ("google/madlad400-3b-mt", []),
  ],
)
def test_drafts_are_the_smaller_models(target, drafts):
  assert [*drafts_of(target)] == drafts


def test_command_prints_drafts_and_the_command_to_run(command):
  target = "facebook/nllb-200-3.3B"
  out = command(target)
  assert "facebook/nllb-200-distilled-1.3B" in out and f"  {target}  " not in out
  assert f"specdec speedup --target {target} --draft facebook/nllb-200-distilled-600M" in out
  out = command("google/byt5-small")
  assert "No smaller model" in out and "--draft" not in out and "prompt_lookup.gin" in out


def test_command_without_names_lists_all_families(command):
  out = command()
  assert all(f"{family}:\n" in out for family in FAMILIES)


def test_unknown_target_is_reported():
  with pytest.raises(InputError, match="'google/flan-t5-xll'; did you mean google/flan-t5-xl"):
    drafts_of("google/flan-t5-xll")
