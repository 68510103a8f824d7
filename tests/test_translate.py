"""Test the translate command: one output line per input line, or a one-line error and no file.

The command runs in the process of the tests, except in two tests of the command line itself.
"""

import dataclasses
import fcntl
import gzip
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading

import gin
import jax
import pytest
import tiny_pair
from tiny import autoregressive_decode

from specdec_jax.commands import translate
from specdec_jax.core.decode import Decoder
from specdec_jax.core.generation_config import GenerationConfig
from specdec_jax.core.processors import TrieConstraint
from specdec_jax.core.sampling import Sampling, row_keys
from specdec_jax.data import vocabulary
from specdec_jax.data.pieces import EOS_ID
from specdec_jax.data.text import open_file
from specdec_jax.errors import InputError
from specdec_jax.files import records
from specdec_jax.run import main

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINES = [tiny_pair.SENTENCES[i] for i in (0, 14, 33, 60, 80)]
LONGEST = 32  # source tokens
LIMIT = 12  # tokens of a translation


def arguments(**macros):
  """Return the command line with the tiny pair; lower-case keys name its parts."""
  settings = {
    "load.load_pair.max_source_tokens": LONGEST,
    "MAX_NEW_TOKENS": LIMIT,
    "GAMMA": 3,
  }
  parts = dict(target="target", draft="near", vocabulary="vocabulary.model")
  for part, name in parts.items():
    settings[f"load.load_pair.{part}"] = str(tiny_pair.folder() / macros.pop(part, name))
  flags = [f"--gin.{name}={value!r}" for name, value in {**settings, **macros}.items()]
  return ["--gin_file=gin/runs/translate.gin", *flags]


def read(path):
  """Return the records of a file."""
  return [json.loads(line) for line in pathlib.Path(path).read_text("utf-8").splitlines()]


class Result:
  def __init__(self, status, out, err):
    self.status, self.lines, self.err = status, out.split("\n")[:-1], err
    assert out == "" or out.endswith("\n")
    self.said = " ".join(err.split())  # for any width of the terminal


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
  """Run the command on the given lines, or on a different INPUT."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

  def call(lines=None, **macros):
    if lines is not None:
      macros["INPUT"] = str(tmp_path / "in.txt")
      (tmp_path / "in.txt").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    try:
      status = main(["run", "--jax_compilation_cache_dir=", *arguments(**macros)])
    finally:
      gin.clear_config()
      captured = capsys.readouterr()
    return Result(status, *captured)

  call.dir = tmp_path
  return call


def targets_own(lines):
  """Return the target's autoregressive output, one line at a time."""
  pair = tiny_pair.pair(max_source_tokens=LONGEST)
  texts = []
  for line in lines:
    decoded = autoregressive_decode(
      pair.target.model,
      pair.target.params,
      pair.prompt([line]),
      row_keys(0, 0, 1),
      max_new_tokens=LIMIT,
      sampling=Sampling(0.0),
    )
    texts.append(pair.vocabulary.decode(decoded.tokens[0]))
  return texts


# One output line per input line.


def test_output_is_the_targets_translation_of_each_line(run):
  result = run(LINES)
  assert result.status == 0
  assert result.lines == targets_own(LINES)
  assert len(set(result.lines)) == len(LINES)
  assert "is empty" not in result.said and "was cut" not in result.said
  assert "5 lines, " in result.said
  assert "tokens per target pass" in result.said


def test_empty_lines_stay_empty_and_are_reported(run):
  result = run(["", LINES[0], " \t ", LINES[1], ""])
  assert result.status == 0
  assert result.lines == ["", run(LINES[:1]).lines[0], "", *run(LINES[1:2]).lines, ""]
  assert "warning: line 1 is empty; its output is left empty." in result.said
  assert "warning: 2 more lines are empty: 3, 5" in result.said


def test_prefix_is_prepended_to_lines_that_are_not_empty(run):
  prefix = "The old woman sitzt auf "
  result = run([LINES[0], "", LINES[1]], PREFIX=prefix)
  own = targets_own([prefix + line for line in LINES[:2]])
  assert result.lines == [own[0], "", own[1]] != [*targets_own(LINES[:1]), "", own[1]]


