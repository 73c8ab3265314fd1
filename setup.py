"""Everything is declared in pyproject.toml; this only lays the repository's data/ into wheels, as `pdlab/_data`.

An editable install keeps reading `data/` from the checkout (see pdlab/core/paths.py), so nothing is copied there.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(Path(__file__).parent / "data", Path(self.build_lib) / "pdlab" / "_data", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithData})
