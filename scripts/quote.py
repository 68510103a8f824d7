"""Write the tables of all pages anew, from the records that each of them names.

python scripts/quote.py            # README.md and experiments/
python scripts/quote.py --check    # only say which pages are not what their records say
"""

import argparse
import pathlib
from collections.abc import Iterator, Sequence

from specdec_jax.commands.tabulate import CHECKOUT, named_table
from specdec_jax.reporting.formats import render
from specdec_jax.reporting.pages import quoted
from specdec_jax.writing import written


def pages() -> list[pathlib.Path]:
  return [CHECKOUT / "README.md", *sorted(CHECKOUT.glob("experiments/**/*.md"))]


def outdated() -> Iterator[tuple[pathlib.Path, str]]:
  """Pages that are not what their records say, and what they should be."""
  for path in pages():
    page = path.read_text(encoding="utf-8")
    if (anew := quoted(page, _markdown)) != page:
      yield path, anew


def _markdown(words: Sequence[str]) -> str:
  name, *files = words
  return render(named_table(name, [CHECKOUT / file for file in files]), "markdown")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
  parser.add_argument("--check", action="store_true", help="change nothing; status 1 if any would")
  check, changed = parser.parse_args().check, [*outdated()]
  for path, anew in changed:
    print(path.relative_to(CHECKOUT))
    if not check:
      with written(path) as file:
        file.write(anew)
  parser.exit(check and bool(changed))


if __name__ == "__main__":
  main()
