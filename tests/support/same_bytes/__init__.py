"""Compares two versions of the program: same exit codes, same JSON, same bytes written, for every verb and fixture.

    python -m tests.support.same_bytes OLD [--only VERB]... [--cases TEXT] [--every N] [-v]

OLD is a checkout of another commit with its own `.venv`, or the python of one. Each side is one process that runs all
command lines by `ckptool.cli.main`. Words of messages may differ: they are counted by themselves. Files lie in
`build/same_bytes`.
"""
