"""Test atomic writes, locks between runs, and writing to devices, pipes and redirected streams.

No test writes to a device of this machine, because code with a bug, run as root, would replace the
device by a file.
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
from specdec_jax.user_errors import format_error

from specdec_jax import atomic_files
from specdec_jax.atomic_files import atomic_write, require_distinct_files
from specdec_jax.errors import InputError

ROOT = pathlib.Path(__file__).resolve().parents[1]
BOTH = pytest.mark.parametrize("exclusive", [False, True], ids=["shared", "exclusive"])


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path


def names():
  return sorted(os.listdir())


def write(path, text="new\n", **options):
  with atomic_write(path, **options) as file:
    file.write(text)


def read(path):
  return pathlib.Path(path).read_text("utf-8")


@BOTH
def test_file_is_replaced_when_it_is_complete(exclusive):
  pathlib.Path("o.txt").write_text("old\n")
  with atomic_write("o.txt", exclusive=exclusive) as file:
    file.write("ä\n")
    file.flush()
    assert read("o.txt") == "old\n"
  assert read("o.txt") == "ä\n" and names() == ["o.txt"]
  write("o.bin", b"\0\xff", mode="wb", exclusive=exclusive)
  assert pathlib.Path("o.bin").read_bytes() == b"\0\xff"


@BOTH
def test_file_is_synced_before_it_replaces_another(exclusive, monkeypatch):
  """Without the sync, a power failure may leave an empty file under the name of the old file."""
  calls, fsync, replace = [], os.fsync, os.replace

  def recorded_fsync(fd):
    fsync(fd)
    calls.append(("fsync", os.fstat(fd).st_ino, os.fstat(fd).st_size))

  def recorded_replace(source, target):
    calls.append(("replace", os.stat(source).st_ino, os.stat(source).st_size))
    replace(source, target)

  monkeypatch.setattr(os, "fsync", recorded_fsync)
  monkeypatch.setattr(os, "replace", recorded_replace)
  write("o.txt", "new\n", exclusive=exclusive)
  inode = os.stat("o.txt").st_ino
  assert calls == [("fsync", inode, 4), ("replace", inode, 4)]


@BOTH
@pytest.mark.parametrize("old", [None, "old\n"], ids=["new", "existing"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError, SystemExit])
def test_exception_leaves_the_file_unchanged(exclusive, old, fault):
  if old:
    pathlib.Path("o.txt").write_text(old)
  with pytest.raises(fault):
    with atomic_write("o.txt", exclusive=exclusive) as file:
      file.write("half")
      raise fault
  assert names() == ["o.txt"] * bool(old) and (not old or read("o.txt") == old)


@BOTH
def test_files_of_the_user_with_similar_names_are_kept(exclusive):
  existing = ["o.txt.part", ".o.txt.part", ".o.txt.lock", "o.txt.lock"]
  for name in existing:
    pathlib.Path(name).write_text("mine")
  write("o.txt", exclusive=exclusive)
  assert names() == sorted([*existing, "o.txt"]) and {read(name) for name in existing} == {"mine"}


# One run at a time.


@pytest.mark.parametrize("name", ["o.txt", "./o.txt", "link"])
def test_exclusive_write_fails_while_another_run_is_writing(name):
  os.symlink("o.txt", "link")
  with atomic_write("o.txt", exclusive=True) as file:
    with pytest.raises(InputError, match=f"another run is writing to {name}; "):
      write(name, "second\n", exclusive=True)
    file.write("first\n")
  assert read("o.txt") == "first\n" and names() == ["link", "o.txt"]
  write(name, "third\n", exclusive=True)  # the lock is released
  assert read("o.txt") == "third\n" and names() == ["link", "o.txt"]


def test_concurrent_shared_writes_each_write_a_complete_file():
  with atomic_write("o.txt") as first, atomic_write("o.txt") as second:
    first.write("1" * 100)
    second.write("2" * 10)
  assert read("o.txt") == "1" * 100 and names() == ["o.txt"]


HOLD = """
import sys, time
from specdec_jax.atomic_files import atomic_write
def hold():
  with atomic_write("o.txt", exclusive=True) as file:
    file.write("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def test_killed_run_releases_its_lock():
  run = subprocess.Popen(
    [sys.executable, "-c", f"{HOLD}hold()"],
    stdout=subprocess.PIPE,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
  )
  assert run.stdout.readline() == b"ready\n"
  with pytest.raises(InputError, match="another run is writing"):
    write("o.txt", exclusive=True)
  run.kill()
  run.communicate()
  write("o.txt", exclusive=True)
  (leftover,) = set(names()) - {"o.txt"}  # the incomplete file, under a unique name
  assert re.fullmatch(r"\.o\.txt\.\w{8}\.part", leftover) and read("o.txt") == "new\n"


def test_terminated_command_leaves_no_files():
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


def test_lock_file_removed_between_open_and_lock_is_opened_again(monkeypatch):
  """The holder removes its lock file between `open` and `flock`, so the locked file has no name."""
  lock_file, num_links = atomic_files.lock_file, []

  def lock_after_removal(file, path):
    if not num_links:
      os.unlink(file.name)
    lock_file(file, path)
    num_links.append(os.fstat(file.fileno()).st_nlink)

  monkeypatch.setattr(atomic_files, "lock_file", lock_after_removal)
  write("o.txt", exclusive=True)
  assert num_links == [0, 1] and names() == ["o.txt"]


# Modes and links.


def test_new_file_obeys_the_umask_and_existing_file_keeps_its_mode():
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
def test_target_of_a_symbolic_link_is_replaced(exclusive):
  os.mkdir("a")
  pathlib.Path("a", "o.txt").write_text("old\n")
  os.symlink("a/o.txt", "link")
  os.symlink("a/new.txt", "dangling")
  os.symlink("link", "again")
  for name in ("link", "dangling", "again"):
    write(name, f"{name}\n", exclusive=exclusive)
  assert os.readlink("link") == "a/o.txt" and os.readlink("dangling") == "a/new.txt"
  assert read("a/o.txt") == "again\n" and read("a/new.txt") == "dangling\n"
  assert sorted(os.listdir("a")) == ["new.txt", "o.txt"]
  assert names() == ["a", "again", "dangling", "link"]


# Devices, pipes and redirected streams.


def make_device(name, minor):
  """Create a device like /dev/null (minor 3) or /dev/full (minor 7) in the working folder."""
  try:
    os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(1, minor))
    os.close(os.open(name, os.O_WRONLY))
  except OSError as error:
    pytest.skip(f"no device can be created here: {error}")


