#!/bin/sh
# The test suite in two halves side by side, since most tests keep one core busy: `scripts/test.sh PYTHON`.
# One half is the folders below, the other all else; they take about as long as each other (`pytest --durations=0`).
# The folders' half is printed when the other has ended. Fails when either does.
set -u
python=$1
folders=
others=
for name in adapters checkpoint converter evaluation models platforms trainers verification; do
  folders="$folders tests/mca_lib/$name"
  others="$others --ignore=tests/mca_lib/$name"
done
log=$(mktemp)
# shellcheck disable=SC2086  # lists of words
"$python" -m pytest $folders >"$log" 2>&1 &
library=$!
trap 'kill "$library" 2>/dev/null; rm -f "$log"' EXIT
trap 'exit 130' INT TERM
# shellcheck disable=SC2086
"$python" -m pytest $others
flows=$?
wait "$library"
code=$?
cat "$log"
[ "$flows" -eq 0 ] && [ "$code" -eq 0 ]