@pytest.mark.slow
def test_beam_search_returns_the_most_probable_translation(run):
  pair = tiny_pair.pair(max_source_tokens=LONGEST)
  searcher = pair.beam_searcher(3, gamma=0)
  found = [
    searcher.run(pair.params, pair.prompt([line]), max_new_tokens=LIMIT).tokens[0, 0]
    for line in LINES[:3]
  ]
  result = run([*LINES[:2], "", LINES[2]], NUM_BEAMS=3, BEAM_SCORER="t5x")
  own = [pair.vocabulary.decode(tokens.tolist()) for tokens in found]
  assert result.lines == [*own[:2], "", own[2]] and result.lines != targets_own(LINES[:2])


def test_input_is_read_with_any_line_ends_from_a_file_or_standard_input(run, monkeypatch):
  raw = f"\ufeff{LINES[0]}\r\n\n{LINES[1]}".encode()  # with a byte order mark
  (run.dir / "other.txt").write_bytes(raw)
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
  want = run([LINES[0], "", LINES[1]]).lines
  assert run(INPUT="other.txt").lines == run(INPUT="-").lines == want
  lines = "".join(f'{{"text": "{line}"}}\n' for line in (LINES[0], "", LINES[1]))
  (run.dir / "other.jsonl").write_text(lines, "utf-8-sig")
  assert run(INPUT="other.jsonl").lines == want


def test_characters_that_the_encoding_of_a_terminal_lacks_are_escaped(run, monkeypatch):
  monkeypatch.setattr(type(tiny_pair.pair().vocabulary), "decode", lambda self, ids: "M\u00e4")
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw := io.BytesIO(), "ascii"))
  assert run(LINES[:1]).status == 0
  assert raw.getvalue() == b"M\\xe4\n"


def test_empty_input_has_an_empty_output(run):
  result = run([], OUTPUT="out.txt")
  assert (result.status, result.lines) == (0, [])
  assert (run.dir / "out.txt").read_bytes() == b""


def test_line_that_is_cut_is_reported_with_its_number(run):
  pair = tiny_pair.pair(max_source_tokens=LONGEST)
  long = " ".join(LINES)
  assert len(pair.encode(LINES[0])) < LONGEST < len(pair.vocabulary.encode(long))
  result = run([LINES[0], long])
  assert result.status == 0 and result.lines == targets_own([LINES[0], long])
  kept = pair.vocabulary.decode(pair.vocabulary.encode(long)[: LONGEST - 1])
  assert long.startswith(kept) and len(kept) < len(long)
  assert f"line 2 is longer than {LONGEST} tokens" in result.said
  assert f"{kept[-20:]}'" in result.said
  assert "line 1 is" not in result.said


def test_translation_that_reaches_the_limit_is_reported(run):
  """An empty line before it must not shift the line numbers."""
  result = run(["", *LINES], OUTPUT="out.jsonl")
  decoded = [record["decoded"] for record in read("out.jsonl") if record["source"]]
  first, *others = [each["index"] + 1 for each in decoded if EOS_ID not in each["tokens"]]
  assert f"warning: line {first} was not finished" in result.said
  verb = "lines were" if len(others) > 1 else "line was"
  listed = ", ".join(map(str, others))
  assert f"warning: {len(others)} more {verb} not finished: {listed}" in result.said
  assert f"stops at the limit of {LIMIT} tokens" in result.said


def test_brackets_in_a_reported_line_are_not_markup(run):
  """The library that prints the warning would interpret brackets as markup."""
  result = run(["[/b] A [3] " * 20])
  assert result.status == 0 and len(result.lines) == 1
  assert "[/b] A [3]" in result.said


