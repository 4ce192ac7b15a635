"""`python killed.py STEP SOURCE TARGET`: a conversion or an export that is killed half way."""

import os
import signal
import sys
from pathlib import Path

from mca_lib.converter.export import export_hf
from mca_lib.converter.stream import convert_hf


def die_half_way(done: int, total: int, **_: object) -> None:
    if done == total // 2:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    step = {"convert": convert_hf, "export": export_hf}[sys.argv[1]]
    step(Path(sys.argv[2]), Path(sys.argv[3]), progress=die_half_way)
