"""Vocabularies and lines of text: what goes in comes out, and what cannot is said."""

import gzip
import io
import os
import sys

import pytest
import tiny_pair

from specdec_jax.data.text import read_lines
from specdec_jax.data.vocabulary import EOS_ID, PAD_ID, Vocabulary, padded, train_vocabulary
from specdec_jax.errors import InputError


@pytest.fixture(scope="module")
def words():
  return Vocabulary(str(tiny_pair.folder() / "vocabulary.model"))


# Vocabulary.


def test_encoded_text_decodes_to_itself(words):
  for text in [*tiny_pair.SENTENCES, "Fuß [3]", ""]:
    ids = words.encode(text)
    assert ids[-1] == EOS_ID and EOS_ID not in ids[:-1] and PAD_ID not in ids
    assert all(0 <= i < len(words) for i in ids)
    assert words.decode(ids) == text


def test_texts_of_markup_are_no_control_tokens(words):
  for text in ("</s>", "<pad>"):
    assert not {EOS_ID, PAD_ID} & set(words.encode(text)[:-1])


def test_decoding_ends_at_eos(words):
  ids = words.encode("A man")
  assert words.decode(ids + words.encode("Two dogs")) == "A man"
  assert words.decode([EOS_ID, *ids]) == ""


def test_decoding_skips_padding_and_ids_past_the_vocabulary(words):
  one, *rest = words.encode("A man")
  assert words.decode([PAD_ID, one, len(words), PAD_ID, 10**6, *rest, PAD_ID]) == "A man"
  assert words.decode([]) == words.decode([PAD_ID]) == ""


def test_pieces_join_to_the_text(words):
  ids = words.encode("A man runs")
  pieces = words.pieces(ids)
  assert len(pieces) == len(ids) and pieces[-1] == "</s>"
  assert "".join(pieces[:-1]).strip() == "A man runs"


def test_ids_past_the_vocabulary_read_as_numbers(words):
  size = len(words)
  assert words.pieces([size, EOS_ID, size + 31]) == [f"<{size}>", "</s>", f"<{size + 31}>"]


def test_sentinels_end_the_vocabulary_from_the_last_id_down(words):
  more, size = Vocabulary(words.path, extra_ids=3), len(words)
  assert len(more) == size + 3 and more.fingerprint() != words.fingerprint()
  ids = more.encode("A <extra_id_0> runs <extra_id_2>")
  assert ids[-2] == size and size + 2 in ids
  assert more.decode(ids) == "A <extra_id_0> runs <extra_id_2>"
  assert more.pieces([size, size + 1, size + 2, size + 3]) == [
    *(f" <extra_id_{i}>" for i in (2, 1, 0)),
    f"<{size + 3}>",
  ]
  assert more.encode("A man runs") == words.encode("A man runs")


def test_fingerprint_tells_vocabularies_apart(words, tmp_path):
  again, other = str(tmp_path / "again.model"), str(tmp_path / "other.model")
  for path, texts in ((again, tiny_pair.SENTENCES), (other, tiny_pair.SENTENCES[::2])):
    train_vocabulary(texts, path, 50)
  assert Vocabulary(again).fingerprint() != words.fingerprint()
  assert Vocabulary(again).fingerprint() != Vocabulary(other).fingerprint()
  train_vocabulary(tiny_pair.SENTENCES, other, 50)
  assert Vocabulary(again).fingerprint() == Vocabulary(other).fingerprint()


def test_control_tokens_have_t5s_ids(words):
  assert words.pieces([0, 1, 2]) == ["<pad>", "</s>", "<unk>"]


def test_missing_vocabulary(tmp_path):
  with pytest.raises(InputError, match="no vocabulary at .*gone.model"):
    Vocabulary(str(tmp_path / "gone.model"))


@pytest.mark.parametrize("content", [b"", b"this is no SentencePiece model"], ids=["empty", "text"])
def test_file_that_is_no_vocabulary(tmp_path, content):
  path = tmp_path / "bad.model"
  path.write_bytes(content)
  with pytest.raises(InputError, match="bad.model"):
    Vocabulary(str(path))


