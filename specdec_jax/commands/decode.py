"""A dataset decoded by many hosts, each its share; one that dies is started again and goes on.

Hosts share a folder and nothing else. Each appends to a part of its own, and whoever finds all
parts complete merges them. Batch i is that of texts i * batch_size and on, and host i % num_hosts
decodes it: the same batches with the same keys (`sampling.row_keys`), however many hosts there are.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, BinaryIO, Literal

import jax

from specdec_jax.atomic_files import atomic_write, lock_file, name_in_errors, require_regular_file
from specdec_jax.commands.translate import decode_lines
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree
from specdec_jax.core.types import DecodeResult
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.pairs import Pair
from specdec_jax.progress import Progress

# Fields of a part's lines that merging them reads.
_FIELDS = dict(index=int, source=str, output=str, rounds=int, guesses=int, accepted=int)


def decode(
  pair: Pair,
  texts: Sequence[str],
  output_dir: str,
  sampling: Sampling = Sampling(temperature=0.0),
  gamma: int | Literal["auto"] = 5,
  batch_size: int = 8,
  max_new_tokens: int = 128,
  seed: int = 0,
  lenience: float = 1.0,
  host: tuple[int, int] | None = None,
  tree: Sequence[int] | Literal["auto"] | None = None,
) -> None:
  """Decode this host's share of texts; if it is the last, merge all into `outputs.jsonl`.

  A line of it is a JSON object: index, source and output of a text; the output's tokens, EOS
  included; rounds, of which each is one pass of the target; guesses that were judged, and how many
  of them were accepted. They come in the order of the texts. An empty text has an empty
  output, unless the target is decoder-only and makes a text of its own of it.

  Args:
    pair: what decodes; see `pairs.load_pair`.
    texts: all of them, on every host; longer ones than the pair's limit are cut.
    output_dir: a folder that all hosts see; the same command in it again goes on.
    sampling: argmax unless told.
    gamma: guesses a round; 'auto' finds the best first, which may be plain decoding. All hosts, and
      a host that is started again, take what the first of them found, kept in a file there.
    batch_size: texts decoded together.
    max_new_tokens: limit for each.
    seed: of all sampling.
    lenience: l of Appendix A.5; 1 for exactness.
    host: (i, n) for number i, from 0, of n hosts; by default each process of jax is one.
    tree: parents of a tree of guesses (`trees.Tree`) instead of a chain of gamma; 'auto' finds the
      best of both first, once for all hosts.

  Raises:
    InputError: the folder holds texts decoded in another way, or this host is at work already.
  """
  require_types(decode, locals())
  require_seed(seed)
  require_count("max_new_tokens", max_new_tokens)
  pair.require_batch_size(batch_size)
  number, num_hosts = host or (jax.process_index(), jax.process_count())
  if not 0 <= number < num_hosts:
    raise InputError(f"host is {host}; it must be (i, n), with i from 0 to n - 1.")
  folder = pathlib.Path(output_dir)
  folder.mkdir(parents=True, exist_ok=True)
  settings = dict(
    task=pair.task,
    target=pair.target_name,
    draft=pair.draft_name,
    dtype=pair.dtype,
    kernels=pair.kernels,
    max_source_tokens=pair.max_source_tokens,
    **dataclasses.asdict(sampling),
    gamma=gamma,
    tree=tree,
    lenience=lenience,
    batch_size=batch_size,
    max_new_tokens=max_new_tokens,
    seed=seed,
    num_hosts=num_hosts,
    num_texts=len(texts),
    inputs=hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12],
  )
  settings_of_auto = sampling, batch_size, max_new_tokens, seed, lenience
  asked = [text if pair.reads(text) else None for text in texts]
  choose = functools.partial(resolve_tree, gamma, tree, pair, asked, *settings_of_auto)
  if "auto" in (gamma, tree):
    these = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    guesses = _agreed(folder / f"tree-{these}", number, choose)
  else:
    guesses = choose()
  settings |= dict(gamma=guesses.depth, tree=None if guesses.is_chain else [*guesses.parents])
  parts = [folder / f"part-{i}-of-{num_hosts}.jsonl" for i in range(num_hosts)]
  host_of = [i // batch_size % num_hosts for i in range(len(texts))]
  own = [i for i in range(len(texts)) if host_of[i] == number]
  _require_same(folder, settings)
  with _open_part(parts[number], settings) as part:
    num_done = _drop_half_a_batch(part, parts[number], batch_size, len(own))
    todo = set(own[num_done:])
    # None costs nothing: what is other hosts', and what is done.
    lines = [text if i in todo else None for i, text in enumerate(asked)]
    batches = decode_lines(
      pair, lines, sampling, guesses, batch_size, max_new_tokens, seed, lenience
    )
    with Progress() as bar:
      task = bar.add_task("decoding", total=len(own), completed=num_done)
      for at, (outputs, decoded) in zip(range(0, len(texts), batch_size), batches):
        if at in todo:
          _append(
            part, parts[number], *_records(pair, at, texts[at : at + batch_size], outputs, decoded)
          )
          bar.advance(task, len(outputs))
  lines_of = [_whole_lines(path) for path in parts]
  behind = [path.name for i, path in enumerate(parts) if len(lines_of[i]) <= host_of.count(i)]
  if behind:
    print(f"host {number} of {num_hosts} is done; not complete yet: {', '.join(behind)}")
    return
  _require_same(folder, settings)
  with atomic_write(folder / "outputs.jsonl", "wb") as merged:
    summary = _merge(parts, lines_of, host_of, merged)
  print(f"{summary}: {folder / 'outputs.jsonl'}")


def _agreed(path: pathlib.Path, number: int, choose: Callable[[], Tree]) -> Tree:
  """What the file holds, or `choose()` put there, unless another host is first to do so."""
  if not path.exists():
    own = path.with_name(f"{path.name}.part{number}")
    with atomic_write(own) as file:
      file.write(json.dumps([*choose().parents]) + "\n")
    try:
      os.link(own, path)  # whole or not at all, and never over another's
    except FileExistsError:
      pass
    finally:
      own.unlink()
  require_regular_file(path)
  try:
    parents = json.loads(path.read_bytes())
    require_types(Tree, {"parents": parents})
    return Tree(parents)
  except (ValueError, TypeError, RecursionError):  # also an InputError of such a tree
    raise InputError(f"{path} is damaged; delete it and start all hosts again.") from None


def _records(pair: Pair, at: int, sources, outputs, decoded: list[DecodeResult]) -> Iterator[dict]:
  """A batch as records, one a text; `decoded` has no rows for those that were left empty."""
  rows = (
    (d, row, *counts)
    for d in decoded
    for row, counts in enumerate(zip(*d.rounds.acceptance_counts()))
  )
  for index, (source, output) in enumerate(zip(sources, outputs), at):
    record = dict(index=index, source=source, output=output)
    if not pair.reads(source):
      yield dict(record, tokens=[], rounds=0, guesses=0, accepted=0)
      continue
    d, row, accepted, rejected = next(rows)
    yield dict(
      record,
      tokens=d.tokens[row, : d.lengths[row]].tolist(),
      rounds=int((d.rounds.num_emitted[:, row] > 0).sum()),
      guesses=int(accepted + rejected),
      accepted=int(accepted),
    )


@contextlib.contextmanager
def _open_part(path: pathlib.Path, settings: dict) -> Iterator[BinaryIO]:
  """A host's part for this run alone while the context lasts; its first line says the settings."""
  require_regular_file(path)
  with open(path, "ab") as part:
    lock_file(part, path)
    if not _whole_lines(path):
      part.truncate(0)
      _append(part, path, settings)
    try:
      yield part
    except InputError:
      if len(_whole_lines(path)) == 1:  # or it would refuse the settings that are mended
        path.unlink()
      raise


