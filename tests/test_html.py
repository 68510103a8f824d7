"""Test that HTML reports have the values of records and rounds, and texts cannot inject markup."""

import dataclasses
import html.parser
import itertools
import re

import numpy as np
import pytest
import tiny_pair
from test_reporting import (
  DER,
  EIN,
  EOS,
  HUND,
  LÄUFT,
  MANN,
  OTHER,
  RECORD,
  ROT,
  STEHT,
  decode_result,
  pieces,
)

from experiments.trees.trees import lengths_report
from specdec_jax.commands import speedup
from specdec_jax.commands.quickstart import quickstart
from specdec_jax.measure import measure as measuring
from specdec_jax.measure import records
from specdec_jax.measure.records import Record
from specdec_jax.measure.reporting import record_charts, speeds
from specdec_jax.measure.reporting.columns import headings, legend
from specdec_jax.measure.reporting.html import report, write_report
from specdec_jax.measure.reporting.rounds import Branch, Round, read_rounds
from specdec_jax.measure.reporting.stepper import Example

pytestmark = pytest.mark.slow

SWEEP = [
  dataclasses.replace(
    RECORD,
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
SAMPLED = dataclasses.replace(OTHER, gamma=7, predicted_measured_cost=None)

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
  page = report([*SWEEP, SAMPLED], [EXAMPLE], "a title")
  tree = Parser(page).open[0]
  assert {"head", "main", "table", "svg", "article"} <= {node.name for node in tree.all()}
  for node in tree.all():
    assert not {"src", "href", "action", "srcset"} & node.attributes.keys()
  styled = [node for node in tree.all() if "style" in node.attributes]
  drawn = [node for drawing in tree.all("svg") for node in drawing.all()]
  assert {*map(id, styled)} <= {*map(id, drawn)}  # matplotlib writes styles, texts cannot
  for node in tree.all():
    assert node.attributes.get("xlink:href", "#").startswith("#")
  remote = page.replace("url(#", "")  # a reference within the page
  assert not any(word in remote for word in ("://", "url(", "@import", "import(", "fetch("))
  ids = [node.attributes["id"] for node in tree.all() if "id" in node.attributes]
  assert len(ids) == len(set(ids))


HOSTILE = """</script><script>alert('"1"')</script><img src=x onerror=a> $title &lt; </select>"""


def test_texts_are_escaped():
  names = {
    name: HOSTILE for name in ("task", "target", "draft", "dtype", "device_kind", "baseline")
  }
  record = dataclasses.replace(RECORD, **names)
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


def test_page_begins_with_the_shared_settings():
  page = parsed([RECORD, OTHER], title="five & six")
  assert page.all("title")[0].text == page.all("h1")[0].text == "five & six"
  settings = page.all("dl")[0].text
  for words in ("some captions", "target" + "t", "draft" + "d", "24", "float32", "x86"):
    assert words in settings


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
    (
      [SWEEP[0], dataclasses.replace(SWEEP[1], identical=False)],
      [("1.49×", "DIFFERS", "at gamma 2.")],
    ),
    ([dataclasses.replace(RECORD, speedup=0.83)], [("0.83×", "slower")]),
    ([dataclasses.replace(RECORD, speedup=None)], [("no speedup",)]),
    ([dataclasses.replace(RECORD, identical=None)], [("not every output was compared",)]),
  ],
)
def test_result_is_a_sentence(records, sentences):
  shown = [node.text for node in parsed(records).all(class_="results")[0].all("li")]
  for sentence, words in zip(shown, sentences):
    for word in words:
      assert word in sentence
  assert len(shown) == len({r.temperature for r in records})


def test_overlapping_ranges_are_reported_with_the_best_gamma():
  """Unlike with gamma 6, one repeat with gamma 4 is faster than the slowest with the best gamma."""
  ranges = {4: (1.70, 1.82, 1.86), 5: (1.80, 1.83, 1.88), 6: (1.5, 1.6, 1.7)}
  records = [
    dataclasses.replace(RECORD, gamma=gamma, speedup_low=low, speedup=median, speedup_high=high)
    for gamma, (low, median, high) in ranges.items()
  ]
  (sentence,) = (n.text for n in parsed(records).all(class_="results")[0].all("li"))
  assert "1.83×" in sentence
  assert "(gamma 5 [1.80,1.88]; the range of gamma 4 overlaps)" in sentence


