#!/bin/sh
# The test suite in two halves side by side, since most tests keep one core busy: `scripts/test.sh PYTHON`.
# The library's half is printed when the other has ended. Fails when either does.
set -u
python=$1
log=$(mktemp)
"$python" -m pytest tests/mca_lib >"$log" 2>&1 &
library=$!
trap 'kill "$library" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
"$python" -m pytest --ignore=tests/mca_lib
flows=$?
wait "$library"
code=$?
cat "$log"
[ "$flows" -eq 0 ] && [ "$code" -eq 0 ]
