"""Draft models for targets on the Hugging Face Hub, as `specdec find_draft google/flan-t5-xl`.

The table is part of this module, so no network is needed.
"""

import difflib
from collections.abc import Mapping, Sequence

from specdec_jax.errors import InputError

_T5GEMMA = {
  "s-s": 313,
  "b-b": 591,
  "l-l": 1242,
  "ml-ml": 2200,
  "xl-xl": 3767,
  "2b-2b": 5597,
  "9b-2b": 12292,
  "9b-9b": 20333,
}
# Models by family, with their number of parameters in millions. The models of a family share a
# vocabulary and were trained on the same tasks, so that a smaller one can draft for a larger one.
FAMILIES: dict[str, dict[str, int]] = {
  "T5 1.0": {
    "google-t5/t5-small": 61,
    "google-t5/t5-base": 223,
    "google-t5/t5-large": 738,
    "google-t5/t5-3b": 2852,
    "google-t5/t5-11b": 11307,
  },
  "T5 1.1": {
    "google/t5-v1_1-small": 77,
    "google/t5-v1_1-base": 248,
    "google/t5-v1_1-large": 783,
    "google/t5-v1_1-xl": 2850,
    "google/t5-v1_1-xxl": 11135,
  },
  "Flan-T5 and Flan-UL2": {
    "google/flan-t5-small": 77,
    "MBZUAI/LaMini-Flan-T5-77M": 77,
    "google/flan-t5-base": 248,
    "MBZUAI/LaMini-Flan-T5-248M": 248,
    "google/flan-t5-large": 783,
    "MBZUAI/LaMini-Flan-T5-783M": 783,
    "google/flan-t5-xl": 2850,
    "google/flan-t5-xxl": 11135,
    "google/flan-ul2": 19460,
  },
  "mT5": {
    "google/mt5-small": 300,
    "google/mt5-base": 582,
    "google/mt5-large": 1230,
    "google/mt5-xl": 3743,
    "google/mt5-xxl": 12921,
  },
  "mT0 and Aya": {
    "bigscience/mt0-small": 300,
    "bigscience/mt0-base": 582,
    "bigscience/mt0-large": 1230,
    "bigscience/mt0-xl": 3743,
    "bigscience/mt0-xxl": 12921,
    "CohereLabs/aya-101": 12921,
  },
  "umT5": {
    "google/umt5-small": 307,
    "google/umt5-base": 592,
    "google/umt5-xl": 3768,
    "google/umt5-xxl": 12973,
  },
  "ByT5": {
    "google/byt5-small": 300,
    "google/byt5-base": 582,
    "google/byt5-large": 1228,
    "google/byt5-xl": 3738,
    "google/byt5-xxl": 12907,
  },
  "CodeT5": {
    "Salesforce/codet5-small": 60,
    "Salesforce/codet5-base": 223,
    "Salesforce/codet5-large": 738,
  },
  "CodeT5+": {"Salesforce/codet5p-220m": 223, "Salesforce/codet5p-770m": 738},
  "MADLAD-400": {
    "google/madlad400-3b-mt": 2940,
    "google/madlad400-7b-mt": 8297,
    "google/madlad400-10b-mt": 10713,
  },
  **{
    f"T5Gemma ({kind})": {f"google/t5gemma-{size}-{kind}": n for size, n in _T5GEMMA.items()}
    for kind in ("ul2", "prefixlm", "ul2-it", "prefixlm-it")
  },
  "BART for CNN/DM": {
    "sshleifer/distilbart-cnn-6-6": 230,
    "sshleifer/distilbart-cnn-12-3": 255,
    "sshleifer/distilbart-cnn-12-6": 306,
    "facebook/bart-large-cnn": 406,
  },
  "BART for XSum": {
    "sshleifer/distilbart-xsum-12-1": 222,
    "sshleifer/distilbart-xsum-6-6": 230,
    "sshleifer/distilbart-xsum-12-3": 255,
    "sshleifer/distilbart-xsum-9-6": 268,
    "sshleifer/distilbart-xsum-12-6": 306,
    "facebook/bart-large-xsum": 406,
  },
  "PEGASUS for CNN/DM": {
    "sshleifer/distill-pegasus-cnn-16-4": 369,
    "google/pegasus-cnn_dailymail": 571,
  },
  "PEGASUS for XSum": {
    "sshleifer/distill-pegasus-xsum-16-4": 369,
    "sshleifer/distill-pegasus-xsum-16-8": 436,
    "google/pegasus-xsum": 570,
  },
  "M2M100": {"facebook/m2m100_418M": 484, "facebook/m2m100_1.2B": 1239},
  "NLLB-200": {
    "facebook/nllb-200-distilled-600M": 615,
    "facebook/nllb-200-distilled-1.3B": 1371,
    "facebook/nllb-200-1.3B": 1371,
    "facebook/nllb-200-3.3B": 3347,
  },
}
_OTHER_DRAFTS = """\
Prompt lookup, which needs no second model:
  specdec speedup --gin_file=gin/drafts/prompt_lookup.gin \\
    --gin_bindings='pairs.load_pair.target = "{target}"' --input file.txt
docs/drafts.md describes drafts with another vocabulary, and docs/learned_drafts.md trained heads.
"""


def find_draft(names: Sequence[str] = ()) -> None:
  """Print draft models for targets, or all families if no name is given.

  Args:
    names: names of targets on the Hugging Face Hub.

  Raises:
    InputError: a name is not in the table.
  """
  if not names:
    for family, models in FAMILIES.items():
      print(f"{family}:")
      _print_models(models)
    return
  found = [drafts_of(name) for name in names]
  for name, drafts in zip(names, found, strict=True):
    print(f"Drafts for {name}, the smallest first:" if drafts else f"No smaller model than {name}.")
    _print_models(drafts)
    if drafts:
      print(f"  specdec speedup --target {name} --draft {next(iter(drafts))} --input file.txt")
      print("Which draft is the fastest depends on your texts: measure each of them.")
    print(_OTHER_DRAFTS.format(target=name), end="")


def drafts_of(target: str) -> Mapping[str, int]:
  """Return the smaller models of a target's family, with their parameters in millions.

  Raises:
    InputError: the target is not in the table.
  """
  for models in FAMILIES.values():
    if target in models:
      return {name: size for name, size in models.items() if size < models[target]}
  known = [name for models in FAMILIES.values() for name in models]
  near = difflib.get_close_matches(target, known, 1)
  hint = f"did you mean {near[0]}?" if near else "specdec find_draft lists all models."
  raise InputError(f"No drafts are known for {target!r}; {hint}")


def _print_models(models: Mapping[str, int]) -> None:
  for name, size in models.items():
    print(f"  {name:<40} {size:>6,} million parameters")
