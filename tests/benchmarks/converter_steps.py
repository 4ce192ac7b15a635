"""`python converter_steps.py STEP SOURCE TARGET`: one measured step of the converter's benchmark, in its own process.

Prints one line of JSON: seconds of the work without the imports, the peak of resident memory, and what the work says.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mca_lib.converter.export import export_hf
from mca_lib.converter.stream import convert_hf
from tests.mca_lib.converter.limited import status


def copy(source: Path, target: Path) -> dict[str, Any]:
    """`cp`, and a sync of each file."""
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *target.iterdir()], check=True)
    return {}


STEPS = {
    "cp": copy,
    "nothing": lambda source, target: {},
    "import": convert_hf,
    "export": lambda source, target: export_hf(source, target, max_shard_size="500MB"),
}

if __name__ == "__main__":
    start = time.perf_counter()
    result = STEPS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps({**result, "seconds": time.perf_counter() - start, "peak": status("VmHWM")}))
