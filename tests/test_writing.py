"""Files whole or not at all, one run at a time; what is no file is written to, never replaced.

No test writes to a device of this machine: as root, code that fails would replace it.
"""

import os
import pathlib
import re
import signal
import stat
import subprocess
import sys
import threading

import pytest

from specdec_jax import writing
from specdec_jax.errors import InputError
from specdec_jax.sentences import user_sentence
from specdec_jax.writing import require_apart, written

ROOT = pathlib.Path(__file__).resolve().parents[1]
BOTH = pytest.mark.parametrize("alone", [False, True], ids=["shared", "alone"])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def names():
  return sorted(os.listdir())


def write(path, text="new\n", **how):
  with written(path, **how) as file:
    file.write(text)


def read(path):
  return pathlib.Path(path).read_text("utf-8")


@BOTH
def test_a_file_is_there_when_it_is_complete(alone):
  pathlib.Path("o.txt").write_text("old\n")
  with written("o.txt", alone=alone) as file:
    file.write("ä\n")
    file.flush()
    assert read("o.txt") == "old\n"
  assert read("o.txt") == "ä\n" and names() == ["o.txt"]
  write("o.bin", b"\0\xff", mode="wb", alone=alone)
  assert pathlib.Path("o.bin").read_bytes() == b"\0\xff"


@BOTH
def test_a_file_is_on_the_disk_before_it_replaces_another(alone, monkeypatch):
  """Without that a power failure may leave an empty file under the name of the old one."""
  calls, fsync, replace = [], os.fsync, os.replace

  def recorded_fsync(fd):
    fsync(fd)
    calls.append(("fsync", os.fstat(fd).st_ino, os.fstat(fd).st_size))

  def recorded_replace(source, target):
    calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
    replace(source, target)

  monkeypatch.setattr(os, "fsync", recorded_fsync)
  monkeypatch.setattr(os, "replace", recorded_replace)
  write("o.txt", "new\n", alone=alone)
  inode = os.stat("o.txt").st_ino
  assert calls == [("fsync", inode, 4), ("replace", inode, 4)]


@BOTH
@pytest.mark.parametrize("old", [None, "old\n"], ids=["new", "existing"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError, SystemExit])
def test_what_fails_half_way_changes_nothing(alone, old, fault):
  if old:
    pathlib.Path("o.txt").write_text(old)
  with pytest.raises(fault):
    with written("o.txt", alone=alone) as file:
      file.write("half")
      raise fault
  assert names() == ["o.txt"] * bool(old) and (not old or read("o.txt") == old)


@BOTH
def test_a_users_own_files_of_such_names_stay(alone):
  own = ["o.txt.part", ".o.txt.part", ".o.txt.lock", "o.txt.lock"]
  for name in own:
    pathlib.Path(name).write_text("mine")
  write("o.txt", alone=alone)
  assert names() == sorted([*own, "o.txt"]) and {read(name) for name in own} == {"mine"}


# One run at a time.


@pytest.mark.parametrize("name", ["o.txt", "./o.txt", "link"])
def test_a_second_run_is_refused_while_the_first_is_writing(name):
  os.symlink("o.txt", "link")
  with written("o.txt", alone=True) as file:
    with pytest.raises(InputError, match=f"another run is writing to {name}; "):
      write(name, "second\n", alone=True)
    file.write("first\n")
  assert read("o.txt") == "first\n" and names() == ["link", "o.txt"]
  write(name, "third\n", alone=True)  # free again
  assert read("o.txt") == "third\n" and names() == ["link", "o.txt"]


def test_where_it_does_not_matter_both_write_a_whole_file():
  with written("o.txt") as one, written("o.txt") as other:
    one.write("1" * 100)
    other.write("2" * 10)
  assert read("o.txt") == "1" * 100 and names() == ["o.txt"]


