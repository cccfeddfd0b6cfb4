# Sourced by the other scripts: sets `python` to a Python 3.10-3.13 of this machine, or ends with one line that says what to do.
# PYTHON=/path/to/python overrides the search. A candidate is run, not only looked up: version managers leave stubs that do not work.

python_fits() {
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        python=$PYTHON
        python_fits "$python" && return 0
        echo "error: PYTHON=$PYTHON is not a working Python 3.10-3.13. Name another one, or unset PYTHON." >&2
        exit 2
    fi
    for python in python3 python3.11 python3.12 python3.13 python3.10; do
        python_fits "$python" && return 0
    done
    found=$(python3 --version 2>/dev/null || echo "no python3")
    echo "error: No Python 3.10-3.13 on the PATH (found: $found). Install one, or name it: PYTHON=/path/to/python3.12 $0" >&2
    exit 2
}
