#!/bin/sh
# check_venv.sh VENV PYTHON ORIGIN: checks that make can use the virtual environment VENV, or create it with PYTHON.
# ORIGIN is "file" if PYTHON is the Makefile's default and not the user's choice.
#
# A virtual environment works only at the path where it was made, with the Python that made it. A broken one is
# reported and left to `make clean`, since it is 12 GB and may be in use.
venv=$1 python=$2 origin=$3

version() {
    "$@" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

refuse() {
    echo "make: $*" >&2
    exit 1
}

too_old() {
    case $1 in 3.[0-9] | 3.10 | [12].*) ;; *) false ;; esac
}

case $PWD in
*' '*) echo "make: $PWD contains a space: tvm-ffi compiles no C++ there, torch is used, and tests fail" >&2 ;;
esac
anew="\`make clean\` removes it, then \`make venv PYTHON=...\` makes it anew"
wanted=$(version $python)
if [ -z "$wanted" ] && { [ "$origin" != file ] || [ ! -e "$venv" ]; }; then
    refuse "PYTHON=$python does not run: name a Python of 3.11 or later"
fi
if [ ! -e "$venv/bin/python" ] && [ ! -L "$venv/bin/python" ]; then
    too_old "$wanted" && refuse "PYTHON=$python is Python $wanted: name one of 3.11 or later"
    exit 0
fi

found=$(version "$venv/bin/python") || refuse "$venv is broken, its Python does not run: $anew"
too_old "$found" && refuse "$venv has Python $found, and 3.11 or later is needed: $anew"
# The first line of its programs has the absolute path of its Python.
made=
if [ -e "$venv/bin/pip" ]; then
    read -r made <"$venv/bin/pip"
fi
case $made in
'#!'*/bin/python*)
    made=${made#'#!'}
    made=${made%/bin/python*}
    [ "$made" -ef "$venv" ] || refuse "$venv was made as $made and does not work here: $anew"
    ;;
esac
if [ "$found" != "${wanted:-$found}" ]; then
    [ "$origin" = file ] || refuse "$venv has Python $found, and PYTHON=$python is Python $wanted: $anew"
    echo "make: $venv keeps its Python $found; $python is Python $wanted" >&2
fi
