"""``python -m mca_lib.verification docs/models [FAMILY ...]``: write the families' cards and their index.

Exit code: 0 all verified, 1 something is not, 2 a family's name is wrong.
"""

import argparse
import sys
from pathlib import Path

from mca_lib.errors import UserError
from mca_lib.models.registry import FAMILIES, family_of
from mca_lib.ranks import RankError
from mca_lib.verification.families import write_family_cards


def main(argv: list[str] | None = None) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m mca_lib.verification", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", help="default: all")
    arguments = parser.parse_args(argv)
    try:
        chosen = [family_of(name).model_type for name in arguments.families] or list(FAMILIES)
        problems = write_family_cards(arguments.folder, chosen, lambda text: print(text, flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"error: {error.summary}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"not verified: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
