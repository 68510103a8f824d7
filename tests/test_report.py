"""Test that HTML reports have the values of records and rounds, and texts cannot inject markup."""

import html.parser
import re

import pytest
import tiny_pair
from test_record_tables import OTHER, RECORD
from test_records import RECORD as SETTING

from experiments.drafts.drafts import drafts_report
from experiments.trees.trees import lengths_report
from specdec_jax.commands import speedup
from specdec_jax.commands.quickstart import quickstart
from specdec_jax.core.rounds import Branch, Example, Round
from specdec_jax.generate import GenerateCall
from specdec_jax.measure import records, speed
from specdec_jax.measure.report import report
from specdec_jax.measure.tables import SPEED, legend

pytestmark = pytest.mark.slow

SWEEP = [
  RECORD.replace(
    gamma=gamma,
    speedup=speedup,
    predicted_theorem8=theorem8,
    predicted_finite_length=predicted,
  )
  for gamma, speedup, theorem8, predicted in [
    (7, 1.49, 3.57, 1.57),
    (2, 1.21, 2.25, 1.24),
    (3, 1.45, 2.89, 1.54),
  ]
]
ROUNDS = (
  Round((" ein", " Mann"), " Hund", (), " läuft"),
  Round((), " der", (" rot", "en"), " im"),
  Round((" Park", "."), None, (" der",), None),
)
EXAMPLE = Example("a man runs", "ein Mann läuft im Park.", 0.0, 3, ROUNDS)


class Node:
  def __init__(self, name, attributes=()):
    self.name, self.attributes, self.children = name, dict(attributes), []

  @property
  def text(self):
    return "".join(c if isinstance(c, str) else c.text for c in self.children)

  def all(self, name=None, class_=None, **attributes):
    """Return the descendants with this name, class and attributes in document order."""
    matches = []
    for child in self.children:
      if isinstance(child, str):
        continue
      classes = (child.attributes.get("class") or "").split()
      if (
        name in (None, child.name)
        and (class_ is None or class_ in classes)
        and attributes.items() <= child.attributes.items()
      ):
        matches.append(child)
      matches += child.all(name, class_, **attributes)
    return matches


class Parser(html.parser.HTMLParser):
  """Parser of a page into a tree; it fails if an element is not closed in the right place."""

  def __init__(self, page):
    super().__init__()
    self.open = [Node("document")]
    self.feed(page)
    self.close()
    assert len(self.open) == 1, f"{self.open[-1].name} is not closed"

  def handle_starttag(self, tag, attrs):
    assert len(dict(attrs)) == len(attrs), f"{tag} has an attribute twice"
    node = Node(tag, attrs)
    self.open[-1].children.append(node)
    if tag != "meta":
      self.open.append(node)

  def handle_endtag(self, tag):
    assert self.open.pop().name == tag

  def handle_data(self, data):
    self.open[-1].children.append(data)


def parsed(records, examples=(), title="a title"):
  return Parser(report(records, examples, title)).open[0]


def rounds_shown(page):
  """Return the tokens of each round of the page by kind, without their marks."""
  rounds = []
  for item in page.all(class_="rounds")[0].all("li"):
    tokens = {
      kind: tuple(t.children[-1] for t in item.all("span", kind))
      for kind in ("accepted", "rejected", "unverified", "target")
    }
    rounds.append(tokens)
  return rounds


# The page as a whole.


def test_page_is_self_contained():
  page = report([*SWEEP, OTHER], [EXAMPLE], "a title")
  tree = Parser(page).open[0]
  assert {"head", "main", "table", "figure", "article"} <= {node.name for node in tree.all()}
  for node in tree.all():
    assert not {"src", "href", "action", "srcset"} & node.attributes.keys()
  assert not any(word in page for word in ("://", "url(", "@import", "import(", "fetch("))
  ids = [node.attributes["id"] for node in tree.all() if "id" in node.attributes]
  assert len(ids) == len(set(ids))
  assert tree.all("title")[0].text == tree.all("h1")[0].text == "a title"
  assert "some captions, t, d, 24 texts, batch 1, float32" in tree.all("p")[0].text
  for words in ("TokenVerifier", "chain", "seed 0"):
    assert words in tree.all("footer")[0].text