@pytest.mark.parametrize(
  "low, high, shown",
  [(1.9, 2.0, "2.06 [1.90,2.06]"), (2.06, 2.06, "2.06"), (None, None, "2.06")],
)
def test_range_of_a_speedup_contains_it(low, high, shown):
  """Ranges of old records may not contain the speedup. A single repeat has no range."""
  page = parsed([dataclasses.replace(RECORD, speedup=2.06, speedup_low=low, speedup_high=high)])
  assert cells(page)[0][2] == shown


def y_ticks(figure):
  """Return the value and the height of each label of the y axis."""
  labels = [n for n in figure.all("text") if "anchor: end" in n.attributes["style"]]
  return [(float(n.text), float(n.attributes["y"])) for n in labels]


def test_charts_have_a_common_scale():
  page = parsed([*SWEEP, dataclasses.replace(OTHER, speedup=5.5)])
  levels = [y_ticks(figure) for figure in page.all("figure")[:2]]
  assert levels[0] == levels[1]
  (level, below), (next_level, above) = levels[0][-2:]
  one = paths(page.all("figure")[1], "stroke: var(--ink)")[0][0, 1]
  top = one - (5.5 - 1) * (below - above) / (next_level - level)
  highest = points(page.all("figure")[1], "blue")[:, 1].min()
  assert highest == pytest.approx(top, abs=0.1) and highest > 0


def test_last_record_of_a_setting_is_shown():
  page = parsed([RECORD, dataclasses.replace(RECORD, speedup=9.99)])
  assert "9.99" in page.text and "2.06" not in page.text


# The table.


def cells(page):
  rows = page.all("tbody")
  return [[c.text for c in row.all("td")] for body in rows for row in body.all("tr")]


def test_row_has_the_values_of_its_record():
  rates = dict(speculative_tokens_per_s=999.6, baseline_tokens_per_s=486.1)
  page = parsed([OTHER, dataclasses.replace(RECORD, speedup_low=2.0, speedup_high=2.11, **rates)])
  columns = [n.text for n in page.all("th")]
  assert columns[:6] == ["temperature", "gamma", "speedup", "identical"] + [
    "tokens/s",
    "baseline tokens/s",
  ]
  assert {*columns} == {*headings(speeds.SPEED), "tokens/s", "baseline tokens/s"}
  rates = [f"{rate:.0f}" for rate in (OTHER.speculative_tokens_per_s, OTHER.baseline_tokens_per_s)]
  assert cells(page) == [
    ["1", "3", "1.68", "-", *rates, "0.67 [0.63,0.70]", "0.072", "1.22", "1.91", "1.73", "1.60"],
    ["0", "5", "2.06 [2.00,2.11]", "yes", "1000", "486"]
    + ["0.81 [0.79,0.84]", "0.061", "1.38", "2.99", "2.15", "2.50"],
  ]
  assert all(
    f"{name}: {meaning}" in page.text for name, meaning in legend(speeds.SPEED[2:]).items()
  )


def test_quality_is_a_column_if_it_was_measured():
  same = dataclasses.replace(RECORD, metric="BLEU", quality=37.41, baseline_quality=37.41)
  other = dataclasses.replace(same, gamma=7, quality=36.0)
  page = parsed([same, other])
  assert [row[4] for row in cells(page)] == ["BLEU 37.4", "BLEU 36.0 (autoregressive 37.4)"]
  assert page.all("th")[4].text == "quality"
  assert "quality" in speeds.speed_table([same]).columns
  assert "quality" not in speeds.speed_table([RECORD]).columns


def test_values_that_were_not_measured_are_dashes():
  settings = ("task", "target", "draft", "temperature", "gamma", "batch_size")
  settings += ("platform", "device_kind", "dtype", "seed")
  blank = Record(**{name: getattr(RECORD, name) for name in settings})
  page = parsed([blank], [Example("", "", 0.0, 3, ())])
  assert cells(page) == [["0", "5", *["-"] * 10]]
  assert not page.all("svg")


