#!/bin/sh
# Makes .venv from uv.lock, with the groups named as arguments. Does nothing when it is already up to date.
#
# Looks for a Python 3.12 or newer that really runs (a version manager's shim may exist and fail), puts uv into the
# environment when there is none, and compiles bytecode once: without it every rank pays 10 s more at import.
set -eu
cd "$(dirname "$0")/.."

venv=${MCAFLOW_VENV:-.venv}
stamp=$venv/.mcaflow-stamp
want=$(cat uv.lock pyproject.toml "$0" | cksum; echo "$@")
[ -x "$venv/bin/mcaflow" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

suitable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

find_python() {
  for candidate in "${PYTHON:-}" python3.12 python3.13 python3 python; do
    if [ -n "$candidate" ] && suitable "$candidate"; then command -v "$candidate"; return; fi
  done
  root=${PYENV_ROOT:-$HOME/.pyenv}
  for candidate in "$root"/versions/3.12.*/bin/python "$root"/versions/3.13.*/bin/python /opt/python*/bin/python3.12; do
    if [ -x "$candidate" ] && suitable "$candidate"; then echo "$candidate"; return; fi
  done
}

find_uv() {
  for candidate in "$venv/bin/uv" uv; do
    if "$candidate" --version >/dev/null 2>&1; then command -v "$candidate"; return; fi
  done
}

if ! [ -x "$venv/bin/python" ] || ! suitable "$venv/bin/python"; then
  python=$(find_python)
  if [ -n "$python" ]; then
    echo "setup: $venv with $python"
    "$python" -m venv --clear "$venv"
  elif [ -n "$(find_uv)" ]; then
    echo "setup: $venv with a Python that uv brings"
    "$(find_uv)" venv --clear --seed --python 3.12 "$venv"
  else
    echo "setup: no Python 3.12 or 3.13 that runs; install one, or name it: make PYTHON=/path/to/python3.12" >&2
    exit 1
  fi
fi
if [ -z "$(find_uv)" ]; then
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv>=0.9"
fi

groups=$(for group in "$@"; do printf -- '--group %s ' "$group"; done)
echo "setup: installing the packages of uv.lock (about 6 GB on disk the first time)"
# shellcheck disable=SC2086  # $groups is a list of words
UV_PROJECT_ENVIRONMENT=$venv "$(find_uv)" sync --quiet --frozen --inexact --compile-bytecode --python "$venv/bin/python" $groups
printf '%s' "$want" > "$stamp"
