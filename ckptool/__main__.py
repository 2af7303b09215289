"""The program, as `ckptool` and as `python -m ckptool`.

Nothing is imported here, not even `__future__`, before the working directory is off the path: what lies beside a
checkpoint may be called `typing.py` or `numpy.py`, and importing it would run it. For the same reason
`ckptool/__init__.py` imports nothing.
"""

import os  # which Python has loaded before any line of ours
import sys


def main() -> int:
    """Runs the command line that the program was started with; does not return."""
    forget_working_directory()
    import gc
    import signal

    gc.disable()  # it would search imports and trees again and again; nothing here lives long enough to be collected
    if sys.argv[1:2] == ["--complete"]:  # a shell asks while somebody types: import no more than needed
        from ckptool.cli.completion import complete

        os._exit(complete(sys.argv[2:]))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Not by an exception while it starts: where a class is half made, Python raises another in its place.
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from ckptool.cli import main as run

        return run()
    except KeyboardInterrupt:
        return _interrupted()


def _interrupted(*_: object) -> int:
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(130)


def forget_working_directory() -> None:
    """Takes the working directory off the path of modules, unless `PYTHONPATH` names it in full.

    Python puts it there for `-m`, and for an empty or relative part of PYTHONPATH (`$PYTHONPATH:/x`, where it was not
    set).
    """
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if "PYTHONPATH" in os.environ else []
    if sys.flags.ignore_environment:
        entries = []
    absolute = [part for part in entries if os.path.isabs(part)]
    relative = ["", *(part for part in entries if not os.path.isabs(part))]
    length = 1 + len(entries)  # Python's own entries and the libraries follow
    front = [
        place for place in sys.path[:length] if place in absolute or not any(_is_same(place, part) for part in relative)
    ]
    sys.path[:length] = front


def _is_same(place: str, part: str) -> bool:
    """True if a place on the path is the folder that a part of PYTHONPATH names."""
    try:
        return os.path.samefile(place or os.curdir, part or os.curdir)
    except OSError:  # a folder that is gone: what is not absolute cannot be found again
        return not os.path.isabs(place)


if __name__ == "__main__":
    main()