def drawn_once(draw):
  """Return the function `draw` with a cache, because most pages have the same charts."""
  drawn = {}

  def cached(*args, **kwargs):
    arguments = repr((args, kwargs))
    if arguments not in drawn:
      drawn[arguments] = draw(*args, **kwargs)
    return drawn[arguments]

  return cached


def test_each_missing_value_is_a_dash(monkeypatch):
  for name in ("line_charts", "acceptance_chart"):
    monkeypatch.setattr(record_charts, name, drawn_once(getattr(record_charts, name)))
  for field in dataclasses.fields(Record):
    if field.default is None:
      page = parsed([dataclasses.replace(RECORD, **{field.name: None}), OTHER], [EXAMPLE])
      assert "None" not in page.text and "nan" not in page.text


def test_settings_that_vary_are_columns():
  page = parsed([RECORD, dataclasses.replace(RECORD, draft="bigram", batch_size=8)])
  assert [n.text for n in page.all("th")][:2] == ["draft", "batch"]
  assert [row[:2] for row in cells(page)] == [["d", "1"], ["bigram", "8"]]
  names = [n.text for figure in page.all("figure") for n in figure.all("h3")]
  assert names == ["Temperature 0, draft d, batch 1", "Temperature 0, draft bigram, batch 8"]


def test_simulated_acceptance_is_reported():
  simulated = dataclasses.replace(RECORD, gamma=4, acceptance="simulated")
  assert "acceptance" + "simulated" in parsed([simulated]).all("dl")[0].text
  assert "acceptance" + "measured" in parsed([RECORD]).all("dl")[0].text
  sentences = [n.text for n in parsed([RECORD, simulated]).all(class_="results")[0].all("li")]
  assert ["acceptance simulated:" in sentence for sentence in sentences] == [False, True]


def test_trees_and_verifiers_are_columns_if_they_vary():
  """A tree is described by the number of its nodes at each depth."""
  tree = dataclasses.replace(RECORD, tree=[0, 0, 1, 1, 2, 4, 6, 7], verifier="BlockVerifier")
  page = parsed([RECORD, tree])
  assert [n.text for n in page.all("th")][:2] == ["verifier", "proposal"]
  assert [row[:2] for row in cells(page)] == [
    ["TokenVerifier", "chain"],
    ["BlockVerifier", "tree of 9 nodes (1-2-3-1-1-1)"],
  ]


# The charts.


def points(figure, colour):
  """Return the points of a curve: the marks of its colour without the last, that of the legend."""
  marks = [n for n in figure.all("use") if f"stroke: var(--{colour})" in n.attributes["style"]]
  return np.array([[float(n.attributes[name]) for name in "xy"] for n in marks[:-1]])


def paths(figure, *style):
  """Return the lines or shapes with the given styles, each as an array of points."""
  return [
    np.array(re.findall(r"-?[\d.]+", node.attributes["d"]), float).reshape(-1, 2)
    for node in figure.all("path")
    if all(part in node.attributes.get("style", "") for part in style)
  ]


def test_points_are_at_their_values():
  """Gamma has a linear scale. All three curves and the line at 1 share a linear scale."""
  (figure,) = parsed(SWEEP).all("figure")
  ordered = sorted(SWEEP, key=lambda r: r.gamma)
  colours = {
    "blue": "speedup",
    "green": "predicted_finite_length",
    "orange": "predicted_theorem8",
  }
  at = np.concatenate([points(figure, colour) for colour in colours])
  gammas = [r.gamma for r in ordered] * 3
  values = [getattr(r, name) for name in colours.values() for r in ordered]
  for truth, drawn, direction in ((gammas, at[:, 0], 1), (values, at[:, 1], -1)):
    slope, start = np.polyfit(truth, drawn, 1)
    assert slope * direction > 10
    np.testing.assert_allclose(drawn, start + slope * np.array(truth), atol=0.1)
  one = paths(figure, "stroke: var(--ink)")[0]
  np.testing.assert_allclose(one[:, 1], start + slope, atol=0.1)
  for colour in colours:
    # The first line of the colour is the curve, the second one is in the legend.
    drawn, _ = paths(figure, "fill: none", f"stroke: var(--{colour})")
    np.testing.assert_allclose(drawn, points(figure, colour), atol=0.05)