@pytest.mark.slow
def test_output_does_not_depend_on_the_batch_size(run, temperature=1.0):
  lines = [*LINES[:2], "", *LINES[2:]]  # 6: the last batch is not full
  alone = run(lines, BATCH_SIZE=1, TEMPERATURE=temperature)
  together = run(lines, BATCH_SIZE=4, TEMPERATURE=temperature)
  assert len(alone.lines) == 6 and alone.lines == together.lines

  def tokens(result):
    return result.said.split("6 lines, ")[1].split(" tokens in")[0]

  assert tokens(alone) == tokens(together)
  assert alone.lines == run(lines, TEMPERATURE=temperature, SEED=0).lines
  assert alone.lines != run(lines, TEMPERATURE=temperature, SEED=1).lines


# Standard input and output of the command itself.


def command(*args, text=b""):
  return subprocess.run(
    [sys.executable, "-m", "specdec_jax.run", *args],
    cwd=ROOT,
    input=text,
    capture_output=True,
    timeout=300,
  )


@pytest.mark.slow
def test_each_line_of_standard_input_is_answered_before_the_next_arrives(run):
  program = subprocess.Popen(
    [sys.executable, "-m", "specdec_jax.run", "--jax_compilation_cache_dir=", *arguments()],
    cwd=ROOT,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    bufsize=1,
  )
  with program:
    answers = []
    for line in (LINES[0], "", LINES[1]):
      program.stdin.write(line + "\n")
      answers.append(program.stdout.readline().removesuffix("\n"))
    rest, said = program.communicate()
  assert program.returncode == 0, said
  assert answers == run([LINES[0], "", LINES[1]]).lines and not rest
  assert "warning: line 2 is empty" in said and "3 lines, " in said


@pytest.mark.parametrize("batch_size", [1, 2])
def test_terminal_input_is_decoded_line_by_line_without_a_bar(run, monkeypatch, batch_size):
  stdin = io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode()), encoding="utf-8")
  monkeypatch.setattr(stdin, "isatty", lambda: True, raising=False)
  monkeypatch.setattr(sys, "stdin", stdin)
  read, outputs, output_line = [], records.outputs, translate.output_line

  def reading(pair, lines, **how):
    return outputs(pair, (read.append(line) or line for line in lines), **how)

  def line_of_last(record, path):
    # No line is read before the output of the one before.
    assert len(read) == record["decoded"]["index"] + 1
    return output_line(record, path)

  monkeypatch.setattr(records, "outputs", reading)
  monkeypatch.setattr(translate, "output_line", line_of_last)
  result = run(INPUT="-", BATCH_SIZE=batch_size)
  assert result.lines == targets_own(LINES) and len(read) == len(LINES)
  assert "Ctrl-D ends it" in result.said and "decoding" not in result.said


@pytest.mark.slow
def test_lines_in_another_language_are_reported(run, monkeypatch):
  monkeypatch.setattr(vocabulary, "_MIN_PIECES", 10)
  monkeypatch.setattr(translate, "MAX_SINGLE_LETTER_SHARE", 0.9)
  result = run([LINES[0], "他们在雪地里玩耍", "две собаки"])
  assert result.status == 0 and len(result.lines) == 3
  assert (
    "line 2 is unlike the training data of this pair: in its vocabulary, 100% of" in result.said
  )
  assert "warning: 1 more line is unlike the training data of this pair: 3" in result.said


@pytest.mark.slow
def test_exit_status_of_invalid_input():
  result = command(*arguments(INPUT="gone.txt"))
  assert result.returncode == 2 and not result.stdout
  assert result.stderr.decode() == "error: There is no text file at gone.txt.\n"


# An output file is written completely or not at all, and interrupted runs resume.


def test_output_to_a_file(run):
  result = run([*LINES, ""], OUTPUT="out.txt")
  assert (result.status, result.lines) == (0, [])
  text = (run.dir / "out.txt").read_text(encoding="utf-8")
  assert text.split("\n") == [*run([*LINES, ""]).lines, ""]
  assert sorted(os.listdir()) == ["in.txt", "out.txt"]


def test_line_ends_in_an_output_do_not_end_its_line(run, monkeypatch):
  words = type(tiny_pair.pair().vocabulary)
  monkeypatch.setattr(words, "decode", lambda self, ids: "a\rb\r\nc\nd")
  assert run(LINES[:2], OUTPUT="out.txt").status == 0
  assert (run.dir / "out.txt").read_bytes() == b"a b c d\n" * 2