def _drop_half_a_batch(part: BinaryIO, path: pathlib.Path, batch_size: int, size: int) -> int:
  """How many of its `size` texts a part holds, once a batch that it holds some of is dropped."""
  lines = _whole_lines(path)
  num_done = len(lines) - 1
  if num_done < size:  # only the last batch of all may be smaller
    num_done -= num_done % batch_size
  part.truncate(sum(len(line) + 1 for line in lines[: 1 + num_done]))
  return num_done


def _require_same(folder: pathlib.Path, settings: dict) -> None:
  """Raise InputError if a part in the folder is of a run with other settings."""
  for path in sorted(folder.glob("part-*.jsonl")):
    for line in _whole_lines(path)[:1]:
      found = _parsed(line, path)
      for name in settings:
        if found.get(name) != settings[name]:
          raise InputError(
            f"{path} is of a run with {name} {found.get(name)!r}, and this one has "
            f"{settings[name]!r}; choose another OUTPUT_DIR, or delete that file."
          )


def _merge(parts, lines_of: list[list[bytes]], host_of: list[int], merged: IO) -> str:
  """Write complete parts in the order of the texts; what they come to, in a sentence."""
  lines = [iter(part_lines[1:]) for part_lines in lines_of]
  num_tokens = rounds = guesses = accepted = 0
  for index, owner in enumerate(host_of):
    line = next(lines[owner])
    record = _parsed(line, parts[owner], _FIELDS)
    if record.get("index") != index:
      raise InputError(f"{parts[owner]} lacks text {index}; delete it and start that host again.")
    num_tokens += len(record["tokens"])
    rounds += record["rounds"]
    guesses += record["guesses"]
    accepted += record["accepted"]
    merged.write(line + b"\n")
  return (
    f"{len(host_of)} texts, {num_tokens} tokens, {num_tokens / max(1, rounds):.2f} tokens per "
    f"target pass, acceptance rate {accepted / max(1, guesses):.3f}"
  )


def _append(part: BinaryIO, path: pathlib.Path, *records: dict) -> None:
  """Add lines to the part at `path`, on disk when this returns."""
  with name_in_errors(path):
    part.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    part.flush()
    os.fsync(part.fileno())


def _whole_lines(path: pathlib.Path) -> list[bytes]:
  """The lines of a part, if it is there: not half a one that a killed run left at its end."""
  require_regular_file(path)
  return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _parsed(line: bytes, path: pathlib.Path, fields: Mapping[str, type] | None = None) -> dict:
  """The JSON object that a line of a part is, with at least these fields, of these types.

  With fields, `tokens` is one more: whole numbers.
  """
  damaged = InputError(f"{path} is damaged; delete it and start that host again.")
  try:
    found = json.loads(line)
  except (ValueError, RecursionError):  # the latter: brackets a thousand deep
    raise damaged from None
  if not isinstance(found, dict):
    raise damaged
  if fields is not None:
    tokens = found.get("tokens")
    whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not (whole and all(type(found.get(name)) is kind for name, kind in fields.items())):
      raise damaged
  return found