HOLD = """
import sys, time
from specdec_jax.writing import written
def hold():
  with written("o.txt", alone=True) as file:
    file.write("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_run_that_was_killed_holds_nothing():
  run = subprocess.Popen(
    [sys.executable, "-c", f"{HOLD}hold()"],
    stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  assert run.stdout.readline() == b"ready\n"
  with pytest.raises(InputError, match="another run is writing"):
    write("o.txt", alone=True)
  run.kill()
  run.communicate()
  write("o.txt", alone=True)
  (left,) = set(names()) - {"o.txt"}  # half a file of its own name, which nothing reads
  assert re.fullmatch(r"\.o\.txt\.\w{8}\.part", left) and read("o.txt") == "new\n"


def test_a_command_that_is_told_to_end_leaves_nothing():
  pathlib.Path("holding.py").write_text(HOLD)
  pathlib.Path("hold.gin").write_text(
    "from __gin__ import dynamic_registration\nimport holding\nfrom specdec_jax import run\n"
    "run.run.experiment = @holding.hold\n"
  )
  run = subprocess.Popen(
    [sys.executable, "-m", "specdec_jax.run", "--gin_file=hold.gin"]
    + ["--jax_compilation_cache_dir="],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
  )
  assert run.stdout.readline() == b"ready\n", run.stderr.read().decode()
  run.terminate()
  assert run.communicate(timeout=60) == (b"", b"terminated\n")
  assert run.returncode == 128 + signal.SIGTERM and names() == ["hold.gin", "holding.py"]


def test_a_lock_that_its_holder_removes_just_now_is_not_taken_for_held(monkeypatch):
  """Between opening it and locking it: the file that is locked has no name any more."""
  claim, held = writing.claim, []

  def ends_just_now(file, path):
    if not held:
      os.unlink(file.name)
    claim(file, path)
    held.append(os.fstat(file.fileno()).st_nlink)

  monkeypatch.setattr(writing, "claim", ends_just_now)
  write("o.txt", alone=True)
  assert held == [0, 1] and names() == ["o.txt"]


# Modes and links.


def test_a_new_file_obeys_the_umask_and_an_old_one_keeps_its_mode():
  before = os.umask(0o027)
  try:
    write("new.txt")
    pathlib.Path("old.txt").touch()
    os.chmod("old.txt", 0o604)
    write("old.txt")
  finally:
    os.umask(before)
  assert [stat.S_IMODE(os.stat(n).st_mode) for n in ("new.txt", "old.txt")] == [0o640, 0o604]


@BOTH
def test_what_a_symbolic_link_names_is_replaced(alone):
  os.mkdir("a")
  pathlib.Path("a", "o.txt").write_text("old\n")
  os.symlink("a/o.txt", "link")
  os.symlink("a/new.txt", "dangling")
  os.symlink("link", "again")
  for name in ("link", "dangling", "again"):
    write(name, f"{name}\n", alone=alone)
  assert os.readlink("link") == "a/o.txt" and os.readlink("dangling") == "a/new.txt"
  assert read("a/o.txt") == "again\n" and read("a/new.txt") == "dangling\n"
  assert sorted(os.listdir("a")) == ["new.txt", "o.txt"]
  assert names() == ["a", "again", "dangling", "link"]


# What is no file.


def node(name, minor):
  """A device like /dev/null (3) or /dev/full (7), here."""
  try:
    os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, minor))
    os.close(os.open(name, os.O_WRONLY))
  except OSError as error:
    pytest.skip(f"no device can be made here: {error}")


@BOTH
def test_a_device_is_written_to(alone):
  node("null", 3)
  os.symlink("null", "link")
  for name in ("null", "link"):
    with written(name, alone=alone) as file:
      write(name, alone=alone)  # and not locked
      file.write("new\n")
  assert stat.S_ISCHR(os.lstat("null").st_mode) and names() == ["link", "null"]


def test_a_device_that_is_full_is_named():
  node("full", 7)
  with pytest.raises(OSError) as caught:
    write("full")
  assert user_sentence(caught.value) == (
    "cannot use 'full': No space left on device; free some space there, or write to another place."
  )
  assert stat.S_ISCHR(os.lstat("full").st_mode) and names() == ["full"]


@BOTH
def test_a_pipe_is_written_to_as_it_comes(alone):
  os.mkfifo("pipe")
  got = []
  reader = threading.Thread(target=lambda: got.extend(open("pipe")))
  reader.start()
  write("pipe", "one\ntwo\n", alone=alone)
  reader.join(10)
  assert got == ["one\n", "two\n"] and stat.S_ISFIFO(os.lstat("pipe").st_mode)


@pytest.mark.parametrize("stream", [1, 2])
def test_where_standard_output_goes_on_it_goes_on(stream):
  """As in `>> log`: what is in the file stays, whatever the stream is called."""
  pathlib.Path("log").write_text("before\n")
  os.symlink(f"/proc/self/fd/{stream}", "link")
  code = "import sys\nfrom specdec_jax.writing import written\n"
  for name in ("link", "log"):
    code += f"with written({name!r}, alone=True) as file: file.write('{name}\\n')\n"
  with open("log", "a") as log:
    subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      check=True,
      **{{1: "stdout", 2: "stderr"}[stream]: log},
    )
  assert read("log") == "before\nlink\nlog\n" and names() == ["link", "log"]


# What the user is told.


@BOTH
@pytest.mark.parametrize(
  "name, why",
  [
    ("", "No such file or directory"),
    ("gone/o.txt", "No such file or directory"),
    ("gone/", "No such file or directory"),
    ("folder", "Is a directory"),
    ("file/o.txt", "Not a directory"),
    ("loop", "Too many levels of symbolic links"),
    ("astray", "No such file or directory"),
    ("n" * 256, "File name too long"),
  ],
)
def test_where_nothing_can_be_written_the_users_own_name_is_named(name, why, alone):
  os.mkdir("folder")
  pathlib.Path("file").touch()
  os.symlink("loop", "loop")
  os.symlink("gone/o.txt", "astray")
  before = names()
  with pytest.raises(OSError) as caught:
    write(name, alone=alone)
  assert user_sentence(caught.value) == f"cannot use '{name}': {why}."
  assert names() == before


@BOTH
@pytest.mark.parametrize("error", [OSError("half a record"), FileNotFoundError("no step 3 in it")])
def test_an_error_without_a_number_keeps_its_message(error, alone):
  """Given a file name, an OSError would print its number and that name instead: None and None."""
  message = str(error)
  with pytest.raises(type(error)) as caught:
    with written("o.txt", alone=alone):
      raise error
  assert (str(caught.value), caught.value.filename) == (message, None)
  of_user = isinstance(error, FileNotFoundError)
  assert user_sentence(caught.value) == (message if of_user else None)


@BOTH
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_or_a_file_that_is_closed_to_the_user(alone):
  os.mkdir("closed", 0o555)
  pathlib.Path("read_only").touch(0o444)
  for name in ("closed/o.txt", "read_only"):
    with pytest.raises(PermissionError) as caught:
      write(name, alone=alone)
    assert user_sentence(caught.value) == f"cannot use '{name}': Permission denied."


@pytest.mark.parametrize("name", ["in.txt", "./in.txt", "soft", "hard", "folder/../in.txt"])
def test_an_output_that_is_an_input_is_seen_whatever_its_name(name):
  os.mkdir("folder")
  pathlib.Path("in.txt").write_text("text\n")
  pathlib.Path("other.txt").write_text("text\n")
  os.symlink("in.txt", "soft")
  os.link("in.txt", "hard")
  with pytest.raises(InputError, match="are the same file; name another output"):
    require_apart(name, "other.txt", "in.txt")
  with pytest.raises(InputError, match="are the same file; name another output"):
    require_apart("in.txt", name)
  require_apart("other.txt", name)
  require_apart("new.txt", name, "gone.txt")


def test_a_terminal_or_device_may_be_both():
  require_apart(os.devnull, os.devnull)