@pytest.fixture
def interrupt(run, monkeypatch):
  """Run the command until a number of lines are written."""

  def call(lines=LINES, num_lines=1, **macros):
    output_line = translate.output_line

    def fail(record, path):
      if record["decoded"]["index"] == num_lines:
        raise InputError("interrupted.")
      return output_line(record, path)

    with monkeypatch.context() as patch:
      patch.setattr(translate, "output_line", fail)
      result = run(lines, OUTPUT="out.txt", **macros)
    assert result.status == 2 and "interrupted." in result.err
    return result

  return call


@pytest.mark.parametrize(
  "macros",
  [
    {"TEMPERATURE": 1.0, "BATCH_SIZE": 2},
    pytest.param({"NUM_BEAMS": 2, "BATCH_SIZE": 2}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_interrupted_run_is_resumed(run, interrupt, macros):
  (run.dir / "out.txt").write_text("what was there before\n")
  lines = [*LINES[:2], "", *LINES[2:]]
  interrupt(lines, num_done := 3, **macros)
  assert (run.dir / "out.txt").read_text() == "what was there before\n"
  with (run.dir / "out.txt.part").open("ab") as part:
    part.write("Ein M\u00e4".encode()[:-1])  # a line that was not written completely
  result = run(lines, OUTPUT="out.txt", **macros)
  assert f"resuming an interrupted run after line {num_done}." in result.said
  assert f"{len(lines) - num_done} lines, " in result.said
  assert (run.dir / "out.txt").read_text().splitlines() == run(lines, **macros).lines
  assert sorted(os.listdir()) == ["in.txt", "out.txt"]


@pytest.mark.slow
def test_killed_run_is_resumed(run):
  """SIGKILL ends the process while it decodes JSON Lines in a batch."""
  (run.dir / "in.txt").write_text("".join(line + "\n" for line in LINES))
  macros = dict(TEMPERATURE=1.0, BATCH_SIZE=2, INPUT="in.txt", OUTPUT="out.jsonl")
  code = f"""
import os, signal
from specdec_jax import run
from specdec_jax.commands import translate
line = translate.output_line
def line_or_end(record, path):
  is_early = record["decoded"]["index"] < 2
  return line(record, path) if is_early else os.kill(os.getpid(), signal.SIGKILL)
translate.output_line = line_or_end
run.main(["run", "--jax_compilation_cache_dir=", *{arguments(**macros)}])
"""
  killed = subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, cwd=".")
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  assert sorted(os.listdir()) == ["in.txt", "out.jsonl.part"]
  assert "resuming an interrupted run after line" in run(**macros).said
  resumed = (run.dir / "out.jsonl").read_text()
  assert run(**macros).status == 0
  assert resumed == (run.dir / "out.jsonl").read_text() and resumed.count("\n") == len(LINES)


@pytest.mark.parametrize("change", ["settings", "input", "target", "near", "source language"])
def test_interrupted_run_of_other_settings_input_or_models_stops(
  run, interrupt, monkeypatch, change
):
  """Other weights are those of the other model, at the same path."""
  parts = {part: str(run.dir / part) for part in ("target", "near")}
  for part, path in parts.items():
    shutil.copytree(tiny_pair.folder() / part, path)
  macros = dict(target=parts["target"], draft=parts["near"])
  interrupt(**macros)
  before = (run.dir / "out.txt.part").read_bytes()
  lines = LINES
  if change == "settings":
    macros["SEED"] = 2
  elif change == "input":
    lines = [*LINES[:-1], "A man"]
  elif change == "source language":  # each source begins with its token
    words = type(tiny_pair.pair().vocabulary)
    encode = words.encode
    monkeypatch.setattr(words, "encode", lambda self, text: [5, *encode(self, text)])
  else:
    shutil.rmtree(parts[change])
    (other,) = parts.keys() - {change}
    shutil.copytree(tiny_pair.folder() / other, parts[change])
  result = run(lines, OUTPUT="out.txt", **macros)
  assert result.status == 2 and "out.txt.part has the lines of an interrupted run" in result.said
  assert "resume it, or delete the file" in result.said
  assert (run.dir / "out.txt.part").read_bytes() == before and not (run.dir / "out.txt").exists()
  (run.dir / "out.txt.part").unlink()
  assert run(lines, OUTPUT="out.txt", **macros).status == 0


def test_other_file_with_the_name_of_the_part_is_kept(run, decoded):
  (run.dir / "out.txt.part").write_text("mine")
  result = run(LINES, OUTPUT="out.txt")
  assert result.status == 2 and "delete the file" in result.said and not decoded
  assert (run.dir / "out.txt.part").read_text() == "mine"


def test_run_that_fails_before_the_first_line_leaves_no_file(run, interrupt):
  interrupt(num_lines=0)
  assert os.listdir() == ["in.txt"]


FIELDS = {"id": "M\u00e4 \ud83d", "index": 7, "output": "gold", "tokens": [1], "rounds": None}


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "jsonl.gz", "NDJSON.GZ"])
def test_records_have_the_fields_of_their_source_and_the_output(run, suffix):
  """`FIELDS` has half of a surrogate pair, which UTF-8 cannot encode, and names of counts."""
  objects = [{**FIELDS, "source": LINES[0]}, {"text": ""}, {"source": LINES[1], "text": "no"}]
  with open_file(f"in.{suffix}", "wt") as file:
    file.writelines(json.dumps(each) + "\n" for each in objects)
  assert run(INPUT=f"in.{suffix}", OUTPUT=f"out.{suffix}", BATCH_SIZE=2).status == 0
  with open_file(f"out.{suffix}", "rt") as file:
    raw = file.read()
  found = [*map(json.loads, raw.splitlines())]
  assert "M\u00e4" in raw and [{**each, "decoded": 0} for each in found] == [
    {**each, "decoded": 0} for each in objects
  ]
  decoded = [each["decoded"] for each in found]
  assert [each["index"] for each in decoded] == [0, 1, 2]
  own = targets_own([LINES[0], LINES[1]])
  assert [each["text"] for each in decoded] == [own[0], "", own[1]]
  words = tiny_pair.pair(max_source_tokens=LONGEST).vocabulary
  for each in decoded:
    assert words.decode(each["tokens"]) == each["text"]
    assert each["accepted"] <= each["draft_tokens"] <= 3 * each["rounds"]