def test_curves_are_labelled_and_labels_do_not_overlap():
  (figure,) = parsed([RECORD]).all("figure")
  at = {n.text: (float(n.attributes["x"]), float(n.attributes["y"])) for n in figure.all("text")}
  names = "Theorem 8: 2.99", "predicted: 2.15", "measured: 2.06", "autoregressive: 1"
  assert {
    "gamma (draft tokens per round)",
    "speedup over autoregressive decoding",
    "5",
  } <= at.keys()
  for one, other in itertools.combinations(names, 2):
    assert abs(at[one][0] - at[other][0]) > 120 or abs(at[one][1] - at[other][1]) >= 12
  for colour in "blue", "green", "orange":
    assert len(points(figure, colour)) == 1  # a single gamma also has a chart


def test_drawings_stay_inside_their_frame():
  high = dataclasses.replace(RECORD, gamma=9, predicted_theorem8=123.4, speedup=0.01)
  high = dataclasses.replace(high, acceptance_by_position=[1.0, None], acceptance_rate=1.0)
  page = parsed([*SWEEP, high, OTHER], [EXAMPLE])
  assert len(page.all("svg")) == 3  # two of speedup, one of acceptance
  for drawing in page.all("svg"):
    *_, width, height = map(float, drawing.attributes["viewbox"].split())
    for node in drawing.all():
      for name, limit in dict(x=width, y=height).items():
        assert 0 <= float(node.attributes.get(name, 0)) <= limit
    for line in paths(drawing, "fill: none"):
      assert np.all(line >= 0) and np.all(line <= (width, height))


def test_chart_has_a_description_for_screen_readers():
  drawing = parsed(SWEEP).all(role="img")[0]
  assert "measured 1.21 at gamma 2, 1.45 at gamma 3" in drawing.attributes["aria-label"]


def chart_labels(page):
  """Return for each chart, by heading, the highest values of its curves by name."""
  charts = {}
  for figure in page.all("figure"):
    labels = [n.text.split(": ") for n in figure.all("text") if ": " in n.text]
    charts[figure.all("h3")[0].text] = {name: value for name, value in labels[1:]}
  return charts


def test_acceptance_lengths_have_a_chart_per_temperature_and_a_curve_per_verifier():
  length = dataclasses.replace(
    RECORD, tokens_per_round=2.5, tokens_per_round_low=2.4, tokens_per_round_high=2.6
  )
  tree = dataclasses.replace(length, tree=[0, 0, 1, 1, 2, 4], gamma=3, tokens_per_round=2.75)
  larger = dataclasses.replace(tree, tree=[*tree.tree, 5, 7], gamma=5, tokens_per_round=3.25)
  sampled = [
    dataclasses.replace(r, temperature=1.0, identical=None, verifier=verifier)
    for r in (length, tree)
    for verifier in ("TokenVerifier", "BlockVerifier")
  ]
  page = Parser(lengths_report([length, larger, tree, *sampled], [], "lengths")).open[0]
  assert chart_labels(page) == {
    "Temperature 0": {"autoregressive": "1", "chains, Token": "2.50", "trees, Token": "3.25"},
    "Temperature 1": {"autoregressive": "1", "chains, Token": "2.50", "trees, Token": "2.75"}
    | {"chains, Block": "2.50", "trees, Block": "2.75"},
  }
  drawing = page.all(role="img")[0].attributes["aria-label"]
  assert "trees, Token 2.75 at nodes 7, 3.25 at nodes 9" in drawing
  (three_curves, five_curves) = (y_ticks(figure) for figure in page.all("figure"))
  np.testing.assert_allclose(three_curves, five_curves, atol=1)
  across = [x for colour in ("orange", "blue") for x, _ in points(page.all("figure")[0], colour)]
  nodes = np.log2([6, 7, 9])
  slope, start = np.polyfit(nodes, across, 1)
  np.testing.assert_allclose(across, start + slope * nodes, atol=0.1)
  assert len(cells(page)) == 7 and "over chain" in page.text
  (single_verifier,) = chart_labels(Parser(lengths_report([tree], [], "t")).open[0]).values()
  assert single_verifier == {"autoregressive": "1", "trees": "2.75"}


