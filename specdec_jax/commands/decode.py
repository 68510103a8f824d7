"""Decoding of a dataset by several hosts; an interrupted host resumes when it is started again.

Hosts share nothing but a folder. Each host appends to its own part file, and a host that finds all
parts complete merges them. Batch i consists of `batch_size` texts from index i * batch_size on, and
host i % num_hosts decodes it. So batches and keys (`sampling.row_keys`) do not depend on the number
of hosts.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, BinaryIO, Literal

import jax

from specdec_jax.atomic_files import atomic_write, lock_file, name_in_errors, require_regular_file
from specdec_jax.commands.translate import decode_lines, output_records
from specdec_jax.core.sampling import Sampling
from specdec_jax.core.trees import Tree
from specdec_jax.errors import InputError, require_count, require_seed, require_types
from specdec_jax.loading import DecodeSettings
from specdec_jax.measurement.calibrate import resolve_tree
from specdec_jax.pairs import LoadedPair
from specdec_jax.progress import Progress

# Fields that each output line of a part file must have.
_FIELDS = dict(index=int, source=str, output=str, rounds=int, guesses=int, accepted=int)


def decode(
  pair: LoadedPair,
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
  """Decode this host's share of texts; the host that finishes last writes `outputs.jsonl`.

  `outputs.jsonl` has the outputs of all hosts, one JSON object per line, in the order of the texts:

  - `index`, `source` and `output` of the text. The output of an empty text is empty unless the
    target is decoder-only.
  - `tokens`: ids of the output, EOS included.
  - `rounds`: number of rounds, each with one target forward pass.
  - `guesses` and `accepted`: numbers of verified and of accepted draft tokens.

  Args:
    pair: target and draft; see `pairs.load_pair`.
    texts: texts of all hosts, not only of this one. A text longer than the pair's limit is
      truncated.
    output_dir: folder that all hosts share; the same command resumes an interrupted run in it.
    sampling: sampling method; argmax by default.
    gamma: draft tokens per round; 0 for autoregressive decoding; 'auto' chooses the fastest. The
      first choice is stored in the folder; all hosts use it, even if they are started again.
    batch_size: number of texts that are decoded together.
    max_new_tokens: limit for each output.
    seed: random seed of all sampling.
    lenience: lenience l of Appendix A.5; 1 is exact.
    host: (i, n), where i is the index of this host, from 0, and n the number of hosts. By default,
      each jax process is a host.
    tree: parents of a tree of draft tokens (`trees.Tree`), instead of a chain of gamma; 'auto'
      chooses the fastest tree or chain, once for all hosts.

  Raises:
    InputError: an argument is invalid, the folder has outputs of a run with different settings, a
      file in it is damaged, or this host is already running.
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
  description = dict(
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
  settings = DecodeSettings(sampling, batch_size, max_new_tokens, seed, lenience)
  sources = [text if pair.can_decode(text) else None for text in texts]
  choose = functools.partial(resolve_tree, gamma, tree, pair, sources, settings)
  if "auto" in (gamma, tree):
    digest = hashlib.sha256(json.dumps(description).encode()).hexdigest()[:12]
    shape = _agreed_tree(folder / f"tree-{digest}", number, choose)
  else:
    shape = choose()
  description |= dict(gamma=shape.depth, tree=None if shape.is_chain else [*shape.parents])
  parts = [folder / f"part-{i}-of-{num_hosts}.jsonl" for i in range(num_hosts)]
  host_of = [i // batch_size % num_hosts for i in range(len(texts))]
  own = [i for i in range(len(texts)) if host_of[i] == number]
  _require_same(folder, description)
  with _open_part(parts[number], description) as part:
    num_done = _drop_incomplete_batch(part, parts[number], batch_size, len(own))
    todo = set(own[num_done:])
    # Texts of other hosts, and those that are done, are None, which costs nothing.
    lines = [text if i in todo else None for i, text in enumerate(sources)]
    batches = decode_lines(pair, lines, shape, settings)
    with Progress() as bar:
      task = bar.add_task("decoding", total=len(own), completed=num_done)
      for first, (outputs, decoded) in zip(range(0, len(texts), batch_size), batches):
        if first in todo:
          batch = texts[first : first + batch_size]
          _append(part, parts[number], output_records(pair, first, batch, outputs, decoded))
          bar.advance(task, len(outputs))
  lines_of = [_whole_lines(path) for path in parts]
  behind = [path.name for i, path in enumerate(parts) if len(lines_of[i]) <= host_of.count(i)]
  if behind:
    print(f"host {number} of {num_hosts} is done; not complete yet: {', '.join(behind)}")
    return
  _require_same(folder, description)
  with atomic_write(folder / "outputs.jsonl", "wb") as merged:
    summary = _merge(parts, lines_of, host_of, merged)
  print(f"{summary}: {folder / 'outputs.jsonl'}")


def _agreed_tree(path: pathlib.Path, number: int, choose: Callable[[], Tree]) -> Tree:
  """Return the tree that all hosts use, from a file. The first host to choose a tree writes it.

  Args:
    path: path of the file.
    number: index of this host.
    choose: function that chooses a tree. Its result is not used if another host writes the file
      first.

  Raises:
    InputError: the file is damaged.
  """
  if not path.exists():
    own = path.with_name(f"{path.name}.part{number}")
    with atomic_write(own) as file:
      file.write(json.dumps([*choose().parents]) + "\n")
    try:
      os.link(own, path)  # atomic, and fails if another host was first
    except FileExistsError:
      pass
    finally:
      own.unlink()
  require_regular_file(path)
  try:
    parents = json.loads(path.read_bytes())
    require_types(Tree, {"parents": parents})
    return Tree(parents)
  except (ValueError, TypeError, RecursionError):  # InputError of an invalid tree is a ValueError
    raise InputError(f"{path} is damaged; delete it and start all hosts again.") from None


@contextlib.contextmanager
def _open_part(path: pathlib.Path, description: dict) -> Iterator[BinaryIO]:
  """Open and lock the part file of a host. The first line of the file describes the run.

  If the context raises InputError before the file has outputs, the file is deleted.
  """
  require_regular_file(path)
  with open(path, "ab") as part:
    lock_file(part, path)
    if not _whole_lines(path):
      part.truncate(0)
      _append(part, path, [description])
    try:
      yield part
    except InputError:
      if len(_whole_lines(path)) == 1:  # without outputs, it must not bind the next run
        path.unlink()
      raise


def _drop_incomplete_batch(part: BinaryIO, path: pathlib.Path, batch_size: int, size: int) -> int:
  """Truncate a part file after its last complete batch.

  Args:
    part: the open file.
    path: path of the file.
    batch_size: number of texts of a batch.
    size: number of texts that the complete file has.

  Returns:
    The number of texts that remain in the file.
  """
  lines = _whole_lines(path)
  num_done = len(lines) - 1
  if num_done < size:  # only the last batch may be smaller
    num_done -= num_done % batch_size
  part.truncate(sum(len(line) + 1 for line in lines[: 1 + num_done]))
  return num_done


def _require_same(folder: pathlib.Path, description: dict) -> None:
  """Raise InputError if the folder has a part file of a run with different settings."""
  for path in sorted(folder.glob("part-*.jsonl")):
    for line in _whole_lines(path)[:1]:
      other = _parsed(line, path)
      for name, value in description.items():
        if other.get(name) != value:
          raise InputError(
            f"{path} is of a run with {name} {other.get(name)!r}, and this one has "
            f"{value!r}; choose another OUTPUT_DIR, or delete that file."
          )


def _merge(
  parts: list[pathlib.Path], lines_of: list[list[bytes]], host_of: list[int], merged: IO
) -> str:
  """Merge the lines of complete part files in the order of the texts, and return a summary.

  Args:
    parts: path of each part file.
    lines_of: lines of each part file.
    host_of: index of the host that decoded each text.
    merged: open file to write to.
  """
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


def _append(part: BinaryIO, path: pathlib.Path, records: Iterable[dict]) -> None:
  """Append records to the open part file `part`, which is at `path`, and flush them to disk."""
  with name_in_errors(path):
    part.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
    part.flush()
    os.fsync(part.fileno())


def _whole_lines(path: pathlib.Path) -> list[bytes]:
  """Return the complete lines of a part file; none if the file does not exist."""
  require_regular_file(path)
  return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _parsed(line: bytes, path: pathlib.Path, fields: Mapping[str, type] | None = None) -> dict:
  """Parse a line of a part file.

  Args:
    line: a JSON object.
    path: the part file, for messages.
    fields: types of required fields. If it is given, `tokens`, a list of integers, is required too.

  Raises:
    InputError: the line is damaged.
  """
  damaged = InputError(f"{path} is damaged; delete it and start that host again.")
  try:
    record = json.loads(line)
  except (ValueError, RecursionError):  # RecursionError: brackets nested a thousand deep
    raise damaged from None
  if not isinstance(record, dict):
    raise damaged
  if fields is not None:
    tokens = record.get("tokens")
    are_ids = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not (are_ids and all(type(record.get(name)) is kind for name, kind in fields.items())):
      raise damaged
  return record