def test_record_of_a_line_has_the_line_without_the_prefix(run):
  assert run(LINES[:1], OUTPUT="out.jsonl", PREFIX="The ").status == 0
  (record,) = read("out.jsonl")
  assert {*record} == {"source", "decoded"} and record["source"] == LINES[0]
  assert [record["decoded"]["text"]] == targets_own([f"The {LINES[0]}"])


def test_compressed_text_is_written(run):
  assert run(LINES, OUTPUT="out.txt.gz").status == 0
  assert gzip.decompress((run.dir / "out.txt.gz").read_bytes()).decode().splitlines() == [
    *targets_own(LINES)
  ]
  assert sorted(os.listdir()) == ["in.txt", "out.txt.gz"]


@pytest.mark.parametrize(
  "line, message",
  [
    ('["A man."]', "line 2 is not a JSON object with a text as 'source' or 'text'."),
    ('{"source": ', "line 2 is not a JSON object with a text as 'source' or 'text': Expecting"),
    ("[" * 10**5, "line 2 is not a JSON object .*: maximum recursion depth exceeded"),
    ('{"text": "a \\ud83d"}', r"line 2 has half of a surrogate pair \('\\ud83d'\) at position 2"),
    ('{"text": "a \\u0000"}', "line 2 has a NUL character at position 2"),
    ('{"source": "A dog.", "decoded": 0}', "line 2 has the field 'decoded'"),
  ],
  ids=lambda text: text[:20],
)
def test_line_that_is_no_source_is_reported_before_decoding(run, decoded, line, message):
  (run.dir / "in.jsonl").write_text(f'{{"source": "A man."}}\n{line}\n')
  result = run(INPUT="in.jsonl", OUTPUT="out.jsonl")
  assert result.status == 2 and re.search(message, result.said) and not decoded
  assert os.listdir() == ["in.jsonl"]