# Acceptance by position.


def test_acceptance_by_position_is_shown_for_the_highest_gamma():
  longest = dataclasses.replace(
    RECORD, gamma=3, acceptance_by_position=[0.9, 0.75, None], acceptance_rate=0.85
  )
  shorter = dataclasses.replace(RECORD, gamma=2, acceptance_by_position=[0.1, 0.1])
  (figure,) = parsed([longest, shorter]).all("section")[2].all("figure")
  bars = paths(figure, "fill: var(--blue-bed)")
  widths = [np.ptp(bar[:, 0]) for bar in bars]
  start, pooled = bars[0][0, 0], paths(figure, "stroke: var(--ink)")[0][0, 0]
  np.testing.assert_allclose(widths, np.array([0.9, 0.75, 0]) * (pooled - start) / 0.85, atol=0.05)
  for words in ("90%", "75%", "all: 85%", "gamma 3", "400 rounds"):
    assert words in figure.text
  assert " of " not in figure.text.replace("of all", "")


def test_rates_of_few_draft_tokens_have_their_number():
  few = dataclasses.replace(
    RECORD, gamma=3, rounds=120, acceptance_by_position=[0.5, 0.75, None], acceptance_rate=0.6
  )
  (figure,) = parsed([few]).all("section")[2].all("figure")
  labels = [node.text for node in figure.all("text")]
  assert {"50%", "75% of 60", "- of 45"} <= {*labels}


def test_slowdown_looks_different_from_a_speedup():
  slower = dataclasses.replace(RECORD, speedup=0.83)
  (item,) = parsed([slower]).all(class_="results")[0].all("li")
  assert item.attributes["class"] == "slower"
  assert "class" not in parsed([RECORD]).all(class_="results")[0].all("li")[0].attributes


# The rounds.


def test_rounds_are_read_from_the_decode_result():
  decoded = decode_result([([EIN, MANN, STEHT], 1, HUND, 2), ([DER, ROT, EOS], 3, DER, 3)])
  assert read_rounds(decoded, 0, pieces) == (
    Round((" ein",), " Mann", (" steht",), " Hund"),
    Round((" der", " rot", " </s>"), None, (), None),
  )


@pytest.mark.parametrize(
  "round_",
  [
    ([EIN, MANN, STEHT], 2, LÄUFT, 3),
    ([HUND, MANN, STEHT], 0, EIN, 1),
    ([EIN, ROT, HUND], 3, LÄUFT, 4),
    ([ROT, EOS, HUND], 3, MANN, 2),
    ([EOS, ROT, HUND], 1, MANN, 1),
    ([ROT, HUND, MANN], 1, EOS, 2),
    ([ROT, HUND, MANN], 2, EOS, 1),
  ],
)
def test_every_draft_token_is_shown_once_and_emitted_tokens_are_the_text(round_):
  """Rows that stop while a different row continues have idle rounds."""
  idle = ([EIN, MANN, STEHT], 3, DER, 0)
  (r,) = read_rounds(decode_result([round_, idle], [round_, round_]), 0, pieces)
  guesses, n, target_token, num_emitted = round_
  rejected = () if r.rejected is None else (r.rejected,)
  assert [*r.accepted, *rejected, *r.unverified] == pieces(guesses)
  assert [*r.emitted] == pieces([*guesses[:n], target_token])[:num_emitted]


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
  assert "In a tree" not in parsed([RECORD], [EXAMPLE]).text


def test_each_round_shows_the_text_so_far():
  items = parsed([RECORD], [EXAMPLE]).all(class_="rounds")[0].all("li")
  texts = [item.all("p")[1].text for item in items]
  assert texts == [" ein Mann läuft", " ein Mann läuft im", " ein Mann läuft im Park."]
  assert [item.all(class_="now")[0].text for item in items] == ["ein Mann läuft", "im", "Park."]
  for item, count in zip(items, (3, 4, 6)):
    assert f"{count} tokens so far" in item.text
  assert "Round 2 of 3" in items[1].text and "2 target passes" in items[1].text


