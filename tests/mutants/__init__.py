"""How much the tests notice: `make mutants`.

Seeded edits of operators, constants and branches, spread over the rooms of the package by their lines. Each is made in
a clone, and the tests that run the edited function are run until one fails, or until they have had two minutes of
processor time. `list.jsonl` says of each what killed it: the judge of every change of the tests.

    python -m tests.mutants            the edits in the list that were killed, each of which must be killed again
                                       where its code stands now: first by the test that did it
    python -m tests.mutants --write    edits drawn anew from the code as it is; no room's killed share may fall by more
                                       than three points

Which tests run an edited function is found in one run of all of them, where those functions say when they are run.
"""
