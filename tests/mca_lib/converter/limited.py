"""`python limited.py STEP SOURCE TARGET ALLOWANCE`: convert or export with ALLOWANCE bytes beyond the imports.

The limit is the kernel's (RLIMIT_DATA: heap and anonymous mappings, not the pages of files), so that exceeding it is an
error of the process and not a figure to be looked at. Prints the peak of resident memory before and after, and the
bytes that were read.
"""

import json
import resource
import sys
from pathlib import Path

from mca_lib.converter.export import export_hf
from mca_lib.converter.stream import convert_hf


def status(field: str) -> int:
    """Bytes, of this process: VmData, VmHWM, RssAnon."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    step, source, target, allowance = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    before = {"imported_peak": status("VmHWM"), "imported_data": status("VmData")}
    limit = status("VmData") + allowance
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if step == "hold":  # the whole model in memory, which must not fit
        from mca_lib.converter.hf_source import HfSource

        hf = HfSource(source)
        kept = [hf.slice(name)[:] for name in hf.tensors]
        result = {"bytes": sum(tensor.nbytes for tensor in kept)}
    elif step == "convert":
        result = convert_hf(source, target)
    else:
        result = export_hf(source, target, max_shard_size="20MB")
    print(json.dumps({**before, "limit": limit, "peak": status("VmHWM"), "bytes": result["bytes"]}))