@BOTH
def test_device_is_written_to_directly(exclusive):
  make_device("null", 3)
  os.symlink("null", "link")
  for name in ("null", "link"):
    with atomic_write(name, exclusive=exclusive) as file:
      write(name, exclusive=exclusive)  # a device is not locked
      file.write("new\n")
  assert stat.S_ISCHR(os.lstat("null").st_mode) and names() == ["link", "null"]


def test_full_device_is_named_in_the_message():
  make_device("full", 7)
  with pytest.raises(OSError) as caught:
    write("full")
  assert format_error(caught.value) == (
    "cannot use 'full': No space left on device; free some space there, or write to another place."
  )
  assert stat.S_ISCHR(os.lstat("full").st_mode) and names() == ["full"]


@BOTH
def test_pipe_is_written_to_directly(exclusive):
  os.mkfifo("pipe")
  received = []
  reader = threading.Thread(target=lambda: received.extend(open("pipe")))
  reader.start()
  write("pipe", "one\ntwo\n", exclusive=exclusive)
  reader.join(10)
  assert received == ["one\n", "two\n"] and stat.S_ISFIFO(os.lstat("pipe").st_mode)


@pytest.mark.parametrize("stream", [1, 2])
def test_file_behind_a_redirected_stream_is_appended_to(stream):
  """With `>> log`, a write to the log under any of its names keeps its previous content."""
  pathlib.Path("log").write_text("before\n")
  os.symlink(f"/proc/self/fd/{stream}", "link")
  code = "import sys\nfrom specdec_jax.atomic_files import atomic_write\n"
  for name in ("link", "log"):
    code += f"with atomic_write({name!r}, exclusive=True) as file: file.write('{name}\\n')\n"
  with open("log", "a") as log:
    subprocess.run(
      [sys.executable, "-c", code],
      env={**os.environ, "PYTHONPATH": str(ROOT)},
      check=True,
      **{{1: "stdout", 2: "stderr"}[stream]: log},
    )
  assert read("log") == "before\nlink\nlog\n" and names() == ["link", "log"]


# Error messages.


@BOTH
@pytest.mark.parametrize(
  "name, reason",
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
def test_error_names_the_path_that_the_user_gave(name, reason, exclusive):
  os.mkdir("folder")
  pathlib.Path("file").touch()
  os.symlink("loop", "loop")
  os.symlink("gone/o.txt", "astray")
  before = names()
  with pytest.raises(OSError) as caught:
    write(name, exclusive=exclusive)
  assert format_error(caught.value) == f"cannot use '{name}': {reason}."
  assert names() == before


@BOTH
@pytest.mark.parametrize("error", [OSError("half a record"), FileNotFoundError("no step 3 in it")])
def test_os_error_without_a_number_keeps_its_message(error, exclusive):
  """With a file name, an OSError prints its number and the name in place of its message."""
  message = str(error)
  with pytest.raises(type(error)) as caught:
    with atomic_write("o.txt", exclusive=exclusive):
      raise error
  assert (str(caught.value), caught.value.filename) == (message, None)
  is_user_error = isinstance(error, FileNotFoundError)
  assert format_error(caught.value) == (message if is_user_error else None)


@BOTH
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_missing_permission_is_reported(exclusive):
  os.mkdir("closed", 0o555)
  pathlib.Path("read_only").touch(0o444)
  for name in ("closed/o.txt", "read_only"):
    with pytest.raises(PermissionError) as caught:
      write(name, exclusive=exclusive)
    assert format_error(caught.value) == f"cannot use '{name}': Permission denied."


@pytest.mark.parametrize("name", ["in.txt", "./in.txt", "soft", "hard", "folder/../in.txt"])
def test_output_that_is_also_an_input_is_reported(name):
  os.mkdir("folder")
  pathlib.Path("in.txt").write_text("text\n")
  pathlib.Path("other.txt").write_text("text\n")
  os.symlink("in.txt", "soft")
  os.link("in.txt", "hard")
  with pytest.raises(InputError, match="are the same file; name another output"):
    require_distinct_files(name, "other.txt", "in.txt")
  with pytest.raises(InputError, match="are the same file; name another output"):
    require_distinct_files("in.txt", name)
  require_distinct_files("other.txt", name)
  require_distinct_files("new.txt", name, "gone.txt")


def test_device_may_be_both_output_and_input():
  require_distinct_files(os.devnull, os.devnull)
