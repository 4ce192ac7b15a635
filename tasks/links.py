"""The same file under a second name, so that a work folder stays whole while its files are published.

A move would leave half of them here and half of them there when the run is killed in between.
"""

import os
import shutil
from pathlib import Path


def link(source: Path, target: Path) -> None:
    """Give a file a second name; a copy where the file system has no hard links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """`link` for every file below a folder."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link(path, target / path.relative_to(source))