HOSTILE = """</script><script>alert('"1"')</script><img src=x onerror=a> $title &lt; </select>"""


def test_texts_are_escaped():
  names = ("task", "target", "draft", "dtype", "device_kind", "baseline")
  record = RECORD.replace(**dict.fromkeys(names, HOSTILE))
  rounds = (Round((f" {HOSTILE}",), HOSTILE, (HOSTILE,), HOSTILE),)
  page = parsed([record, RECORD], [Example(HOSTILE, HOSTILE, 0.0, 1, rounds)], HOSTILE)
  plain = parsed([record, RECORD], [Example("a", "b", 0.0, 3, ROUNDS[:1])])
  assert [n.text for n in page.all("script")] == [n.text for n in plain.all("script")]
  assert not page.all("img")
  assert not any(name.startswith("on") for n in page.all() for name in n.attributes)
  for name in ("title", "h1", "td", "article"):
    assert HOSTILE in page.all(name)[0].text
  assert HOSTILE[:50] in page.all("option")[0].text
  (shown,) = rounds_shown(page)
  assert set(sum(shown.values(), ())) == {HOSTILE}


@pytest.mark.parametrize(
  "records, sentences",
  [
    (
      [*SWEEP, OTHER],
      [
        ("Temperature 0", "1.49×", "gamma 7", "identical"),
        ("Temperature 1", "1.68×", "gamma 3", "samples are not compared"),
      ],
    ),
    ([SWEEP[0], SWEEP[1].replace(identical=False)], [("1.49×", "DIFFERS", "at gamma 2.")]),
    ([RECORD.replace(speedup=0.83)], [("0.83×", "slower")]),
    ([RECORD.replace(speedup=None)], [("no speedup",)]),
    ([RECORD.replace(identical=None)], [("not every output was compared",)]),
  ],
)
def test_result_is_a_sentence(records, sentences):
  shown = [node.text for node in parsed(records).all(class_="results")[0].all("li")]
  for sentence, words in zip(shown, sentences):
    for word in words:
      assert word in sentence
  assert len(shown) == len({r.settings.temperature for r in records})


def test_overlapping_ranges_are_reported_with_the_best_gamma():
  """Unlike with gamma 6, one repeat with gamma 4 is faster than the slowest with the best gamma."""
  ranges = {4: (1.70, 1.82, 1.86), 5: (1.80, 1.83, 1.88), 6: (1.5, 1.6, 1.7)}
  records = [
    RECORD.replace(gamma=gamma, speedup_low=low, speedup=median, speedup_high=high)
    for gamma, (low, median, high) in ranges.items()
  ]
  (sentence,) = (n.text for n in parsed(records).all(class_="results")[0].all("li"))
  assert "1.83×" in sentence
  assert "(gamma 5 [1.80,1.88]; the range of gamma 4 overlaps)" in sentence


# The table.


def cells(page):
  (body,) = page.all("section")[0].all("tbody")
  return [[c.text for c in row.all("td")] for row in body.all("tr")]


def headings(page):
  return [n.text for n in page.all("section")[0].all("th")]


def test_row_has_the_values_of_its_record():
  rates = dict(speculative_tokens_per_s=999.6, baseline_tokens_per_s=486.1)
  quality = dict(metric="BLEU", quality=36.0, baseline_quality=37.41)
  # Ranges of old records may not contain the speedup.
  ranged = RECORD.replace(speedup_low=2.0, speedup_high=2.05, **rates, **quality)
  page = parsed([OTHER, ranged])
  names = ["temperature", "gamma", "speedup", "identical", "quality", "tokens/s"]
  assert headings(page)[:7] == [*names, "baseline tokens/s"]
  assert {*headings(page)[7:]} < {column.heading for column in SPEED}
  others = ["0.81 [0.79,0.84]", "0.061", "1.38", "2.99", "2.15", "2.50"]
  row = ["0", "5", "2.06 [2.00,2.06]", "yes", "BLEU 36.0 (autoregressive 37.4)", "1000", "486"]
  assert cells(page)[1] == row + others
  for name, meaning in legend(SPEED[2:]).items():
    assert f"{name}: {meaning}" in page.text


