"""Leaves the empty `__init__.py` of four common names out of what is built; the rest is in pyproject.toml.

Another distribution may have a package of the same name, such as Hugging Face's `kernels`, and pip overwrites without a
word what two wheels both bring. Without that file the two lie side by side (PEP 420 lets ours be found without it).
"""

from setuptools import setup
from setuptools.command.build_py import build_py

SHARED_NAMES = ("engine", "kernels", "policies", "tiers")


class BuildPy(build_py):
    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if not (package in SHARED_NAMES and module[1] == "__init__")]


setup(cmdclass={"build_py": BuildPy})
