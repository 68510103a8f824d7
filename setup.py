"""Build script that adds a copy of `gin/` to the package, which pyproject.toml describes."""

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithGinFiles(build_py):
  """What is installed finds them without a checkout. A package `gin` would shadow the library."""

  def run(self):
    super().run()
    if not self.editable_mode:
      self.copy_tree("gin", f"{self.build_lib}/specdec_jax/gin_files/gin")


setup(cmdclass={"build_py": BuildWithGinFiles})
