"""Tables in Markdown pages, generated from the records that the comment before a table names.

A page contains blocks such as

    <!-- table: 4 experiments/table4/results.jsonl -->
    ...
    <!-- end of table -->

The text between the two comments is the named table of the named records. It is never edited by
hand.
"""

import re
from collections.abc import Callable, Sequence

_BLOCK = re.compile(r"(<!-- table: ([^\n]*?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def quoted(page: str, make_table: Callable[[Sequence[str]], str]) -> str:
  """Return a Markdown page in which all generated tables have been regenerated.

  Args:
    page: Markdown with any number of tables, each between two HTML comments.
    make_table: function that takes the words after "table:" in the first comment, and returns the
      text of the new table.
  """

  def replace_block(match: re.Match) -> str:
    return f"{match[1]}{make_table(match[2].split())}{match[3]}"

  return _BLOCK.sub(replace_block, page)
