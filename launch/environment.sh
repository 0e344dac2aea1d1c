# Sourced by quickstart and test: a virtual environment in the repository, made and kept up to date.
# Variables read: PYTHON (the interpreter to make it with), PARALLEL_ATTN_VENV (its folder, default .venv).
# Sets: root (the repository), venv (the environment's folder), venv_python.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${PARALLEL_ATTN_VENV:-$root/.venv}"
venv_python="$venv/bin/python"

say() { printf '%s: %s\n' "launch/$(basename "$0")" "$*" >&2; }

fail() {
    say "$@"
    exit 1
}

# Prints the first interpreter that is new enough; PYTHON, when set, is the only candidate.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "${PYTHON:+PYTHON=$PYTHON: }no Python >= 3.10 found: install one, or name it: PYTHON=/path/to/python3 $0"
}

# Makes the environment where it is missing or half made.
make_environment() {
    local python="$1" name
    "$venv_python" -m pip --version >/dev/null 2>&1 && return
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "could not make $venv (see above)"
    "$venv_python" -m pip --version >/dev/null 2>&1 || fail "$venv does not work: remove it and run again"
}

# What an installation depends on: the project's file, where the project stands, the extra, the interpreter.
fingerprint() {
    "$venv_python" - "$root" "$1" <<'PYTHON'
import hashlib, pathlib, sys
root, extra = sys.argv[1:]
facts = [pathlib.Path(root, "pyproject.toml").read_text(), root, extra, sys.version, sys.prefix]
print(hashlib.sha256("\0".join(facts).encode()).hexdigest())
PYTHON
}

# ensure_environment [EXTRA]: afterwards the project is installed, editable, with that extra. Two at once are harmless.
ensure_environment() {
    local extra="${1:-}" python wanted stamp
    stamp="$venv/installed-${extra:-base}"
    python="$(find_python)" || exit 1
    # Debian ships python3 without these; they come as a package of their own.
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null && [ ! -x "$venv_python" ]; then
        fail "$python cannot make virtual environments; on Debian or Ubuntu: apt install $(venv_package "$python")"
    fi
    mkdir -p "$venv"
    exec 9>"$venv/lock"
    # flock on the shell's own descriptor, taken through Python: there is no flock command on a Mac.
    if ! "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null; then
        say "waiting for another installation into $venv"
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    fi
    make_environment "$python"
    wanted="$(fingerprint "$extra")"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "installing into $venv (the first time takes minutes)"
        # pip's own settings (mirrors, proxies, constraints) hold: nothing is passed that would override them.
        "$venv_python" -m pip install --quiet --disable-pip-version-check --editable "$root${extra:+[$extra]}" ||
            fail "pip could not install the dependencies (its reason is above); run again once the network or pip's settings allow it"
        printf '%s\n' "$wanted" >"$stamp"
        fingerprint "" >"$venv/installed-base" # an extra brings everything that the project alone needs
    fi
    exec 9>&- # or what is started next would hold the lock
}

venv_package() {
    local name
    name="$(basename "$1")"
    case "$name" in
        python3.*) printf '%s-venv\n' "$name" ;;
        *) printf 'python3-venv\n' ;;
    esac
}