def test_vocabulary_that_cannot_be_fitted_is_told_and_leaves_no_file(tmp_path):
  with pytest.raises(InputError, match="5000"):
    train_vocabulary(["a b c"], str(tmp_path / "v.model"), 5000)
  assert not list(tmp_path.iterdir())


def test_padded():
  assert padded([[5, 1], [], [2, 3, 1]], 3).tolist() == [[5, 1, 0], [0, 0, 0], [2, 3, 1]]


# Lines.


@pytest.fixture
def lines_of(tmp_path, monkeypatch):
  """Lines of raw bytes, by one of four ways: a file, a gzipped file, a pipe, standard input."""

  def read(way, raw):
    if way == "stdin":
      monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
      return read_lines("-")
    if way == "pipe":  # as the shell's <(...) gives it
      end, start = os.pipe()
      with open(start, "wb") as file:
        file.write(raw)
      with open(end):
        return read_lines(f"/dev/fd/{end}")
    path = tmp_path / ("text.gz" if way == "gzip" else "text")
    path.write_bytes(gzip.compress(raw) if way == "gzip" else raw)
    return read_lines(str(path))

  return read


WAYS = ("file", "gzip", "pipe", "stdin")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
  "raw, lines",
  [
    (b"one\ntwo\n", ["one", "two"]),
    (b"one\ntwo", ["one", "two"]),
    (b"one\r\ntwo\r\n", ["one", "two"]),
    (b"\n\none\n \n\n", ["", "", "one", " ", ""]),
    (b"", []),
    (b"\n", [""]),
    ("Mädchen \U0001f600\n".encode(), ["Mädchen \U0001f600"]),
    ("a\u0085b\u2028c\x0cd\x1ee\n".encode(), ["a\u0085b\u2028c\x0cd\x1ee"]),
    (b"a\rb\n", ["a\rb"]),
  ],
  ids=["plain", "no last newline", "CRLF", "empty lines", "nothing", "a newline"]
  + ["beyond ASCII", "what str.splitlines would split", "carriage return inside"],
)
def test_only_a_newline_ends_a_line(lines_of, way, raw, lines):
  assert lines_of(way, raw) == lines


@pytest.mark.parametrize("way", WAYS)
def test_bytes_that_are_not_utf8(lines_of, way):
  with pytest.raises(InputError, match="not UTF-8"):
    lines_of(way, b"good\nM\xe4dchen\n")


@pytest.mark.parametrize("name", ["gone.txt", "gone.txt.gz", "folder"])
def test_missing_text_file(tmp_path, name):
  (tmp_path / "folder").mkdir()
  with pytest.raises(InputError, match=f"no text file at .*{name}"):
    read_lines(str(tmp_path / name))


GZIPPED = gzip.compress(b"hello\nworld\n" * 50, mtime=0)


@pytest.mark.parametrize(
  "raw",
  [
    b"plain text",
    GZIPPED[:-12],
    GZIPPED[:20] + b"\xff\xff" + GZIPPED[22:],
    GZIPPED[:-8] + b"x" * 8,
  ],
  ids=["not gzipped", "cut off", "damaged inside", "wrong checksum"],
)
def test_damaged_gzip_file(tmp_path, raw):
  path = tmp_path / "text.gz"
  path.write_bytes(raw)
  with pytest.raises(InputError, match="text.gz"):
    read_lines(str(path))


def test_a_limit_takes_the_first_lines(tmp_path):
  (tmp_path / "text").write_text("one\ntwo\nthree\n")
  assert read_lines(str(tmp_path / "text"), limit=2) == ["one", "two"]
  assert read_lines(str(tmp_path / "text"), limit=9) == ["one", "two", "three"]
  with pytest.raises(InputError, match="limit is 0"):
    read_lines(str(tmp_path / "text"), limit=0)


def test_a_prefix_stands_before_each_line_that_is_not_empty(tmp_path):
  (tmp_path / "text").write_text("one\r\n\ntwo\n")
  assert read_lines(str(tmp_path / "text"), prefix="say: ") == ["say: one", "", "say: two"]
