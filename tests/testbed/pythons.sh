#!/bin/sh
# Runs the rooms in which interpreters differ (sockets, processes, files, SQLite, argparse) on every declared version of Python
# that is found and is not the one of .venv; versions that are not found are said.
# pythons.sh FOLDER [one]: an environment for each version is kept in FOLDER.  With `one` a single version runs, another one each
# hour, so that a day of runs has seen all, and the rooms that start no processes; the others are for the night.
set -u
folder=$1
which=${2:-all}
uv=.venv/bin/uv
rooms="tests/swarmsched/wire tests/agent/checkpoints tests/agent/config tests/agent/driver tests/agent/storage
  tests/agent/supervision tests/agent/task tests/agent/telemetry tests/agent/transport
  tests/client/test_run.py tests/client/test_config.py tests/client/test_shipping.py tests/client/test_signals.py"
own=$(.venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')
declared=$(sed -n 's/.*Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)
failed=""
others=""
for version in $declared; do
  [ "$version" = "$own" ] || others="$others $version"
done

# Tried, since a version manager puts names on the PATH behind which there is no interpreter.
found() { # VERSION
  for each in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    "$each" -c "import sqlite3, ssl, sys; sys.exit(sys.version_info[:2] != tuple(map(int, '$1'.split('.'))))" 2>/dev/null &&
      "$each" -c 'import sys; print(sys.executable)' && return
  done
  return 1
}

if [ "$which" = one ]; then
  rooms="tests/swarmsched/wire tests/agent/config tests/agent/driver tests/agent/storage tests/agent/transport
    tests/client/test_config.py tests/client/test_shipping.py"
  present=""
  for version in $others; do
    if found "$version" > /dev/null; then present="$present $version"; fi
  done
  # shellcheck disable=SC2086  # one word each
  set -- $present
  [ $# -eq 0 ] || shift $(($(date +%s) / 3600 % $#))
  others=${1:-}
fi

for version in $others; do
  if ! python=$(found "$version"); then
    echo "Python $version: not found, nothing was run"
    continue
  fi
  echo "Python $version: $python"
  if [ ! -e "$folder/$version/.stamp" ]; then
    "$uv" venv --quiet --clear --python "$python" "$folder/$version" &&
      "$uv" pip install --quiet --compile-bytecode --python "$folder/$version/bin/python" -c constraints.txt \
        -e '.[agent,lab]' pytest pytest-asyncio pytest-xdist hypothesis && touch "$folder/$version/.stamp" || exit 1
  fi
  # shellcheck disable=SC2086  # one word each
  "$folder/$version/bin/python" -m pytest -q -n 2 --dist loadgroup \
    -m 'not acceptance and not chaos and not breaks and not cluster and not torch' $rooms || failed="$failed $version"
done
[ -z "$failed" ] || { echo "failed on Python:$failed"; exit 1; }
