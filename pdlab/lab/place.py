"""Where the project is published: the one place that holds the repository's name, and what follows from it.

Whoever publishes or forks the lab changes REPOSITORY (and REF for a release) and runs `python -m pdlab.lab.place`, which
writes badges and setup cells of all notebooks anew, and the links of the README and of the executed copies; a test holds the
notebooks to this file.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

REPOSITORY = "OWNER/REPO"  # the placeholder until this is published
REF = "main"
_PLACEHOLDER = "OWNER" + "/REPO"  # in two pieces, so that replacing the name everywhere leaves it
_HINT = f"  # {_PLACEHOLDER}: put the published address here" if REPOSITORY == _PLACEHOLDER else ""

# The same in every notebook. It works where pdlab is installed, where the notebook lies in a checkout, and where there is
# nothing but git (Colab). What the clone still lacks is installed by setup() itself.
SETUP_CELL = f"""\
try:
    from pdlab.lab import setup
except ModuleNotFoundError:  # not installed: use the checkout around this notebook, or (Colab) clone one
    import pathlib, subprocess, sys
    here = pathlib.Path.cwd()
    root = next((d for d in (here, *here.parents) if (d / "pdlab/lab").is_dir()), here / "pdlab-checkout")
    if not root.exists():
        url = "https://github.com/{REPOSITORY}"{_HINT}
        subprocess.run(["git", "clone", "--quiet", "--depth=1", "--branch={REF}", url, str(root)], check=True)
    sys.path.insert(0, str(root))
    from pdlab.lab import setup
lab = setup()  # on Colab installs what is missing; prints the machine, the dtype and the profile it chose"""


def badge(notebook: str) -> str:
    """Markdown of the Colab badge for a path inside notebooks/."""
    link = f"https://colab.research.google.com/github/{REPOSITORY}/blob/{REF}/notebooks/{notebook}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({link})"


_BADGE = re.compile(r"\[!\[Open in Colab\]\([^)]*\)\]\([^)]*\)")


def stamp(notebook: Path, root: Path) -> bool:
    """Writes the badge and the setup cell of one notebook anew; True when that changed the file."""
    before = notebook.read_text(encoding="utf-8")
    content = json.loads(before)
    for cell in content["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = _BADGE.sub(badge(notebook.relative_to(root).as_posix()), source)
        elif "lab = setup()" in source:
            source = SETUP_CELL
        cell["source"] = source.splitlines(keepends=True)
    after = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    if after != before:
        notebook.write_text(after, encoding="utf-8")
    return after != before


_ADDRESS = re.compile(
    r"(?<=colab\.research\.google\.com/github/)[\w.-]+/[\w.-]+(?=/blob/)|(?<=git clone https://github\.com/)[\w.-]+/[\w.-]+"
)


def stamp_links(page: Path) -> bool:
    """Writes the repository's name anew into the badges' links and the clone command of a text file; True when it changed."""
    before = page.read_text(encoding="utf-8")
    after = _ADDRESS.sub(REPOSITORY, before)
    if after != before:
        page.write_text(after, encoding="utf-8")
    return after != before


def main() -> int:
    from pdlab.core.paths import checkout_dir

    root = checkout_dir()
    if root is None:
        print("there is no checkout here; notebooks are stamped in one")
        return 2
    for path in sorted((root / "notebooks").rglob("*.ipynb")):
        if ".ipynb_checkpoints" not in path.parts and stamp(path, root / "notebooks"):
            print(f"stamped {path.relative_to(root)}")
    for path in [root / "README.md", *sorted((root / "docs" / "executed").rglob("*.html"))]:
        if path.is_file() and stamp_links(path):
            print(f"stamped {path.relative_to(root)}")
    if REPOSITORY == _PLACEHOLDER:
        print("the repository has no published name yet: write it as REPOSITORY in pdlab/lab/place.py and run this again")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