def test_values_that_were_not_measured_are_dashes():
  page = parsed([SETTING], [Example("", "", 0.0, 3, ())])
  assert cells(page) == [["0", "5", *["-"] * 10]]
  measured = [*vars(RECORD.outputs), *vars(RECORD.times), *vars(RECORD.origin), "task", "repeats"]
  for field in measured:
    page = parsed([RECORD.replace(**{field: None}), OTHER], [EXAMPLE])
    assert "None" not in page.text and "nan" not in page.text


def test_settings_that_vary_are_columns():
  """A tree is described by the number of its nodes at each depth."""
  tree = RECORD.replace(draft="bigram", tree=(0, 0, 1, 1, 2, 4, 6, 7), repeats=3)
  page = parsed([RECORD, tree])
  assert headings(page)[:3] == ["draft", "repeats", "proposal"]
  proposals = [row[2] for row in cells(page)]
  assert proposals == ["chain", "tree of 9 nodes (1-2-3-1-1-1)"]
  names = [n.text for figure in page.all("figure") for n in figure.all("h3")]
  assert names[0].startswith("Temperature 0, d, ") and names[1].startswith("Temperature 0, bigram")
  assert "d (simulated)" in parsed([RECORD.replace(simulated=True)]).all("p")[0].text


# The charts.


def bars(figure):
  """Return the label, the width in per cent and the text of each bar."""
  rows = ((row.all("th")[0], *row.all("td")) for row in figure.all("tr"))
  return [
    (label.text, float(re.search(r"[\d.]+", bar.all("div")[0].attributes["style"])[0]), text.text)
    for label, bar, text in rows
  ]


def mark(figure):
  return float(re.search(r"[\d.]+", figure.all("table")[0].attributes["style"])[0])


def test_bars_are_as_long_as_their_values_in_all_charts_of_a_section():
  page = parsed([*SWEEP, OTHER.replace(speedup=5.5)])
  one, other = page.all("section")[1].all("figure")
  shown = bars(one)
  assert [label for label, *_ in shown] == [
    f"gamma {gamma}, {name}"
    for gamma in (2, 3, 7)
    for name in ("Theorem 8", "predicted", "measured")
  ]
  assert [text for *_, text in shown[6:]] == ["3.57", "1.57", "1.49"]
  for figure in one, other:
    for _, width, text in bars(figure):
      assert width == pytest.approx(100 * float(text) / 5.5, abs=0.15)
    assert mark(figure) == pytest.approx(100 / 5.5, abs=0.06)


def test_acceptance_by_position_is_shown_for_the_highest_gamma():
  longest = RECORD.replace(
    gamma=3, rounds=120, acceptance_by_position=[0.5, 0.75, None], acceptance_rate=0.6
  )
  shorter = RECORD.replace(gamma=2, acceptance_by_position=[0.1, 0.1])
  (figure,) = parsed([longest, shorter]).all("section")[2].all("figure")
  # A rate of few draft tokens has their number.
  texts = [("draft token 1", 50, "50%"), ("draft token 2", 75, "75% of 60")]
  assert bars(figure) == [*texts, ("draft token 3", 0, "- of 45")]
  assert mark(figure) == 60
  assert "gamma 3, 120 rounds, all: 60%" in figure.all("h3")[0].text


def test_pages_of_studies_have_charts_and_tables():
  length = RECORD.replace(tokens_per_round_low=2.4, tokens_per_round_high=2.6)
  tree = length.replace(tree=(0, 0, 1, 1, 2, 4), gamma=3, tokens_per_round=2.75)
  page = Parser(lengths_report([length, tree], [EXAMPLE], "lengths")).open[0]
  labels = [(label, text) for label, _, text in bars(page.all("figure")[0])]
  assert labels == [("chain, 6 nodes, Token", "2.50"), ("tree, 7 nodes, Token", "2.75")]
  assert "over chain" in page.text and page.all("article")
  page = Parser(drafts_report([RECORD, RECORD.replace(draft="e", speedup=2.5)], "drafts")).open[0]
  assert [(label, text) for label, _, text in bars(page.all("figure")[0])] == [
    ("e", "2.50"),
    ("d", "2.06"),
  ]