def test_file_that_is_replaced_is_named(run):
  assert "replaces" not in run(LINES[:1], OUTPUT="out.txt").said
  assert "out.txt exists, and this run replaces it." in run(LINES[:1], OUTPUT="out.txt").said


def test_invalid_run_from_standard_input_replaces_no_file(run, monkeypatch):
  (run.dir / "out.txt").write_text("mine")
  monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"A man\n"), encoding="utf-8"))
  assert run(INPUT="-", OUTPUT="out.txt", NUM_RETURN_SEQUENCES=2, TEMPERATURE=1.0).status == 2
  assert (run.dir / "out.txt").read_text() == "mine"


def doubled(logits, tokens, length):
  return 2 * logits


@pytest.mark.parametrize(
  "first, second, message",
  [
    ([[20, 30], [21]], [[20, 31], [21]], "lines .* with logits_processor 'TrieConstraint"),
    (doubled, doubled, "<function doubled .* cannot be compared .*no run with it can be resumed"),
    ([[20, 30], [21]], [[20, 30], [21]], None),
  ],
  ids=["other arrays", "function", "same arrays"],
)
def test_run_is_resumed_with_the_same_processor_only(run, monkeypatch, first, second, message):
  """The processors are arguments in Python; a list has the sequences of a trie."""
  (run.dir / "in.txt").write_text("".join(line + "\n" for line in LINES))
  pair, output_line = tiny_pair.pair(), translate.output_line
  shapes = []

  def write(allowed):
    processor = allowed
    if isinstance(allowed, list):
      processor = TrieConstraint.of(allowed, pair.vocabulary.eos_id)
      shapes.append([x.shape for x in jax.tree.leaves(processor)])
    config = GenerationConfig(max_new_tokens=4, logits_processor=processor)
    translate.translate(pair, "in.txt", "out.txt", config, gamma=2)

  def fail(record, path):
    if record["decoded"]["index"] == 2:
      raise InputError("interrupted.")
    return output_line(record, path)

  with monkeypatch.context() as patch, pytest.raises(InputError, match="interrupted"):
    patch.setattr(translate, "output_line", fail)
    write(first)
  before = (run.dir / "out.txt.part").read_bytes()
  if message is None:
    write(second)
    assert (run.dir / "out.txt").read_text().count("\n") == len(LINES)
  else:
    with pytest.raises(InputError, match=message):
      write(second)
    assert (run.dir / "out.txt.part").read_bytes() == before and before.count(b"\n") == 3
  assert shapes[:1] == shapes[1:]


@pytest.fixture
def decoded(monkeypatch):
  """Return the arguments of each call of the decoder."""
  decode, calls = Decoder.run, []

  def note(*args, **kwargs):
    return calls.append(args) or decode(*args, **kwargs)

  monkeypatch.setattr(Decoder, "run", note)
  return calls


def test_two_runs_cannot_write_the_same_output(run, decoded):
  with open("out.txt.part", "w") as part:
    fcntl.flock(part, fcntl.LOCK_EX)
    result = run(LINES, OUTPUT="out.txt", GAMMA="auto")
  assert result.status == 2 and not decoded
  assert result.err == "error: another run is writing to out.txt; wait for it to end.\n"
  assert run(LINES[:1], OUTPUT="out.txt").status == 0


@pytest.mark.parametrize("name", ["in.txt", "./in.txt", "soft", "hard"])
def test_input_cannot_be_the_output(run, decoded, name):
  (run.dir / "in.txt").write_text("A man\n")
  os.symlink("in.txt", "soft")
  os.link("in.txt", "hard")
  result = run(INPUT="in.txt", OUTPUT=name)
  assert result.status == 2 and not decoded
  assert result.err == f"error: {name} is the input and the output; name another output.\n"
  assert (run.dir / "in.txt").read_text() == "A man\n"


