"""Test atomic writes."""

import os
import pathlib
import stat
import threading

import pytest

from specdec_jax.core.atomic_files import atomic_write


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)


def write(path, text="new\n", mode="w"):
  with atomic_write(path, mode) as file:
    file.write(text)


def read(path):
  return pathlib.Path(path).read_text("utf-8")


def test_file_is_replaced_when_it_is_complete():
  pathlib.Path("o.txt").write_text("old\n")
  os.chmod("o.txt", 0o604)
  with atomic_write("o.txt") as file:
    file.write("ä\n")
    file.flush()
    assert read("o.txt") == "old\n"
  assert read("o.txt") == "ä\n" and os.listdir() == ["o.txt"]
  assert stat.S_IMODE(os.stat("o.txt").st_mode) == 0o604
  write("o.bin", b"\0\xff", "wb")
  assert pathlib.Path("o.bin").read_bytes() == b"\0\xff"


@pytest.mark.parametrize("old", [None, "old\n"], ids=["new", "existing"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, ValueError])
def test_exception_leaves_the_file_unchanged(old, fault):
  if old:
    pathlib.Path("o.txt").write_text(old)
  with pytest.raises(fault):
    with atomic_write("o.txt") as file:
      file.write("half")
      raise fault
  assert os.listdir() == ["o.txt"] * bool(old) and (not old or read("o.txt") == old)


def test_target_of_a_symbolic_link_is_replaced():
  os.mkdir("a")
  os.symlink("a/o.txt", "link")
  write("link")
  write("link", "again\n")
  assert os.readlink("link") == "a/o.txt" and read("a/o.txt") == "again\n"


def test_pipe_is_written_to_directly():
  os.mkfifo("pipe")
  received = []
  reader = threading.Thread(target=lambda: received.extend(open("pipe")))
  reader.start()
  write("pipe", "one\ntwo\n")
  reader.join(10)
  assert received == ["one\n", "two\n"] and stat.S_ISFIFO(os.lstat("pipe").st_mode)


def test_file_that_cannot_be_written_is_an_os_error():
  os.mkdir("folder")
  for name in ("gone/o.txt", "folder"):
    with pytest.raises(OSError, match=name):
      write(name)