# The rounds.


def test_page_has_every_round():
  """All rounds are visible without JavaScript. Only the controls that need it are hidden."""
  page = parsed([RECORD], [EXAMPLE])
  assert rounds_shown(page) == [
    dict(accepted=("ein", "Mann"), rejected=("Hund",), unverified=(), target=("läuft",)),
    dict(accepted=(), rejected=("der",), unverified=("rot", "en"), target=("im",)),
    dict(accepted=("Park", "."), rejected=(), unverified=("der",), target=()),
  ]
  assert [n.attributes["class"] for n in page.all() if "hidden" in n.attributes] == ["controls"]


TREE_ROUND = Round(
  (" ein", " Hund"),
  None,
  (),
  " läuft",
  (Branch(1, " Mann", (" s", "itzt")), Branch(0, None, (" der",))),
)


def test_tree_has_a_column_for_each_depth():
  nothing = Round((), None, (), " im", (Branch(0, " am", ()), Branch(0, " Park", (".",))))
  example = Example("a dog runs", "ein Hund läuft im", 0.0, 3, (TREE_ROUND, nothing), 6)
  page = parsed([RECORD], [example])
  assert "a tree of 6 nodes" in page.all("article")[0].text and "In a tree" in page.text
  lines = []
  for table in page.all("table", "tree"):
    lines.append([])
    for row in table.all("tr"):
      first, *_ = row.all("td")
      skipped = [None] * int(first.attributes.get("colspan", 0))
      kinds = [t.attributes["class"].split()[1] for t in row.all("span", "token")]
      lines[-1].append(skipped + [*zip(kinds, [t.children[-1] for t in row.all("span", "token")])])
  assert lines == [
    [
      [("accepted", "ein"), ("accepted", "Hund"), ("target", "läuft")],
      [None, ("rejected", "Mann"), ("unverified", "s"), ("unverified", "itzt")],
      [("unverified", "der")],
    ],
    [[("target", "im")], [("rejected", "am")], [("rejected", "Park"), ("unverified", ".")]],
  ]
  assert [tokens["target"] for tokens in rounds_shown(page)] == [("läuft",), ("im",)]
  page = parsed([RECORD])
  assert "In a tree" not in page.text and not page.all(id="stepper")


def test_each_round_shows_the_text_so_far():
  items = parsed([RECORD], [EXAMPLE]).all(class_="rounds")[0].all("li")
  texts = [item.all("p")[1].text for item in items]
  assert texts == [" ein Mann läuft", " ein Mann läuft im", " ein Mann läuft im Park."]
  assert [item.all(class_="now")[0].text for item in items] == ["ein Mann läuft", "im", "Park."]
  for item, count in zip(items, (3, 4, 6)):
    assert f"{count} tokens so far" in item.text
  assert "Round 2 of 3" in items[1].text and "2 target passes" in items[1].text


# Reports of runs.

TEXTS = [tiny_pair.SENTENCES[i] for i in (0, 14, 60)]
SETTINGS = dict(gammas=[2, 3], temperatures=(0.0, 1.0), max_new_tokens=10, repeats=1)


@pytest.fixture
def calls(monkeypatch):
  """Replace measurements by invented numbers.

  Returns:
    The settings measured, and (temperature, number of texts) of each decode call.
  """
  measured, decoded = [], []

  def invent(pair, prompts, settings, wanted, speed):
    for setting in wanted:
      measured.append(setting)
      yield setting.replace(speedup=1 + setting.settings.gamma / 10)

  def decode(call, sources, *args, **how):
    decoded.append((call.config.temperature, len(sources)))
    return own_decode(call, sources, *args, **how)

  own_decode = GenerateCall.decode
  monkeypatch.setattr(speed, "measure_speed", lambda *args: None)
  monkeypatch.setattr(speed, "_records", invent)
  monkeypatch.setattr(GenerateCall, "decode", decode)
  return measured, decoded


def read_report(folder):
  return Parser((folder / "report.html").read_text(encoding="utf-8")).open[0]


def articles(page):
  """Return the source, the output and the cost of each text."""
  return [[n.text for n in (*a.all("h3"), *a.all("p")[:2])] for a in page.all("article")]


