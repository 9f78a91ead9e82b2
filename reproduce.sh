#!/usr/bin/env bash
#
# From nothing to tables and a figure.
#
#   ./reproduce.sh          train a ViT under data parallelism, GPipe and 1F1B, and under torch's own
#                           versions of the three, measure them side by side, print the tables,
#                           draw the figure.
#   ./reproduce.sh test     check the code: ruff, mypy, import-linter, pytest.
#
# Hardware   2 CPU cores, 8 GB of memory, 8 GB of disk. No GPU, no key; network for pip only.
# Time       installation about 4 minutes, once; tier "smoke" under 10 minutes on 2 cores;
#            the tests under 15 minutes. A run that is recorded as done is not repeated.
#
# Options (of `pipebench matrix`, which does the work):
#   --tier T        which runs; the default is smoke
#   --only GLOB     of these, the ones whose name matches
#   --list          print the runs, start none
#   --dry-run       say what would be done with each, start none
#   --fresh         put earlier records of these runs aside and start over
#   --jobs N        N untimed runs at a time; timed ones always run alone
#   --set KEY=VALUE change a key of the configs, e.g. train.epochs=2; may be repeated
#   --data-root DIR where CIFAR-100 and other data lie that pipebench does not make itself
# What follows `test` goes to pytest:  ./reproduce.sh test -k validator
#
# Exit code: 0 done, 1 a run or a check failed, 2 wrong usage or nothing to run it with,
# 3 interrupted; otherwise that of the step that failed.

set -euo pipefail
trap 'exit 3' INT

here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
lock=$here/requirements/lock-py311-linux-x86_64.txt
venv=$here/.venv
stamp=$venv/complete

# A module of the caller's PYTHONPATH must not stand in for one of the versions named in the lock.
unset PYTHONPATH PYTHONHOME

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "reproduce.sh: $1"
    exit "${2:-2}"
}

# ---- which Python ----------------------------------------------------------------------------

# 3.11 before others, because the lock is made for it.
find_python() {
    local name found=
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3.11 python3 python3.14 python3.13 python3.12
    fi
    for name in "$@"; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found=$name
        "$name" -c 'import ensurepip, venv' 2>/dev/null || continue
        printf '%s\n' "$name"
        return
    done
    [ -z "$found" ] ||
        fail "$found has no venv module: install python3-venv (Debian, Ubuntu), or name another Python with PYTHON=/path/to/python"
    fail "none of '$*' is a Python 3.11 or newer: install python3.11, or name one with PYTHON=/path/to/python"
}

has_lock() {
    "$1" -c 'import platform, sys
here = (sys.version_info[:2], platform.system(), platform.machine())
sys.exit(here != ((3, 11), "Linux", "x86_64"))'
}

# ---- what is installed -----------------------------------------------------------------------

# The stamp is written last and removed first: an installation that was cut off has none and is made
# anew. It names the folder too, because a virtual environment does not survive a move.
fingerprint() {
    printf '%s\n' "$here"
    cat -- "$lock" "$here/pyproject.toml" | cksum
}

runs() { [ -f "$stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; }
installed() { runs && [ "$(cat -- "$stamp")" = "$(fingerprint)" ]; }

pip() {
    "$venv/bin/python" -m pip install -qq --no-input --disable-pip-version-check "$@" >&2 ||
        fail "pip could not install into $venv (its own words are above); run again once that is mended" 1
}

install() {
    local python
    if ! runs || [ "$(sed 1q -- "$stamp")" != "$here" ]; then
        python=$(find_python)
        rm -f -- "$stamp"
        "$python" -m venv --clear "$venv" >&2 || fail "$python could not make $venv" 1
    fi
    rm -f -- "$stamp"
    if has_lock "$venv/bin/python"; then
        say "Installing the locked versions into .venv: about 4 minutes and 6 GB, once."
        pip --requirement "$lock"
        pip --no-deps --no-build-isolation --editable "$here"
    else
        say "The lock is for Python 3.11 on Linux x86_64, this is $("$venv/bin/python" -c \
            'import platform as p; print("Python", p.python_version(), "on", p.system(), p.machine())')."
        say "Installing what pyproject.toml allows instead: other versions than those tested."
        pip --editable "$here[test]"
    fi
    fingerprint >"$stamp"
}

# ---- what to do ------------------------------------------------------------------------------

check() {
    cd "$here"
    # One thread a process: the tests start several, and on 2 cores more threads only get in the way.
    export OMP_NUM_THREADS=1
    "$venv/bin/ruff" check .
    "$venv/bin/ruff" format --check .
    "$venv/bin/mypy"
    "$venv/bin/lint-imports" --no-logo
    "$venv/bin/python" -m pytest "$@"
}

reproduce() {
    local code=0 drawn=0
    "$venv/bin/pipebench" matrix "$@" || code=$?
    # A failed run is a row of the tables, so they are printed all the same.
    [ "$code" -le 1 ] || exit "$code"
    [ -z "$look" ] || exit "$code"
    "$venv/bin/pipebench" tables
    # What was chosen may have no benchmark in it, and then there is nothing to draw (2).
    "$venv/bin/pipebench" figure throughput || drawn=$?
    [ "$drawn" -eq 0 ] || [ "$drawn$chosen" = 2yes ] || exit "$drawn"
    exit "$code"
}

# Usage is checked before anything is installed.
tier=smoke look='' chosen=''
if [ "${1:-}" = test ]; then
    shift
    installed || install
    check "$@"
    exit
fi
given=("$@")
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help)
            sed -n '3,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
    esac
    case $1 in
        --tier | --tier=*) tier='' chosen=yes ;;
        --only | --only=*) chosen=yes ;;
        --list | --dry-run) look=yes ;;
        --jobs | --jobs=* | --set | --set=* | --data-root | --data-root=* | --fresh) ;;
        *) fail "unknown argument '$1'; see ./reproduce.sh --help" ;;
    esac
    case $1 in
        --tier | --only | --jobs | --set | --data-root)
            [ $# -ge 2 ] || fail "$1 needs a value; see ./reproduce.sh --help"
            shift
            ;;
    esac
    shift
done
installed || install
reproduce ${tier:+--tier "$tier"} ${given[@]+"${given[@]}"}
