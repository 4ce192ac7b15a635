"""A rank without torch: writes its pid, waits for an order in the folder that it is given, and obeys it.

At SIGTERM it ends as a trainer does: saves, and exits with 143.
"""

import os
import signal
import sys
import time
from pathlib import Path

from mca_lib.errors import DataError
from mca_lib.rank_process import die_with_launcher, report_failure

die_with_launcher()
FOLDER, RANK = Path(sys.argv[1]).parent, os.environ["RANK"]


def _terminated(*_: object) -> None:
    (FOLDER / f"saved-{RANK}").touch()
    sys.exit(143)


signal.signal(signal.SIGTERM, _terminated)
(FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
print("rank", RANK, "has a token:", "HF_TOKEN" in os.environ, flush=True)
while not (FOLDER / "orders").exists():
    time.sleep(0.05)
order = (FOLDER / "orders").read_text()
if order == f"fail {RANK}":
    report_failure(DataError("row 3 is empty"))
    sys.exit(2)
if order != "done":
    time.sleep(1000)