def rejected(page) -> int:
  return sum(len(article.all("span", "rejected")) for article in page.all("article"))


def test_run_writes_a_report_of_its_records_and_first_texts(tmp_path, calls, capsys):
  speedup.speedup(tiny_pair.pair(), TEXTS, str(tmp_path), **SETTINGS, report_examples=2)
  assert str(tmp_path / "report.html") in capsys.readouterr().out.replace("\n", "")
  page = read_report(tmp_path)
  assert [(row[1], row[2].split()[0]) for row in cells(page)] == [("2", "1.20"), ("3", "1.30")] * 2
  sources, outputs, costs = zip(*articles(page))
  assert sources == (*TEXTS[:2], *TEXTS[:2]) and rejected(page)
  final_texts = [rounds.all("li")[-1].all("p")[1].text for rounds in page.all(class_="rounds")]
  assert [*outputs] == [  # a vocabulary writes unknown pieces differently
    text.removesuffix("</s>").replace("<unk>", " ⁇ ").strip() for text in final_texts
  ]
  assert ["temperature 0, gamma 3" in cost for cost in costs] == [True, True, False, False]
  assert ["temperature 1, gamma 3" in cost for cost in costs] == [False, False, True, True]


def test_resumed_run_reports_all_records(tmp_path, calls):
  def run(**changes):
    settings = {**SETTINGS, "temperatures": [0.0], **changes}
    speedup.speedup(tiny_pair.pair(), TEXTS, str(tmp_path), **settings)

  run()
  first = (tmp_path / "report.html").read_text(encoding="utf-8")
  (tmp_path / "report.html").unlink()
  run()
  assert (tmp_path / "report.html").read_text(encoding="utf-8") == first
  assert len(articles(read_report(tmp_path))) == len(TEXTS)  # fewer than report_examples
  run(gammas=[5], report_examples=-1)
  assert [row[1] for row in cells(read_report(tmp_path))] == ["2", "3", "5"]
  assert not articles(read_report(tmp_path))
  assert len(calls[0]) == 3 == len(records.read(tmp_path / "results.jsonl"))


@pytest.mark.parametrize("differs", [False, True])
def test_quickstart_prints_and_reports_the_same_decoded_texts(
  tmp_path, calls, capsys, monkeypatch, differs
):
  def timed(calls, repeats):  # [the baseline's, speculative decoding's]; 0.2 and 0.1 s per text
    results = [[call() for call in each] for each in calls]
    assert len(results[0]) == len(TEXTS)
    results[1][0] = results[1][0]._replace(tokens=results[1][0].tokens + differs)
    return ([0.2] * len(TEXTS), [0.1] * len(TEXTS)), results

  monkeypatch.setattr("specdec_jax.commands.quickstart.interleaved_medians", timed)
  quickstart(tiny_pair.pair(), TEXTS, str(tmp_path), **SETTINGS, show_rounds=1, report_examples=2)
  assert calls[1] == [(0.0, 3), (0.0, 2), (1.0, 2)]
  printed = capsys.readouterr().out
  output_text = " ".join(printed.split())
  first = "2.0 times as fast as autoregressive decoding (gamma 3, argmax). The outputs "
  first += f"{'DIFFER' if differs else 'are identical'}, token for token."
  assert output_text.index(first) < output_text.index("cost ratio")
  assert printed.splitlines()[-2:] == [
    "Temperature 0: 1.30× the speed of autoregressive decoding at best (gamma 3); not every output "
    "was compared with autoregressive decoding.",
    "Temperature 1: 1.30× the speed of autoregressive decoding at best (gamma 3); samples are not "
    "compared token for token.",
  ]
  for part in ("unaccounted", "of bandwidth"):  # on the page
    assert part not in printed
  shown = articles(read_report(tmp_path))
  assert [source for source, *_ in shown] == [*TEXTS[:2], *TEXTS[:2]]
  for source, output, cost in shown[:2]:
    assert " ".join(source.split()) in output_text
    assert " ".join(output.split()) in output_text
    assert (cost.split(";")[0] in output_text) == (source == TEXTS[0])