def test_line_breaks_in_an_output_stay_within_its_line(run, monkeypatch):
  outputs = records.outputs

  def with_breaks(*args, **how):
    for output in outputs(*args, **how):
      yield dataclasses.replace(output, text=f"{output}\r\nx\ry\nz")

  monkeypatch.setattr(records, "outputs", with_breaks)
  assert run(LINES, OUTPUT="out.txt").status == 0
  raw = (run.dir / "out.txt").read_bytes().decode()
  assert raw.splitlines() == [f"{text} x y z" for text in targets_own(LINES)]


def test_output_to_a_pipe(run):
  os.mkfifo("pipe")
  got = []
  reader = threading.Thread(target=lambda: got.extend(open("pipe", encoding="utf-8")))
  reader.start()
  assert run(LINES[:1], OUTPUT="pipe").status == 0
  reader.join(10)
  assert [line.rstrip("\n") for line in got] == run(LINES[:1]).lines
  assert sorted(os.listdir()) == ["in.txt", "pipe"]


@pytest.mark.slow
def test_forced_token_starts_each_output(run):
  """The outputs are those of autoregressive decoding, and differ from those without the setting."""
  setting = {"FORCED_BOS_TOKEN_ID": 20}
  outputs = []
  for name, settings in (("plain", {}), ("gamma_0", {"GAMMA": 0, **setting}), ("gamma_3", setting)):
    assert run(LINES, OUTPUT=f"{name}.jsonl", **settings).status == 0
    outputs.append([record["decoded"]["tokens"] for record in read(f"{name}.jsonl")])
  plain, autoregressive, speculative = outputs
  assert {row[0] for row in speculative} == {20} and speculative == autoregressive != plain


# Invalid input.


@pytest.mark.parametrize(
  "macros, words",
  [
    ({"GAMMA": 2.5}, "gamma is 2.5"),
    ({"OUTPUT": "out.jsonl.bz2"}, "out.jsonl.bz2 has the name of a compressed file"),
    ({"PREFIX": "a\udcff"}, "prefix has half of a surrogate pair ('\\udcff') at position 1"),
    ({"TOP_P": 1.5}, "top_p is 1.5"),
    ({"BATCH_SIZE": 0}, "batch_size is 0"),
    ({"MAX_NEW_TOKENS": 0}, "max_new_tokens is 0"),
    ({"INPUT": "gone.txt"}, "no text file at gone.txt"),
    ({"INPUT": "."}, "no text file at ."),
    ({"draft": "small"}, "vocabulary of 60 tokens"),
    ({"OUTPUT": "nosuch/out.txt"}, "nosuch/out.txt"),
    ({"OUTPUT": ""}, "No such file or directory: ''"),
    ({"OUTPUT": "folder"}, "folder"),
    ({"NUM_BEAMS": 0}, "num_beams is 0"),
    ({"NUM_BEAMS": 2, "TEMPERATURE": 1.0}, "a beam search does not sample"),
    ({"NUM_BEAMS": 2, "TREE": [0, 0]}, "a beam search has no tree"),
    ({"NUM_RETURN_SEQUENCES": 2, "TEMPERATURE": 1.0}, "no setting --num_return_sequences"),
    ({"NODES": 9}, "draft_beams and nodes are for a beam search"),
  ],
  ids=str,
)
def test_invalid_input_prints_a_one_line_error(run, macros, words):
  (run.dir / "folder").mkdir()
  (run.dir / "in.txt").write_text(LINES[0] + "\n")
  result = run(**{"INPUT": "in.txt", "OUTPUT": "out.txt", **macros})
  assert result.status == 2 and result.lines == []
  (sentence,) = result.err.split("\n")[-2:-1]
  assert result.err.strip() == sentence  # a progress bar may leave an empty line before it
  assert sentence.startswith("error: ") and words in sentence
  assert sorted(os.listdir()) == ["folder", "in.txt"] and not os.listdir("folder")


def test_input_that_is_not_text_is_reported(run):
  (run.dir / "in.txt").write_bytes(b"M\xe4dchen\n")
  result = run(INPUT="in.txt", OUTPUT="out.txt")
  assert result.status == 2 and result.err.startswith("error: in.txt is not UTF-8 text")
  assert os.listdir() == ["in.txt"]
