"""Build script, which adds the folder `gin/` and the commit to the package."""

import importlib.util
import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithGinFiles(build_py):
  """Build command that adds a copy of `gin/`, and a file with the commit.

  The copy is in a subfolder, because a top-level `gin` is the package of gin-config. An
  editable installation gets neither.
  """

  def run(self):
    super().run()
    if not self.editable_mode:
      package = pathlib.Path(self.build_lib) / "specdec_jax"
      self.copy_tree("gin", str(package / "gin_files" / "gin"))
      spec = importlib.util.spec_from_file_location("machine", "specdec_jax/measure/machine.py")
      machine = importlib.util.module_from_spec(spec)
      spec.loader.exec_module(machine)
      (package / "commit.txt").write_text(f"{machine.commit() or ''}\n")


setup(cmdclass={"build_py": BuildWithGinFiles})
