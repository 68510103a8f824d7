"""Regenerate the tables of all pages from the records that each page names.

python scripts/quote.py            # rewrite README.md, docs/ and experiments/
python scripts/quote.py --check    # list outdated pages without rewriting them

`experiments/lib/pages.py` describes the blocks of a page that are rewritten.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for `experiments`

from experiments.lib.pages import ROOT, outdated
from specdec_jax.core.atomic_files import atomic_write


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--check", action="store_true", help="change nothing; exit with 1 if outdated"
  )
  check, changed = parser.parse_args().check, [*outdated()]
  for path, current in changed:
    print(path.relative_to(ROOT))
    if not check:
      with atomic_write(path) as file:
        file.write(current)
  parser.exit(check and bool(changed))


if __name__ == "__main__":
  main()
