"""What people do in the Prefect UI, in Debian's chromium, on `mcaflow server up` with SQLite and a password.

    python -m tests.acceptance.ui --folder FOLDER

The scenarios are those of `tests/ui/scenarios.py`; pictures of each page are left in FOLDER/service/pictures. Some
minutes. Ends with 1 when one goes wrong.
"""

import sys
from pathlib import Path

from tests.acceptance.harness import parser
from tests.ui.browser import missing
from tests.ui.play import AUTH, play, write_recipe
from tests.ui.service import one_machine


def main(folder: Path) -> int:
    """Returns how many scenarios went wrong."""
    if lacking := missing():
        raise SystemExit(f"NOT RUN: needs {lacking}")
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder)
    with one_machine(folder / "service", gpus=1, env=AUTH) as service:
        return play(service, recipe, "SQLite")


if __name__ == "__main__":
    sys.exit(1 if main(parser(__doc__).parse_args().folder.absolute()) else 0)
