"""The record of what the program does: every verb over fixtures, traps, the lab, engines' folders, whole and broken,
hostile files and odd usage.

    python -m tests.golden                      runs everything and compares it with the record (make golden)
    python -m tests.golden --write              makes the record anew
    python -m tests.golden --against OLD        compares with another version of the program, value by value
        [--only VERB]... [--cases TEXT] [--every N] [--jobs N] [-v]

Differences are shown by kind: one example each, and how many there are like it; -v lists all.

`record/VERB.txt` has a line for each case and a word for each command line, in the order of `commands.py`:

    CODE[error-code]:JSON:WORDS:FILES

that is the exit code, the code of the error, and the beginnings of the SHA-256 of the JSON without texts of several
words, of those texts and all others that people read, and of the names, permissions and bytes of what was written; `-`
where there is nothing. `record/cases.txt` has the digest of each case's input, which torch makes where it is not in the
repository: a case that is made otherwise on another machine is left out, and counted. What a word stood for is seen
with `--against`, given a checkout of the commit before with its own `.venv`, or the python of one. The corpus beside
the checkout has a record of its own, `record-corpus/`; without it its cases are left out.

Each case is run by `ckptool.cli.main` in a process that runs many, in a folder of its own in `build/golden`.
"""