def test_kinds_of_tokens_have_different_marks():
  page = parsed([RECORD], [EXAMPLE])
  marks = {
    kind: {t.all("b")[0].text for t in page.all("span", kind)}
    for kind in ("accepted", "rejected", "unverified", "target")
  }
  assert all(len(m) == 1 for m in marks.values()) and len(set.union(*marks.values())) == 4


def test_each_example_can_be_selected():
  page = parsed([RECORD], [EXAMPLE, EXAMPLE._replace(source="x" * 300, rounds=())])
  options = [n.text for n in page.all("option")]
  assert len(options) == len(page.all("article")) == 2
  assert options[0] == "Temperature 0: a man runs" and len(options[1]) < 90


def test_page_without_examples_has_no_stepper():
  page = parsed([RECORD])
  assert not page.all(id="stepper") and len(page.all("section")) == 2


# Files.


def test_report_is_written_atomically(tmp_path):
  path = tmp_path / "report.html"
  write_report(path, [RECORD], [EXAMPLE], "Übersetzung")
  assert path.read_text(encoding="utf-8") == report([RECORD], [EXAMPLE], "Übersetzung")
  with pytest.raises(UnicodeEncodeError):
    write_report(path, [RECORD], [], "half a character \ud800")
  assert path.read_text(encoding="utf-8") == report([RECORD], [EXAMPLE], "Übersetzung")
  assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


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

  def invent(pair, prompts, settings, timing, references, wanted, report):
    for setting in wanted:
      measured.append(setting)
      yield dataclasses.replace(setting, speedup=1 + setting.gamma / 10)

  def decode(pair, lines, tree, settings):
    decoded.append((settings.sampling.temperature, len(lines)))
    return decode_lines(pair, lines, tree, settings)

  decode_lines = speedup.decode_lines
  monkeypatch.setattr(measuring, "_measure", invent)
  monkeypatch.setattr(speedup, "decode_lines", decode)
  return measured, decoded


def read_report(folder):
  return Parser((folder / "report.html").read_text(encoding="utf-8")).open[0]


def articles(page):
  """Return the source, the output and the cost of each text."""
  return [[n.text for n in a.children[:3]] for a in page.all("article")]


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


def test_run_of_own_models_names_them_and_no_task(tmp_path, calls, capsys):
  """The page names the models by their paths, because many folders are called target and draft."""
  pair = tiny_pair.pair().with_target(path="target")
  pair = pair.with_draft(dataclasses.replace(pair.draft, path="my/draft"))
  speedup.speedup(dataclasses.replace(pair, task=None), TEXTS, str(tmp_path), **SETTINGS)
  page = read_report(tmp_path)
  (heading,) = page.all("h1")
  assert heading.text == "Speculative decoding: target with my/draft"
  settings = [node.text for node in page.all("div")]
  assert "target checkpointtarget" in settings and "draft checkpointmy/draft" in settings
  assert not any(node.startswith("task") for node in settings)
  assert "target with my/draft, 3 texts" in capsys.readouterr().out
  assert {(r.task, r.draft_path) for r in records.read(tmp_path / "results.jsonl")} == {
    (None, "my/draft")
  }


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


def test_rounds_have_the_lenience_of_the_records(tmp_path, calls):
  settings = {**SETTINGS, "temperatures": (0.0,)}
  speedup.speedup(tiny_pair.pair(), TEXTS, str(tmp_path), **settings, lenience=1e-9)
  assert not rejected(read_report(tmp_path))


def test_quickstart_prints_and_reports_the_same_decoded_texts(tmp_path, calls, capsys):
  quickstart(tiny_pair.pair(), TEXTS, str(tmp_path), **SETTINGS, show_rounds=1, report_examples=2)
  assert calls[1] == [(0.0, 3), (1.0, 2)]
  output_text = capsys.readouterr().out.replace("\n", "")
  shown = articles(read_report(tmp_path))
  assert [source for source, *_ in shown] == [*TEXTS[:2], *TEXTS[:2]]
  for source, output, cost in shown[:2]:
    assert source in output_text and output in output_text
    assert (cost.split(";")[0] in output_text) == (source == TEXTS[0])
